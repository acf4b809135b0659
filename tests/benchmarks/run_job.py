"""The same training as `state_job.py`, within `State.run`: its process outlives changes of its group."""

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
    trace = Trace(options.trace, 0, 0)
    state.on_regroup(trace.begin_group)
    data = torch.ones(BATCH, 64)

    def train() -> None:
        state.restore()
        while True:
            take_step(model, optimizer, data)
            trace.finish(state.step + 1)  # before the commit, which may return in another group
            state.commit()

    state.run(train)


if __name__ == "__main__":
    main()
