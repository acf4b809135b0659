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
it. Errors of the client libraries become OSErrors, so that a failure to write ends no training.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART_BYTES = 64 << 20
"""Size of the parts of an upload. A store accepts 10,000 of them, so a file may have 640 GB."""

_FILE_URL = "file://"


def open_place(where: str | os.PathLike[str]) -> Path:
    """Return a directory of checkpoints, which need not exist.

    Args:
        where: a path, or a URL.

    Raises:
        ValueError: no installed package knows this kind of URL; the message says which one is missing.
    """
    text = str(where)
    if "://" not in text:
        return Path(where)
    if text.startswith(_FILE_URL):
        return Path(text.removeprefix(_FILE_URL))
    try:
        from upath import UPath  # noqa: PLC0415 - takes a while, and only object stores need it

        # Listings change: other processes write there.
        place = UPath(text, use_listings_cache=False)
        _ = place.fs
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{text} cannot be used for checkpoints: {error}; install what reads it: pip install 'elastic-agent[cloud]'"
        ) from None
    return cast("Path", place)


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
        reason = (str(error).splitlines() or [""])[0]
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
        with remote_errors(self._path):
            return int(self._file.write(data))

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
        return [str(name).rstrip("/").rpartition("/")[2] for name in _fs(directory).ls(_key(directory), detail=False)]


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
    """Write an object unless there is one.

    Raises:
        FileExistsError: there is one.
        OSError: it could not be written.
    """
    try:
        with remote_errors(path):
            _fs(path).pipe_file(_key(path), data, mode="create")
    except OSError:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        raise


def delete_object(path: Path) -> None:
    """Delete an object, if it exists."""
    with suppress(FileNotFoundError), remote_errors(path):
        _fs(path).rm_file(_key(path))


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
