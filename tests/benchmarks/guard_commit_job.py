"""Steps with `commit()` and the same steps without: `guard_commit_job.py OUT KIND REPETITIONS`. Runs under an agent.

Blocks of both kinds take turns. Written is the ratio of their processor times, each the least of all blocks: what else
the machine does can only add to it. KIND is `commit`, with nothing due, or `snapshot`, with one at each commit; there
the processor time of the thread that copies is part of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from job_parts import build_net
from sized import build_optimizer, build_transformer

import trainer_runtime as tr
from trainer_runtime.contract import SNAPSHOT_FD
from trainer_runtime.snapshot_page import read_slots

_NEVER = 10**9
_NUMBERS = tuple(range(100))
_SHORT_STEPS, _SHORT_BLOCKS = 1_000, 100
_MEGABYTES = 5
_LONG_STEPS, _LONG_BLOCKS = 10, 3
_PAUSE_S = 0.02
"""Of each long step: a snapshot is whole by then, and cheaper than a step, so that each step has one."""
_UNMEASURED = 6
"""Steps whose snapshots take memory that later ones have."""


def least_ratio(
    blocks: int, clock: Callable[[], float], more: Callable[[], object], less: Callable[[], object]
) -> float:
    """The least time of a block of one kind over the least time of one of the other kind."""
    times: dict[Callable[[], object], list[float]] = {more: [], less: []}
    for _ in range(blocks):
        for block, taken in times.items():
            began = clock()
            block()
            taken.append(clock() - began)
    return min(times[more]) / min(times[less])


def commit_ratio(repetitions: int) -> float:
    """With nothing due."""
    state = tr.State(model=build_net(), save_every=_NEVER)
    state.restore()
    state.commit()  # the first one examines what is to be saved

    def without() -> None:
        for _ in range(_SHORT_STEPS):
            sum(_NUMBERS)

    def with_commits() -> None:
        for _ in range(_SHORT_STEPS):
            sum(_NUMBERS)
            state.commit()

    return least_ratio(repetitions * _SHORT_BLOCKS, time.thread_time, with_commits, without)


def snapshot_ratio(repetitions: int) -> float:
    """With a snapshot at each commit. Raises `RuntimeError` if none is taken."""
    model = build_transformer(_MEGABYTES)
    optimizer = build_optimizer(model)
    state = tr.State(model=model, optimizer=optimizer, save_every=_NEVER)
    state.restore()
    memory = int(os.environ[SNAPSHOT_FD])

    def steps(count: int, end: Callable[[], object]) -> None:
        for _ in range(count):
            optimizer.step()
            end()
            time.sleep(_PAUSE_S)

    def with_commits() -> None:
        before = state.step
        steps(_LONG_STEPS, state.commit)
        if max(slot.step for slot in read_slots(memory)) <= before:
            raise RuntimeError(f"there is no snapshot of the steps from {before} to {state.step}")

    def without() -> None:
        steps(_LONG_STEPS, lambda: None)

    steps(_UNMEASURED, state.commit)
    return least_ratio(repetitions * _LONG_BLOCKS, time.process_time, with_commits, without)


def main() -> None:
    """Measure one kind."""
    out, kind, repetitions = sys.argv[1:]
    tr.init()
    ratio = {"commit": commit_ratio, "snapshot": snapshot_ratio}[kind](int(repetitions))
    Path(out).write_text(json.dumps(ratio), encoding="utf-8")


if __name__ == "__main__":
    main()
