"""The names of a checkpoint, and the codec of its manifest.

A checkpoint is identified by (run, group, step, save). It is one directory, whose name contains the four, so that a
name is never used twice. `save` counts the saves that closed the epoch since that step; the name omits it where it is
0:

| in `{run}-g{group}-s{step}-{save}/` | content |
|---|---|
| `state.pt` | the state, written by `torch.save` |
| `extra/` | what `on_save` hooks wrote, if there are any |
| `shards/` | the tensors of sharded objects, if there are any: see `capture/shard_files.py` |
| `manifest.json` | lists the files above with size and SHA-256; written last, deleted first |

Until it is committed, the directory has the private name `.{run}-g{group}-s{step}-{save}.{token}`. The token is random,
so that two attempts at the same step never share a directory. The final name follows from the private one.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

VERSION = 2
STATE = "state.pt"
EXTRA = "extra"
SHARDS = "shards"
MANIFEST = "manifest.json"

_SHOWN = 60
"""Characters of a foreign value that an error shows."""

_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_STEM = re.compile(
    rf"(?P<run>{_RUN.pattern})-g(?P<group>[0-9]{{6,19}})-s(?P<step>[0-9]{{9,19}})(?:-(?P<save>[1-9][0-9]{{0,18}}))?"
)
_PRIVATE = re.compile(rf"\.(?P<stem>{_STEM.pattern})\.[0-9a-f]{{8}}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint, with its path relative to the checkpoint's directory."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and where it comes from."""

    run: str
    group: int
    step: int
    save: int = 0
    private: str
    """Name of the directory while it was written."""
    files: tuple[StoredFile, ...]
    """The state file first, then the files of `on_save` hooks, then the shards."""
    world_size: int
    saved_at: float
    """Unix time in seconds, by the writer's clock."""
    metrics: dict[str, float | None]
    """Metrics of the last `commit` before the save; None stands for a value that is not finite."""
    previous: tuple[str, ...]
    """Private names of this run's older checkpoints that its writers kept until now, oldest first. Without an agent,
    which keeps a record of them, the next writer may delete these and no others."""

    @property
    def stem(self) -> str:
        """Final name of the directory."""
        return stem_of(self.run, self.group, self.step, self.save)


def stem_of(run: str, group: int, step: int, save: int = 0) -> str:
    """Return the final name of a checkpoint's directory."""
    return f"{run}-g{group:06d}-s{step:09d}{f'-{save}' if save else ''}"


def private_name(stem: str) -> str:
    """Return a private name that was never used before."""
    return f".{stem}.{secrets.token_hex(4)}"


def final_name(private: str) -> str:
    """Return the final name that belongs to a private name; ValueError if it is not a private name."""
    match = _PRIVATE.fullmatch(private)
    if match is None:
        raise ValueError(f"wanted the private name of a checkpoint, got {private[:_SHOWN]!r}")
    return match["stem"]


def require_private_name(private: str, stem: str) -> None:
    """Check a private name that another process chose, before it is used in a path.

    Raises:
        ValueError: it is not a private name of the checkpoint `stem`.
    """
    if final_name(private) != stem:
        raise ValueError(f"wanted a private name of the checkpoint {stem}, got {private!r}")


def require_run_name(run: str) -> None:
    """Raise ValueError if a run's name cannot be part of a file name."""
    if not _RUN.fullmatch(run):
        raise ValueError(f"a run's name is part of file names: wanted letters, digits, '._-', got {run!r}")


def parse_stem(stem: str) -> tuple[str, int, int, int] | None:
    """Return (run, group, step, save) of a final name; None if it is not the name of a checkpoint."""
    match = _STEM.fullmatch(stem)
    return (match["run"], int(match["group"]), int(match["step"]), int(match["save"] or 0)) if match else None


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON."""
    return json.dumps({"v": VERSION, **asdict(manifest)}, indent=1, allow_nan=False).encode()


def decode(raw: bytes, stem: str) -> Manifest:
    """Read the manifest found in the directory `stem`.

    Raises:
        ValueError: it is not a manifest, has another version, or belongs to another checkpoint than `stem`.
    """
    try:
        manifest = _manifest_of(_parse(raw))
    except RecursionError:  # a message with such a value would recurse as deeply as parsing it
        raise ValueError("its JSON is nested too deeply") from None
    _require_own_names(manifest, stem)
    return manifest


def _parse(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None


def _manifest_of(record: object) -> Manifest:
    if not isinstance(record, dict) or record.get("v") != VERSION:
        raise ValueError(f"wanted a manifest of version {VERSION}, got {str(record)[:_SHOWN]}")
    return Manifest(
        run=field_of(record, "run", str),
        group=field_of(record, "group", int),
        step=field_of(record, "step", int),
        save=field_of(record, "save", int),
        private=field_of(record, "private", str),
        files=tuple(_stored(entry) for entry in field_of(record, "files", list)),
        world_size=field_of(record, "world_size", int),
        saved_at=field_of(record, "saved_at", float),
        metrics=field_of(record, "metrics", dict),
        previous=names_of(record, "previous"),
    )


def field_of(record: object, key: str, kind: type) -> Any:  # noqa: ANN401 - the kind is checked at run time
    """Return a field of a JSON object; ValueError if it is missing or has another type."""
    value = record.get(key) if isinstance(record, dict) else None
    if type(value) is not kind:
        raise ValueError(f"its field {key!r} should be a {kind.__name__}, got {repr(value)[:_SHOWN]}")
    return value


def names_of(record: object, key: str) -> tuple[str, ...]:
    """Return a field that lists private names; ValueError if an entry is not one. Listed names may be deleted."""
    names = tuple(field_of(record, key, list))
    for name in names:
        final_name(str(name))
    return names


def _stored(record: object) -> StoredFile:
    return StoredFile(field_of(record, "file", str), field_of(record, "bytes", int), field_of(record, "sha256", str))


def _require_own_names(manifest: Manifest, stem: str) -> None:
    """Raise ValueError if a manifest names other files than its own, or checkpoints of another run."""
    if manifest.stem != stem or final_name(manifest.private) != stem:
        raise ValueError(f"it is about {manifest.stem} and {manifest.private}, not about {stem}, where it was found")
    if not manifest.files or manifest.files[0].file != STATE:
        raise ValueError(f"it does not list {STATE} first")
    for entry in manifest.files[1:]:
        parts = PurePosixPath(entry.file).parts
        if parts[:1] not in {(EXTRA,), (SHARDS,)} or ".." in parts or "\0" in entry.file:
            raise ValueError(f"it lists {entry.file!r}, which is not inside {EXTRA} or {SHARDS}")
    for name in manifest.previous:
        parsed = parse_stem(final_name(name))
        if parsed is None or parsed[0] != manifest.run:
            raise ValueError(f"it lists {name!r} as an older checkpoint of its run, which it is not")
