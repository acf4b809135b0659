"""Loading sharded modules and their optimizers from checkpoints, through torch.distributed.checkpoint.

Each rank reads the shards that it needs, whatever the number of ranks was then and is now. Only tensors are there. The
rest of an optimizer (its param groups) is plain and small, and stays with the rest of the State.

torch stores the list of shards as a pickle, which could run any code when it is loaded. Here the pickle may refer only
to the few classes that such a list consists of, it cannot modify them, and the files that it lists must be in its
directory.
"""

from __future__ import annotations

import io
import pickle
from contextlib import contextmanager
from enum import Enum, EnumType
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from trainer_runtime.capture.shard_files import METADATA
from trainer_runtime.capture.shard_writer import ShardWriter
from trainer_runtime.capture.sharded_objects import ShardedObjects
from trainer_runtime.checkpoint import open_file, read_file

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Generator, Iterable, Iterator, Mapping

    from trainer_runtime.rank_messages import RankMessages

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
    """Stand-in for an enumeration's member, which exists once in the process. torch only compares it."""

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


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file of shards with the checks of `open_file`."""
        if mode != "rb":
            raise ValueError(f"wanted to read {path}, got the mode {mode}")
        with open_file(Path(path)) as stream:
            yield cast("io.IOBase", stream)


class _Reader(FileSystemReader):
    def __init__(self, shard_dir: Path) -> None:
        super().__init__(shard_dir)
        self.fs = _Files()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:  # noqa: ANN401 - torch's signature
        """Read the list of shards with the restricted unpickler."""
        found = _Unpickler(io.BytesIO(read_file(Path(self.path) / METADATA, _LIST_BYTES))).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise UnsafeListError(f"wanted a list of shards, got {type(found).__name__}")
        for name in {str(each.relative_path) for each in found.storage_data.values()}:
            if name in {"", ".", ".."} or not {"/", "\0"}.isdisjoint(name):
                raise UnsafeListError(f"wanted the name of a file beside the list of shards, got {name!r}")
        found.storage_meta.load_id = self.load_id  # type: ignore[union-attr] # torch writes one
        return found


class Shards:
    """The sharded objects of a State, in files.

    Args:
        objects: modules and optimizers of a State, by name.

    Raises:
        ValueError: an optimizer has parameters of a sharded module and others, for which torch has no common names.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.objects = ShardedObjects(objects)

    def writer(self, directory: Path, messages: RankMessages, of_thread: RankMessages) -> ShardWriter:
        """Return the object that writes this rank's shards of each checkpoint; arguments as `ShardWriter`."""
        return ShardWriter(self.objects, directory, messages, of_thread, rank=get_rank(), world_size=get_world_size())

    def load(self, shard_dir: Path, plain: dict[str, Any]) -> None:
        """Load the shards of a checkpoint; a collective.

        Args:
            shard_dir: directory of the shards.
            plain: the result of `ShardedObjects.plain` when they were written.

        Raises:
            UnsafeListError: the list of shards is not one.
            ValueError: the shards do not fit the objects.
        """
        parameters = [each for _, _, optimizer in self.objects.optimizers() for each in _parameters(optimizer)]
        with _as_new(parameters):
            for name, module, optimizer in self.objects.optimizers():
                optimizer.state.clear()
                for parameter in _named(name, module, optimizer, plain[name]["state"]):
                    parameter.requires_grad_()
            self._load(shard_dir, self._read_with_states(), plain)

    def _read_with_states(self) -> dict[str, Any]:
        """Return the tensors to load into. torch creates the optimizers' states by a step without effect."""
        tensors: dict[str, Any] = {name: get_state_dict(module, ())[0] for name, module in self.objects.modules()}
        for name, module, optimizer in self.objects.optimizers():
            state: Any = get_state_dict(module, optimizer)[1]
            tensors[name] = {
                key: {kind: value for kind, value in of.items() if isinstance(value, torch.Tensor)}
                for key, of in state["state"].items()
            }
        return tensors

    def _load(self, shard_dir: Path, tensors: dict[str, Any], plain: dict[str, Any]) -> None:
        """Read the tensors with these names in place, and load them into the objects."""
        try:
            load(tensors, storage_reader=_Reader(shard_dir))
        except CheckpointException as error:
            raise ValueError(f"the shards in {shard_dir} do not fit the objects: {_reasons(error)}") from error
        for name, module in self.objects.modules():
            set_model_state_dict(module, tensors[name])
        for name, module, optimizer in self.objects.optimizers():
            set_optimizer_state_dict(module, optimizer, _join(tensors[name], plain[name]))


@contextmanager
def _as_new(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Freeze all parameters and clear their gradients: torch then creates state only for those unfrozen in the block.

    The saved optimizer states may belong to other parameters than those trained now, as a script may freeze and
    unfreeze parameters.
    """
    before = [(each, each.requires_grad, each.grad) for each in parameters]
    for each in parameters:
        each.grad = None
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each, requires_grad, grad in before:
            each.requires_grad_(requires_grad)
            each.grad = grad


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _named(name: str, module: nn.Module, optimizer: Optimizer, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters that torch saves under these names; all are frozen, so this creates no optimizer state."""
    groups: Any = get_optimizer_state_dict(module, optimizer)["param_groups"]
    own = dict(zip((each for group in groups for each in group["params"]), _parameters(optimizer), strict=True))
    unknown = sorted({*names} - own.keys())
    if unknown:
        raise ValueError(f"the checkpoint has a state of {name} for {unknown[0]}, which is none of its parameters")
    return [own[each] for each in names]


def _reasons(error: CheckpointException) -> str:
    """Return one line with each rank's error, without tracebacks."""
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {type(caught).__name__}: {caught}" for rank, (caught, _) in failures)


def _join(tensors: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    state = {name: {**rest["state"].get(name, {}), **of} for name, of in tensors.items()}
    return {"state": state, "param_groups": rest["param_groups"]}
