"""The record that makes a checkpoint: file names and the manifest's codec.

A checkpoint is known by (run, group, step). The three are in its files' names, so a name is never used twice:

| file | content |
|---|---|
| `{run}-g{group}-s{step}.pt` | the state, written by `torch.save` |
| `{run}-g{group}-s{step}.d/` | what `on_save` hooks wrote, if there are any |
| `{run}-g{group}-s{step}.json` | the manifest: lists the files above with size and SHA-256; written last |

Without its manifest a checkpoint does not exist. Names that begin with a dot are private to their writer.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

VERSION = 1
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_STEM = re.compile(rf"(?P<run>{_RUN.pattern})-g(?P<group>\d{{6,}})-s(?P<step>\d{{9,}})")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint, by its path relative to the checkpoint directory."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of and where it comes from."""

    run: str
    group: int
    step: int
    file: str
    bytes: int
    sha256: str
    extra: tuple[StoredFile, ...]
    """What the `on_save` hooks wrote."""
    world_size: int
    saved_at: float
    """Unix time in seconds, by the writer's clock."""
    metrics: dict[str, float | None]
    """What the last `commit` before the save was given; None stands for a value that is not finite."""
    previous: tuple[str, ...]
    """Stems of this run's older checkpoints that its writers kept until now, oldest first: the only ones that the
    next writer may delete."""

    @property
    def stem(self) -> str:
        """The part that the names of its files share."""
        return stem_of(self.run, self.group, self.step)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All files listed, the state first."""
        return (StoredFile(self.file, self.bytes, self.sha256), *self.extra)


def stem_of(run: str, group: int, step: int) -> str:
    """Return the part of a checkpoint's file names before their suffix."""
    return f"{run}-g{group:06d}-s{step:09d}"


def require_run_name(run: str) -> None:
    """Raise ValueError if a run's name cannot be part of a file name."""
    if not _RUN.fullmatch(run):
        raise ValueError(f"a run's name is part of file names: wanted letters, digits, '._-', got {run!r}")


def parse_stem(stem: str) -> tuple[str, int, int] | None:
    """Return (run, group, step) of a file name without its suffix; None if it is none of ours."""
    match = _STEM.fullmatch(stem)
    return (match["run"], int(match["group"]), int(match["step"])) if match else None


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON."""
    return json.dumps({"v": VERSION, **asdict(manifest)}, indent=1, allow_nan=False).encode()


def decode(raw: bytes, stem: str) -> Manifest:
    """Read the manifest found in `{stem}.json`.

    Raises:
        ValueError: it is not one, is of another version, or is not about the checkpoint that its name says.
    """
    try:
        record = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(record, dict) or record.get("v") != VERSION:
        raise ValueError(f"wanted a manifest of version {VERSION}, got {str(record)[:60]}")
    manifest = Manifest(
        run=_field(record, "run", str),
        group=_field(record, "group", int),
        step=_field(record, "step", int),
        **_stored(record),
        extra=tuple(StoredFile(**_stored(entry)) for entry in _field(record, "extra", list)),
        world_size=_field(record, "world_size", int),
        saved_at=_field(record, "saved_at", float),
        metrics=_field(record, "metrics", dict),
        previous=tuple(_field(record, "previous", list)),
    )
    _require_own_names(manifest, stem)
    return manifest


def _stored(record: object) -> dict[str, Any]:
    return {
        "file": _field(record, "file", str),
        "bytes": _field(record, "bytes", int),
        "sha256": _field(record, "sha256", str),
    }


def _field(record: object, key: str, kind: type) -> Any:  # noqa: ANN401 - the kind is checked at run time
    value = record.get(key) if isinstance(record, dict) else None
    if type(value) is not kind:
        raise ValueError(f"its field {key!r} should be a {kind.__name__}, got {value!r}")
    return value


def _require_own_names(manifest: Manifest, stem: str) -> None:
    """A manifest may name only files of its own checkpoint: what it names is read, and later deleted."""
    if manifest.stem != stem or manifest.file != f"{stem}.pt":
        raise ValueError(f"it is about {manifest.stem} and {manifest.file}, not about its own name")
    for entry in manifest.extra:
        parts = PurePosixPath(entry.file).parts
        if parts[:1] != (f"{stem}.d",) or ".." in parts:
            raise ValueError(f"it lists {entry.file!r}, which is not inside {stem}.d")
    for name in manifest.previous:
        place = parse_stem(name) if isinstance(name, str) else None
        if place is None or place[0] != manifest.run:
            raise ValueError(f"it lists {name!r} as an older checkpoint of its run, which it is not")
