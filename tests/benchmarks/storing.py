"""How much memory a rank and its agent take while a checkpoint is saved and restored, on a disk and in an S3 server."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.launchers import elastic_agent
from benchmarks.micro import build_row
from benchmarks.nodes import Marked
from object_stores import BUCKET, object_store

from agent.local_etcd.embedded import EmbeddedEtcd

_SCRIPT = Path(__file__).resolve().parent / "storing_job.py"
_WITHIN_S = 600.0
_PLACES = ("disk", "S3")
_PHASES = {"saved": "the save", "restored": "the restore"}


def measure(directory: Path, sizes_mb: Sequence[int], runs: int) -> list[dict[str, Any]]:
    """Save and restore each size, in turns.

    Raises:
        RuntimeError: a job failed.
    """
    with EmbeddedEtcd(port=0) as etcd:
        return [
            {"megabytes": size, "place": place, **_measure(directory, etcd.endpoint, size, place)}
            for _ in range(runs)
            for size in sizes_mb
            for place in _PLACES
        ]


def _measure(directory: Path, etcd: str, megabytes: int, place: str) -> dict[str, Any]:
    job_id = f"bench-{secrets.token_hex(4)}"
    options = ("--np=1", "--max_restarts=1", "--snapshot_overhead=0")
    with ExitStack() as stack:
        where, access = stack.enter_context(_checkpoints(directory / f"{job_id}.checkpoints", place))
        environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **access}
        marked = stack.enter_context(Marked(directory / job_id, environ))
        out = marked.directory / "found.json"
        command = [*elastic_agent("run", etcd, job_id), *options, f"--checkpoint_dir={where}"]
        code = marked.start("a", [*command, str(_SCRIPT), str(out), str(megabytes)]).process.wait(_WITHIN_S)
        if code or not out.exists():
            output = (marked.directory / "a.out").read_text(errors="replace")
            raise RuntimeError(f"{_SCRIPT.name} ended with code {code}: {output[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


@contextmanager
def _checkpoints(directory: Path, place: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield where checkpoints are, and the variables that lead there."""
    if place == "disk":
        yield str(directory), {}
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    with object_store() as store:
        yield f"s3://{BUCKET}/jobs/bench", store.environment
        for name in store.names():  # the server has them in memory, for the next one as well
            store.client.delete_object(Bucket=BUCKET, Key=name)


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The cells under `micro.HEADINGS`."""
    cells = []
    for size, place in dict.fromkeys((each["megabytes"], each["place"]) for each in found):
        runs = [each for each in found if (each["megabytes"], each["place"]) == (size, place)]
        of = f"{size} MB, {place}"
        for phase, during in _PHASES.items():
            before = [each[phase]["before_mb"] for each in runs]
            more = [each[phase]["peak_mb"] - each[phase]["before_mb"] for each in runs]
            cells.append(build_row(f"rank, before {during}", of, before, "{:.0f} MB"))
            cells.append(build_row(f"rank, at most in {during}: more by", of, more, "{:.0f} MB"))
        agents = [each["restored"]["agent_mb"] for each in runs]
        cells.append(build_row("agent, at most in both", of, agents, "{:.0f} MB"))
    return cells
