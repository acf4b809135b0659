"""Checkpoints in object stores: where a directory may be a URL, as `s3://bucket/jobs/mine`.

Any URL that fsspec knows will do; universal_pathlib gives it the methods of a `Path`. This module has the operations
that differ from those on files, each for both.

An object store has no rename, and nothing that is durable later than it is written. So the objects of a checkpoint
stay under its private name, which is never used twice. A copy of its manifest under its final name, which is written
only if there is none (`If-None-Match: *`), stands for the rename:

| in the directory | content |
|---|---|
| `.{stem}.{token}/` | the files of the checkpoint, the manifest last |
| `{stem}/manifest.json` | a copy of the manifest, whose field `private` leads to the files |

What an upload leaves behind that was broken off is aborted; if its process is killed, only a rule of the bucket removes
it. Errors of the client libraries become OSErrors, so that a failure to write ends no training. If the answer to a
commit is lost, the copy of the manifest is read back; if that fails as well, the files stay.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PART_BYTES = 64 << 20
"""Size of the parts of an upload. A store accepts 10,000 of them, so a file may have 640 GB."""
_PIECE_BYTES = 4 << 20
"""What is added to a part at once: a part is sent when it is full, so it may be larger by that."""

_FILE_URLS = ("file://", "local://")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
"""What `Path` makes of a URL."""

_S3_CONFIG = {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}
"""Options of botocore, durations in seconds. By default a store that does not answer is waited for much longer."""
_TRIES = 3
"""Tries of s3fs for each request."""


class UnclearError(OSError):
    """It is not known whether an object was written, so nothing that it refers to may be deleted."""


def open_place(where: str | os.PathLike[str]) -> Path:
    """Return a directory of checkpoints, which need not exist.

    Args:
        where: a path, or a URL.

    Raises:
        ValueError: it is no URL that can be used; or no installed package knows its kind, which the message names.
    """
    if not isinstance(where, str | Path) and hasattr(where, "fs"):  # a UPath, which may have options
        return cast("Path", where)
    text = str(where)
    require_place(text)
    if "://" not in text:
        return Path(where)
    for scheme in _FILE_URLS:
        if text.startswith(scheme):
            return Path(text.removeprefix(scheme))
    try:
        from upath import UPath  # noqa: PLC0415 - takes a while, and only object stores need it

        options: dict[str, Any] = {"config_kwargs": _S3_CONFIG} if text.startswith("s3://") else {}
        # Listings change: other processes write there.
        place = UPath(text, use_listings_cache=False, **options)
        if hasattr(place.fs, "retries"):
            place.fs.retries = _TRIES
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{text} cannot be used for checkpoints: {error}; install what reads it: pip install 'elastic-agent[cloud]'"
        ) from None
    except OSError as error:
        raise ValueError(f"{text} cannot be used for checkpoints: {error}") from error
    return cast("Path", place)


def require_place(text: str) -> None:
    """Raise ValueError if a text is neither a path nor a URL of a place for checkpoints."""
    if _BROKEN_URL.match(text):
        raise ValueError(f"wanted a path or a URL as s3://bucket/name, got {text!r}; a URL is a str, not a Path")
    if "://" not in text:
        return
    parts = urlsplit(text)
    if parts.password is not None:
        shown = text.replace(f":{parts.password}@", ":...@")
        raise ValueError(f"wanted a URL without a password, got {shown!r}; give credentials by the environment")
    if not (parts.netloc or parts.path.strip("/")):
        raise ValueError(f"wanted a URL as s3://bucket/name, got {text!r}")


def is_remote(path: Path) -> bool:
    """Return whether a path is in an object store."""
    return not isinstance(path, Path)


@contextmanager
def remote_errors(path: Path) -> Iterator[None]:
    """Turn all errors of an object store into OSErrors of one line."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        reason = " ".join(str(error).split())
        raise OSError(errno.EIO, f"{type(error).__name__}: {reason}", str(path)) from error


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for writing. It is durable when the block ends; in an object store it exists only from then on.

    Raises:
        FileExistsError: the path is in use. In an object store that is not checked.
        OSError: it cannot be written.
    """
    if not is_remote(path):
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        return
    upload = _Upload(path)
    try:
        yield cast("IO[bytes]", upload)
        upload.complete()
    except BaseException:
        upload.abort()
        raise


class _Upload:
    """A new object, which exists once it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with remote_errors(path):
            self._file = _fs(path).open(_key(path), "wb", block_size=_PART_BYTES)

    def write(self, data: bytes) -> int:
        whole = memoryview(data)
        with remote_errors(self._path):
            for at in range(0, len(whole), _PIECE_BYTES):  # it is kept in memory until a part is full
                self._file.write(whole[at : at + _PIECE_BYTES])
        return len(whole)

    def flush(self) -> None:
        """Do nothing: a part is sent when it is full."""

    def complete(self) -> None:
        with remote_errors(self._path):
            self._file.close()

    def abort(self) -> None:
        with suppress(Exception):  # an earlier error is the one to report
            self._file.discard()
        self._file.closed = True  # else its finalizer would complete the upload


class _Download:
    """An object that is read in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with remote_errors(path):
            self._file = _fs(path).open(_key(path), "rb", block_size=_PART_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        with remote_errors(self._path):
            return bytes(self._file.read(size))

    def readinto(self, buffer: memoryview) -> int:
        with remote_errors(self._path):
            return int(self._file.readinto(buffer))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with remote_errors(self._path):
            return int(self._file.seek(offset, whence))


def open_remote(path: Path) -> IO[bytes]:
    """Open an object for reading, from its beginning."""
    return cast("IO[bytes]", _Download(path))


def read_range(path: Path, at: int, length: int) -> bytes:
    """Return a part of an object.

    Args:
        path: of the object.
        at: offset in bytes.
        length: in bytes.
    """
    with remote_errors(path):
        return bytes(_fs(path).cat_file(_key(path), start=at, end=at + length))


def list_names(directory: Path) -> list[str]:
    """Return the names in a directory; FileNotFoundError if it does not exist."""
    if not is_remote(directory):
        return [path.name for path in directory.iterdir()]
    with remote_errors(directory):
        try:
            names = _fs(directory).ls(_key(directory), detail=False)
        except FileNotFoundError:
            bucket = _key(directory).lstrip("/").partition("/")[0]
            if not _fs(directory).exists(bucket):
                raise OSError(errno.ENXIO, f"there is no bucket {bucket}, or it may not be seen") from None
            raise
    return [str(name).rstrip("/").rpartition("/")[2] for name in names]


def exists(path: Path) -> bool:
    """Return whether there is a file or directory, or an object of this name or below it."""
    if not is_remote(path):
        return path.exists()
    with remote_errors(path):
        return bool(_fs(path).exists(_key(path)))


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; FileNotFoundError if there is none."""
    if not is_remote(path):
        return path.stat().st_size if path.is_file() else -1
    with remote_errors(path):
        return int(_fs(path).size(_key(path)) or 0)


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory. An object store has none."""
    if not is_remote(path):
        path.mkdir(parents=parents, exist_ok=parents)


def remove_tree(path: Path) -> None:
    """Delete everything in a directory, and the directory, as far as possible."""
    if is_remote(path):
        with suppress(OSError):
            delete_objects(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def delete_objects(path: Path) -> None:
    """Delete all objects below a name; FileNotFoundError if there is none."""
    with remote_errors(path):
        found = _find(path)
        for name in found:
            _fs(path).rm_file(name)
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def put_new(path: Path, data: bytes) -> None:
    """Write an object unless there is one. If there is one with this content, an earlier try has written it.

    Raises:
        FileExistsError: there is another one.
        UnclearError: it may have been written.
        OSError: it could not be written.
    """
    try:
        with remote_errors(path):
            _fs(path).pipe_file(_key(path), data, mode="create")
    except OSError as error:
        try:
            with remote_errors(path):
                found = bytes(_fs(path).cat_file(_key(path)))
        except FileNotFoundError:
            raise error from None
        except OSError:
            raise UnclearError(errno.EIO, f"it is not known whether it was written: {error}", str(path)) from error
        if found != data:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None


def delete_object(path: Path) -> None:
    """Delete an object, if it exists."""
    with suppress(FileNotFoundError), remote_errors(path):
        _fs(path).rm_file(_key(path))


def call_at_exit(directory: Path, call: Callable[[], None]) -> None:
    """Call a function as the process ends. For an object store, while its client can still open connections."""
    register = getattr(threading, "_register_atexit", None)
    if is_remote(directory) and register is not None:
        register(call)
    else:
        atexit.register(call)


def download(source: Path, target: Path) -> None:
    """Copy all objects below a name into a new directory of files."""
    with remote_errors(source):
        for name in _find(source):
            file = target / name.removeprefix(f"{_key(source)}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            _fs(source).get_file(name, str(file))


def upload(source: Path, target: Path) -> None:
    """Copy a file to a new object."""
    with source.open("rb") as file, new_file(target) as copy:
        shutil.copyfileobj(file, copy, _PART_BYTES)


def _find(path: Path) -> list[str]:
    """Return the names of all objects below a name. fsspec's `rm` and `get` would take a `[` in it for a pattern."""
    return [str(name) for name in _fs(path).find(_key(path))]


def _fs(path: Path) -> Any:  # noqa: ANN401 - fsspec has no types
    return path.fs  # type: ignore[attr-defined] # a UPath


def _key(path: Path) -> str:
    return str(path.path)  # type: ignore[attr-defined] # as above
