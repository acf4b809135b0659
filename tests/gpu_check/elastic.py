"""Row 1: two nodes with one rank each on one GPU, over gloo with CUDA tensors; faults and changes of size."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_check.results import Options, Result
from gpu_check.watched import Watched, compare_with_undisturbed, watched


def check(options: Options) -> Iterator[Result]:
    """Yield a result for each disturbance, and one for the losses of the whole training."""
    with watched(options, "elastic") as job:
        job.start("node-a", "2")
        job.start("node-b", "2")
        job.train(20)
        job.warm_up()
        yield _result("a worker is killed", *job.cost_of(job.cluster.nodes["node-b"].kill_worker, 2))
        job.warm_up()
        yield _result("a node is killed, another one starts", *job.cost_of(lambda: _replace(job), 2))
        job.start("node-d", "2")
        job.wait_for(lambda: len(job.cluster.status()["nodes"]) == 3, "the third node")
        job.warm_up()
        yield _result("scale --np=3: a node joins", *job.cost_of(lambda: job.cluster.scale("3"), 3))
        job.warm_up()
        yield _result("scale --np=2: a node leaves", *job.cost_of(lambda: job.cluster.scale("2"), 2))
        job.train(20)
        lines = job.trace()
    yield compare_with_undisturbed(lines, options.directory / "undisturbed")


def _replace(job: Watched) -> None:
    job.cluster.nodes["node-b"].kill()
    job.start("node-c", "2")


def _result(what: str, cost_s: float, replayed: int) -> Result:
    return Result(what=what, figures=f"{cost_s:.2f} s, {replayed} steps replayed")
