"""Row 4: a communicator that is aborted and replaced in place, beside a new process."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_check.processes import run
from gpu_check.results import Options, Result, seconds

TIMES = 3


def check(_options: Options) -> Iterator[Result]:
    """Yield a result for each of the two."""
    cold = run("communicator_parts.py")  # fills the compile caches, as a job's first process does
    found, whole = zip(*(run("communicator_parts.py") for _ in range(TIMES)), strict=True)
    in_place = [sum(parts[name] for name in ("abort_s", "join_s", "wrap_s", "step_s")) for parts in found]
    fresh = [total_s - sum_s for total_s, sum_s in zip(whole, in_place, strict=True)]
    parts = ", ".join(
        f"{name.removesuffix('_s')} {seconds([each[name] for each in found])}"
        for name in ("abort_s", "join_s", "wrap_s", "step_s")
    )
    again = max(each["compiled_again"] for each in found)
    yield Result(what="NCCL in place: abort to next step", figures=f"{seconds(in_place)}: {parts}; {again} graphs anew")
    yield Result(
        what="a new process: start to first step and end",
        figures=f"{seconds(fresh)}; without compile caches {cold[1]:.1f} s",
    )
