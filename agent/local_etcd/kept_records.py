"""A job's records after its etcd has ended with its agent: an agent copies them to a file, and commands read them.

Records under a lease are not kept, because they mean that a process is running. The job's secret is not kept either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from agent.core.model import Result
from agent.core.reasons import AgentEnded
from agent.errors import ConfigError, ElasticAgentError, RecordError
from agent.local_etcd.known_jobs import JobNote, KnownJob
from agent.observe.log import log
from agent.observe.messages import describe
from agent.roles.model import RoleResult
from agent.roles.store import RoleKeys
from agent.store.access import Credentials
from agent.store.api import Compare, Delete, KeyRange, KeyValue, Put, Snapshot, Store, TransactionResult
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys, as_json, encode, view_of
from agent.store.memory import MemoryStore
from agent.store.mirror import Mirror

_COPY_EVERY_S = 1.0
"""Time between two copies. If the agent is killed, changes of this time may be missing."""
_CHECK_EVERY_S = 10.0
_LAST_READ_WITHIN_S = 1.0
_UNEXPECTED_EXIT_CODE = 1
_NO_SECRET = "0" * 64
_KILLED = 137
"""Exit code of a killed process, as reported by a shell."""


class KeptRecords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's records, and how its agent ended."""

    items: tuple[tuple[str, str], ...]
    """Pairs of key and value."""
    at: float
    """Wall time of the copy, in seconds since 1970."""
    exit_code: int | None = None
    """None: the agent is running, or was killed."""


def pack(job_id: str, items: Sequence[KeyValue], at: float, exit_code: int | None = None) -> bytes:
    """Encode the records of a job that are kept. Raises `ValueError` if the job's spec is malformed."""
    specs = _specs(job_id)
    kept = tuple(
        (item.key, _without_secret(item.value) if item.key in specs else _text(item.value))
        for item in items
        if not item.lease_id
    )
    return msgspec.json.encode(KeptRecords(items=kept, at=at, exit_code=exit_code))


def has_begun(job_id: str, items: Iterable[KeyValue]) -> bool:
    """Whether the job has been created: its spec exists."""
    return any(item.key in _specs(job_id) for item in items)


def _specs(job_id: str) -> set[str]:
    return {JobKeys(job_id).spec, RoleKeys(job_id).spec}


def _text(value: bytes) -> str:
    """Return the text of a record; of a damaged one, what can be read."""
    with suppress(ValueError):
        value = as_json(value)
    return value.decode(errors="replace")


def _without_secret(value: bytes) -> str:
    record = msgspec.json.decode(value, type=dict[str, Any])
    return msgspec.json.encode(record | {"secret": _NO_SECRET}).decode()


class KeptStore(MemoryStore):
    """A read-only store with a job's records after the end of its etcd.

    Args:
        job_id: the job.
        content: as encoded by `pack`.
        how_to_continue: tells the user how to continue the job, if it had not ended.
        log_dir: directory of the job's logs.

    Raises:
        ConfigError: no records were kept, or they cannot be read.
    """

    def __init__(self, job_id: str, content: bytes, how_to_continue: str, log_dir: Path) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._job_id = job_id
        self._how_to_continue = how_to_continue
        ended: list[Put] | None = None
        with suppress(msgspec.MsgspecError, ValueError, RecordError):
            records = msgspec.json.decode(content, type=KeptRecords)
            super().transact([], [Put(key, value.encode()) for key, value in records.items])
            ended = self._result_of(records, how_to_continue)
        if ended is None:
            raise ConfigError(
                f"job {job_id!r} has ended, and nothing is left of its records; if it had begun, its logs are in "
                f"{log_dir / job_id}"
            )
        super().transact([], ended)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Raise `ConfigError`: the records cannot be changed."""
        del compares, writes
        raise ConfigError(
            f"job {self._job_id!r} has ended, and its etcd with it: there is nothing to change; {self._how_to_continue}"
        )

    def _result_of(self, records: KeptRecords, how_to_continue: str) -> list[Put] | None:
        """Return a result to add, if the job has none although its agent has ended. None: the job had not begun."""
        keys, roles = JobKeys(self._job_id), RoleKeys(self._job_id)
        snapshot = self.read((KeyRange(keys.prefix, is_prefix=True),))
        ranks, servers = view_of(snapshot, keys, is_whole=True), roles.view(snapshot)
        if ranks.result is not None or servers.result is not None:
            return []
        code = _KILLED if records.exit_code is None else records.exit_code
        why = AgentEnded(exit_code=records.exit_code, advice=how_to_continue)
        if servers.spec is not None:
            return [Put(roles.result, encode(RoleResult(code=code, sentence=describe(why))))]
        if ranks.spec is None:
            return None
        group = ranks.group.value.number if ranks.group is not None else 0
        run = ranks.spec.value.run
        result = Result(run=run, group=group, succeeded=False, exit_code=code, reason=why, at=records.at)
        return [Put(keys.result, encode(result))]


@contextmanager
def keep_records(job: KnownJob, credentials: Credentials) -> Iterator[list[int]]:
    """Let commands on this machine find the job during the block, and its records afterwards.

    Args:
        job: what commands need to know of the job.
        credentials: for its etcd.

    Yields:
        A list to which the caller appends the agent's exit code.
    """
    codes: list[int] = []
    try:
        note = JobNote(job)
    except OSError as error:
        log.warning("elastic-agent status cannot find this job without options", reason=str(error))
        yield codes
        return
    log.info(
        "inspect this job with elastic-agent status, explain, logs or report: on this machine, also after it has ended"
    )
    keys = JobKeys(job.job_id)
    with (
        closing(note),
        closing(EtcdStore(job.endpoints, credentials, home=keys.prefix, retry_for_s=_LAST_READ_WITHIN_S)) as store,
    ):
        keeper = _RecordKeeper(note, job.job_id, store)
        try:
            yield codes
        finally:
            keeper.close(codes[-1] if codes else _UNEXPECTED_EXIT_CODE)


class _RecordKeeper:
    """Copies a job's records to a file whenever they have changed."""

    def __init__(self, note: JobNote, job_id: str, store: Store) -> None:
        self._note = note
        self._job_id = job_id
        self._store = store
        self._ranges = (KeyRange(JobKeys(job_id).prefix, is_prefix=True),)
        self._newest: Snapshot | None = None
        self._written: Snapshot | None = None
        self._has_changed = threading.Event()
        self._is_over = threading.Event()
        self._mirror = Mirror(store, self._ranges, self._on_snapshot, lambda _reason: None)
        self._thread = threading.Thread(target=self._run, name="job-keeper", daemon=True)
        self._mirror.start()
        self._thread.start()

    def close(self, exit_code: int) -> None:
        """Copy the final records, with the agent's exit code."""
        self._is_over.set()
        self._has_changed.set()
        self._mirror.close()
        self._thread.join()
        with suppress(ElasticAgentError):  # most members of the etcd may have ended
            self._newest = self._store.read(self._ranges)
        self._written = None
        self._write(exit_code)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._has_changed.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._has_changed.wait(_CHECK_EVERY_S)
            self._has_changed.clear()
            self._write(None)
            self._is_over.wait(_COPY_EVERY_S if self._written else 0.0)

    def _write(self, exit_code: int | None) -> None:
        newest = self._newest
        if newest is None or not has_begun(self._job_id, newest.items):
            return
        if newest is not self._written or not self._note.is_there():
            with suppress(OSError, ValueError):  # a full disk, or a malformed record: the job continues
                self._note.keep(pack(self._job_id, newest.items, time.time(), exit_code))
                self._written = newest
