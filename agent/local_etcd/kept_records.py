"""What is left of a job when its etcd has ended with its agent: its records, for those who only read.

A record under a lease says that somebody is there, so it is not kept; nor is the job's secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from agent.core.model import Result
from agent.errors import ConfigError, RecordError
from agent.roles.model import RoleResult
from agent.roles.store import RoleKeys
from agent.store.api import Compare, Delete, KeyRange, KeyValue, Put, TransactionResult
from agent.store.keys import JobKeys, encode, view_of
from agent.store.memory import MemoryStore

_NO_SECRET = "0" * 64
_KILLED = 137
"""As a shell has it of a process that was."""


class KeptRecords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's records, and how its agent ended."""

    items: tuple[tuple[str, str], ...]
    """Keys and values."""
    at: float
    """Wall clock, seconds since 1970."""
    exit_code: int | None = None
    """None: it lives, or was killed."""


def pack(job_id: str, items: Sequence[KeyValue], at: float, exit_code: int | None = None) -> bytes:
    """Make what is kept of a job's records. Raises `ValueError`: its spec is none."""
    specs = _specs(job_id)
    kept = tuple(
        (item.key, _without_secret(item.value) if item.key in specs else item.value.decode(errors="replace"))
        for item in items
        if not item.lease_id
    )
    return msgspec.json.encode(KeptRecords(items=kept, at=at, exit_code=exit_code))


def has_begun(job_id: str, items: Iterable[KeyValue]) -> bool:
    """Whether there is a job to be told of."""
    return any(item.key in _specs(job_id) for item in items)


def _specs(job_id: str) -> set[str]:
    return {JobKeys(job_id).spec, RoleKeys(job_id).spec}


def _without_secret(value: bytes) -> str:
    record = msgspec.json.decode(value, type=dict[str, Any])
    return msgspec.json.encode(record | {"secret": _NO_SECRET}).decode()


class KeptStore(MemoryStore):
    """A job's records after its etcd's end. They can be read.

    Args:
        job_id: the job.
        content: what `pack` has made.
        again: how the job goes on, if it had not ended.
        log_dir: where its logs are.

    Raises:
        ConfigError: nothing was kept, or it cannot be read.
    """

    def __init__(self, job_id: str, content: bytes, again: str, log_dir: Path) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._job_id = job_id
        ended: list[Put] | None = None
        with suppress(msgspec.MsgspecError, ValueError, RecordError):
            records = msgspec.json.decode(content, type=KeptRecords)
            super().transact([], [Put(key, value.encode()) for key, value in records.items])
            ended = self._ended(records, again)
        if ended is None:
            raise ConfigError(
                f"job {job_id!r} has ended, and nothing is left of its records; if it had begun, its logs are in "
                f"{log_dir / job_id}"
            )
        super().transact([], ended)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Nothing of it can be changed. Raises `ConfigError`."""
        del compares, writes
        raise ConfigError(f"job {self._job_id!r} has ended, and its etcd with it: there is nothing to change")

    def _ended(self, records: KeptRecords, again: str) -> list[Put] | None:
        """The record of its end, if there is none, for somebody must have ended it. None: it had not begun."""
        keys, roles = JobKeys(self._job_id), RoleKeys(self._job_id)
        everything = self.read((KeyRange(keys.prefix, is_prefix=True),))
        ranks, servers = view_of(everything, keys, is_whole=True), roles.view(everything)
        if ranks.result is not None or servers.result is not None:
            return []
        code = _KILLED if records.exit_code is None else records.exit_code
        how = "was killed" if records.exit_code is None else f"left with exit code {code}"
        why = f"its agent {how} before the job had ended; {again}"
        if servers.spec is not None:
            return [Put(roles.result, encode(RoleResult(code=code, sentence=why)))]
        if ranks.spec is None:
            return None
        group = ranks.group.value.number if ranks.group is not None else 0
        run = ranks.spec.value.run
        result = Result(run=run, group=group, succeeded=False, exit_code=code, reason=why, at=records.at)
        return [Put(keys.result, encode(result))]
