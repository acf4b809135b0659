"""Copies a job's records out of the etcd that this agent has brought, so that commands can read them after its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from agent.config import AgentConfig
from agent.errors import ElasticAgentError
from agent.local_etcd.kept_records import has_begun, pack
from agent.local_etcd.known_jobs import JobNote, KnownJob
from agent.observe.log import log
from agent.store.api import KeyRange, Snapshot, Store
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys
from agent.store.mirror import Mirror

_EVERY_S = 1.0
"""Between two copies: what happened within that time before an agent is killed may be missing."""
_LOOK_EVERY_S = 10.0
_LAST_WITHIN_S = 1.0
_FAULT = 1


@contextmanager
def kept(config: AgentConfig) -> Iterator[list[int]]:
    """Have commands find the job for as long as the block lasts, and what it leaves afterwards.

    Yields:
        a list, for the exit code that the agent ends with.
    """
    codes: list[int] = []
    job = KnownJob(
        job_id=config.job.job_id,
        endpoints=tuple(config.endpoints),
        is_private=config.ensemble is None,
        has_secret=config.ensemble is not None and config.ensemble.tls is not None,
        directory=str(config.workers.cwd),
        log_dir=str(config.workers.log_dir),
        began_at=time.time(),
    )
    try:
        noted = JobNote(job)
    except OSError as error:
        log.warning("elastic-agent status will not find this job by itself", reason=str(error))
        yield codes
        return
    log.info("see it with elastic-agent status, explain, logs or report: on this machine, also once it has ended")
    keys = JobKeys(job.job_id)
    with (
        closing(noted),
        closing(EtcdStore(job.endpoints, config.credentials, home=keys.prefix, retry_for_s=_LAST_WITHIN_S)) as store,
    ):
        keeper = _RecordKeeper(noted, job.job_id, store)
        try:
            yield codes
        finally:
            keeper.close(codes[-1] if codes else _FAULT)


class _RecordKeeper:
    """Writes down a job's records whenever they have changed."""

    def __init__(self, noted: JobNote, job_id: str, store: Store) -> None:
        self._noted = noted
        self._job_id = job_id
        self._store = store
        self._ranges = (KeyRange(JobKeys(job_id).prefix, is_prefix=True),)
        self._newest: Snapshot | None = None
        self._written: Snapshot | None = None
        self._has_changed = threading.Event()
        self._is_over = threading.Event()
        self._mirror = Mirror(store, self._ranges, self._take, lambda _reason: None)
        self._thread = threading.Thread(target=self._run, name="job-keeper", daemon=True)
        self._mirror.start()
        self._thread.start()

    def close(self, exit_code: int) -> None:
        """Write what there is at the end."""
        self._is_over.set()
        self._has_changed.set()
        self._mirror.close()
        self._thread.join()
        with suppress(ElasticAgentError):  # most of those that had it may be gone
            self._newest = self._store.read(self._ranges)
        self._written = None
        self._write(exit_code)

    def _take(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._has_changed.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._has_changed.wait(_LOOK_EVERY_S)
            self._has_changed.clear()
            self._write(None)
            self._is_over.wait(_EVERY_S if self._written else 0.0)

    def _write(self, exit_code: int | None) -> None:
        newest = self._newest
        if newest is None or not has_begun(self._job_id, newest.items):
            return
        if newest is not self._written or not self._noted.is_there():
            with suppress(OSError, ValueError):  # a full disk, a record that somebody has written: the job goes on
                self._noted.keep(pack(self._job_id, newest.items, time.time(), exit_code))
                self._written = newest
