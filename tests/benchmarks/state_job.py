"""The same training as `plain_job.py`, with `trainer_runtime` and its defaults. It is ended from outside."""

from __future__ import annotations

import torch
from job_parts import BATCH, Trace, build_net, parse_options, set_up, take_step
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr


def main() -> None:
    """Train, from the newest checkpoint on."""
    options = parse_options()
    tr.init()
    model = DistributedDataParallel(build_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = tr.State(model=model, optimizer=optimizer)
    set_up()
    state.restore()
    trace = Trace(options.trace, tr.rank(), tr.world_size())
    data = torch.ones(BATCH, 64)
    while True:
        take_step(model, optimizer, data)
        state.commit()
        trace.finish(state.step)


if __name__ == "__main__":
    main()
