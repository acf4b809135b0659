"""Reading the list of a checkpoint's shards.

torch stores it as a pickle, which could run any code when it is loaded. Here the pickle may refer only to the few
classes that such a list consists of, it cannot modify them, and the files that it lists must be in its directory.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum, EnumType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from trainer_runtime.checkpoint import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from trainer_runtime.capture.gathering import TensorPath

METADATA = ".metadata"
"""Name of the list's file."""

_LIST_BYTES = 1 << 30
"""Largest list of shards that is read. The entry of one shard takes about 200 bytes."""

_SAFE = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
    }
)


_MALFORMED = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, TypeError)
"""What a malformed pickle raises."""


class UnsafeListError(ValueError):
    """A list of shards refers to something that does not belong in it."""


class _Sealed(type):
    """Metaclass of the stand-ins that a list of shards gets for classes and functions.

    A pickle can set attributes of every object that it gets, so it gets none of the process's own. Calling a stand-in,
    or making an object of it, returns what the real class or function returns.
    """

    real: Any

    def __call__(cls, *args: Any) -> Any:  # noqa: ANN401 - as the real one
        return cls.real(*args)

    def __setattr__(cls, name: str, _value: object) -> None:
        raise UnsafeListError(f"the list of shards sets {name} of {cls.__name__}, which does not belong in one")


def _stand_in(real: Any) -> _Sealed:  # noqa: ANN401 - a class or a function
    def new(_cls: _Sealed, *args: Any) -> Any:  # noqa: ANN401 - an object of the real one
        return real.__new__(real, *args)

    if isinstance(real, EnumType):
        return _Sealed(real.__name__, (), {"kind": real, "real": lambda value: _ShardMember(real(value))})
    return _Sealed(real.__name__, (), {"real": real, "__new__": new})


class _ShardMember:
    """Stand-in for an enumeration's member, which exists once in the process."""

    __slots__ = ("_real",)

    def __init__(self, real: Enum) -> None:
        self._real = real

    def __eq__(self, other: object) -> bool:
        return self._real is other

    def __hash__(self) -> int:
        return hash(self._real)


def _member(kind: object, name: str) -> _ShardMember:
    """Stand-in for `getattr`, with which some versions of Python pickle the member of an enumeration."""
    members = getattr(kind, "kind", None) if isinstance(kind, _Sealed) else None
    if not isinstance(members, EnumType):
        raise UnsafeListError(f"the list of shards asks for an attribute of {kind!r}, which does not belong in one")
    return _ShardMember(members[name])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - stand-ins, and dtypes
        if (module, name) == ("builtins", "getattr"):
            return _stand_in(_member)
        if module == "pathlib._local":  # the name in Python 3.13 only
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) not in _SAFE and not is_dtype:
            raise UnsafeListError(f"the list of shards names {module}.{name}, which does not belong in one")
        found = super().find_class(module, name)
        return found if is_dtype else _stand_in(found)


class ListedBlock(NamedTuple):
    """A block of a tensor, and where it is."""

    file: str
    """Name of the file, beside the list."""
    at: int
    """Offset in the file, in bytes."""
    length: int
    """Size in the file, in bytes."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Of the block in it."""
    sizes: tuple[int, ...]
    """Of the block."""


def read_list(shard_dir: Path) -> dict[TensorPath, list[ListedBlock]]:
    """Return the blocks of each tensor, by path, whether this package or torch wrote them.

    Raises:
        UnsafeListError: the file is no list of shards, or names what does not belong in one.
        DamagedError, OSError: it cannot be read.
    """
    try:
        found = _Unpickler(io.BytesIO(read_file(shard_dir / METADATA, _LIST_BYTES))).load()
    except _MALFORMED as error:
        raise UnsafeListError(f"wanted a list of shards, got something else: {error!r}") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UnsafeListError(f"wanted a list of shards, got {type(found).__name__}")
    try:
        return {_path_of(found, name): _blocks_of(found, name) for name in found.state_dict_metadata}
    except (AttributeError, KeyError, TypeError) as error:
        raise UnsafeListError(f"wanted a list of shards, got something else: {error!r}") from None


def _path_of(found: Metadata, name: str) -> TensorPath:
    path = tuple(found.planner_data[name])
    if not all(isinstance(part, str) for part in path):
        raise UnsafeListError(f"wanted names of tensors in the list of shards, got {path}")
    return path


def _blocks_of(found: Metadata, name: str) -> list[ListedBlock]:
    tensor = found.state_dict_metadata[name]
    if not isinstance(tensor, TensorStorageMetadata):
        raise UnsafeListError(f"wanted a tensor in the list of shards, got {type(tensor).__name__} for {name}")
    blocks = []
    for chunk in tensor.chunks:
        stored = found.storage_data[MetadataIndex(name, chunk.offsets)]
        file = str(stored.relative_path)
        if file in {"", ".", ".."} or not {"/", "\0"}.isdisjoint(file):
            raise UnsafeListError(f"wanted the name of a file beside the list of shards, got {file!r}")
        if getattr(stored, "transform_descriptors", None):
            raise UnsafeListError(f"{file} was transformed by {stored.transform_descriptors}, which is not supported")
        block = tuple(tensor.size), tuple(chunk.offsets), tuple(chunk.sizes)
        blocks.append(ListedBlock(file, stored.offset, stored.length, *block))
    return blocks
