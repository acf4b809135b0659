"""Files with rows: each is written durably, and has its name only when it is complete.

    8 bytes   length of the head
    32 bytes  SHA-256 of all that follows
    head      JSON: the writer's state, and type, shape and offset of each array
    arrays    raw, each at a multiple of 64 bytes from the end of the head

Reading a file never executes anything in it, whoever wrote it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer_runtime.checkpoint import DamagedError, open_file
from trainer_runtime.checkpoint_files import sync_directory
from trainer_runtime.ps.frames import bytes_of

_ALIGNED = 64
_LENGTH_BYTES, _SUM_BYTES = 8, 32
_MAX_HEAD = 1 << 26
_TYPES = {"int64": torch.int64, "float32": torch.float32}


def write(path: Path, state: Mapping[str, Any], arrays: Sequence[torch.Tensor]) -> None:
    """Write a file durably, replacing an existing one. Raises OSError; the existing file is then unchanged."""
    places, at = [], 0
    for array in arrays:
        places.append({"type": str(array.dtype).removeprefix("torch."), "shape": list(array.shape), "at": at})
        at = _aligned(at + array.numel() * array.element_size())
    head = json.dumps({"said": state, "arrays": places}).encode()
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.sha256(head)
    try:
        with unnamed.open("wb") as file:
            file.write(len(head).to_bytes(_LENGTH_BYTES, "little") + bytes(_SUM_BYTES) + head)
            for array in arrays:
                data = bytes_of(array)
                padding = bytes(_aligned(len(data)) - len(data))
                for piece in (data, padding):
                    file.write(piece)
                    digest.update(piece)
            file.seek(_LENGTH_BYTES)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        unnamed.rename(path)
    finally:
        with contextlib.suppress(OSError):
            unnamed.unlink(missing_ok=True)
    sync_directory(path.parent)


def read(path: Path) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the state and the arrays of a file. Raises `DamagedError`, OSError.

    The arrays are mapped from the file until they are changed.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = _LENGTH_BYTES + _SUM_BYTES
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        wanted = file.read(_SUM_BYTES)
        if size < begin or length > min(_MAX_HEAD, size - begin):
            raise DamagedError(f"{path} is damaged: it is shorter than its head declares")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hashlib.sha256(memoryview(data)[begin:]).digest() != wanted:
        raise DamagedError(f"{path} is damaged: its checksum does not match")
    try:
        head = json.loads(data[begin : begin + length])
        return head["said"], [_array(data, begin + length, place) for place in head["arrays"]]
    except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise DamagedError(f"{path} is damaged: its head is invalid ({error})") from None


def _array(data: mmap.mmap, begin: int, place: dict[str, Any]) -> torch.Tensor:
    shape, dtype = place["shape"], _TYPES[place["type"]]
    count = 1
    for each in shape:
        count *= each
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin + place["at"]).view(shape)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
