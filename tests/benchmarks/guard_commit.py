"""What `commit()` adds to a training step, as a ratio of processor time: with it over without it."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.micro import Bench

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store.etcd import EtcdStore

_JOB = "guard_commit_job.py"


def commit_ratio(repetitions: int) -> float:
    """Of a step of about a microsecond, with nothing due at its commit."""
    return _ratio("commit", repetitions)


def snapshot_ratio(repetitions: int) -> float:
    """Of the optimizer's step of a State of a few megabytes, with a snapshot at each commit."""
    return _ratio("snapshot", repetitions, "--snapshot_overhead=100")


def _ratio(kind: str, repetitions: int, *options: str) -> float:
    with (
        tempfile.TemporaryDirectory(prefix="elastic-agent-bench-") as directory,
        EmbeddedEtcd(port=0) as etcd,
        closing(EtcdStore([etcd.endpoint])) as store,
    ):
        bench = Bench(Path(directory), etcd.endpoint, store)
        ratio: float = bench.report_of(_JOB, kind, str(repetitions), options=options)
        return ratio
