"""What `commit()` costs while nothing is due: `commit_job.py OUT` writes nanoseconds as JSON. Runs under an agent."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from job_parts import build_net

import trainer_runtime as tr

_TIMES = 50_000
_NEVER = 10**9


def median_ns(call: Callable[[], object]) -> int:
    """Of one call, the clock's own time included."""
    clock, costs = time.perf_counter_ns, []
    for _ in range(_TIMES):
        began = clock()
        call()
        costs.append(clock() - began)
    return sorted(costs)[_TIMES // 2]


def main() -> None:
    """Commit, again and again."""
    tr.init()
    state = tr.State(model=build_net(), save_every=_NEVER)
    state.restore()
    state.commit()  # the first one examines what is to be saved
    found = {"commit_ns": median_ns(state.commit), "nothing_ns": median_ns(lambda: None)}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
