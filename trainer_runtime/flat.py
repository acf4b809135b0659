"""A state as one flat run of bytes: a skeleton, and after it the storages of its tensors as they are in memory.

To write one is one copy of memory for each storage; to read one, the tensors are laid over the bytes where they are.
Storages are kept, not tensors, so that what shares memory (tied weights) is there once.

| bytes | content |
|---|---|
| 8, 8, 8 | size of the skeleton, size of the table, and where the storages begin |
| the skeleton | the structure, with a number in each tensor's place |
| the table | of the tensors: how each lies in which storage; of the storages: where each begins, and its size |
| the rest | the storages, each aligned |

Skeleton and table are pickles, each to be put in the frame of a file of `torch.load`, which reads it with
`weights_only`: that builds plain values and runs nothing else.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_runtime.hostcopy import is_ordinary

if TYPE_CHECKING:
    import mmap

ALIGNED_BYTES = 64
"""Any tensor may begin there."""

_MARK, _PACKED = "trainer_runtime.flat: a tensor", "trainer_runtime.flat: a packed tensor"
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size, torch.device})
_HEAD = struct.Struct("<QQQ")
_PROTOCOL = 2  # the one that `weights_only` reads


class UnknownKindError(TypeError):
    """A value is of a kind that is not known to load back."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of a state are, in memory and in the file: the same from step to step, as a rule."""

    seen: list[tuple[Any, ...]]
    """What tells that they are the same tensors: `_Walk.seen`."""
    table: bytes
    sources: list[torch.Tensor]
    """The storages, as bytes. They are held here, so that nothing else can have their addresses meanwhile."""
    places: list[int]
    """Where they begin, counted from the first one."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Flattened:
    """A state that can be written: the skeleton as it was, the storages as they are when they are copied."""

    head: bytes
    layout: Layout

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return len(self.head) + self.layout.bytes

    def write_head(self, target: torch.Tensor) -> None:
        """Copy all but the storages.

        Args:
            target: as many bytes on the CPU as all of it has.
        """
        target[: len(self.head)] = torch.frombuffer(bytearray(self.head), dtype=torch.uint8)

    def targets(self, target: torch.Tensor) -> list[torch.Tensor]:
        """Return where in it the storages are to be copied to."""
        begin = len(self.head)
        return [
            target[begin + at : begin + at + len(source)]
            for at, source in zip(self.layout.places, self.layout.sources, strict=True)
        ]


class Flattener:
    """Flattens one state again and again; what stays the same is found out once."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def flatten(self, value: object) -> Flattened:
        """Return the state as it can be written.

        Raises:
            UnknownKindError: there is something else in it than tensors and plain values.
        """
        walk = _Walk()
        skeleton = pickle.dumps(walk.pack(value), _PROTOCOL)
        layout = self._layout
        if layout is None or walk.seen != layout.seen:
            layout = self._layout = _lay_out(walk)
        size = _aligned(_HEAD.size + len(skeleton) + len(layout.table))
        head = b"".join((_HEAD.pack(len(skeleton), len(layout.table), size), skeleton, layout.table))
        return Flattened(head.ljust(size), layout)


class _Walk:
    """Through a state: the structure with a number in each tensor's place, and the tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.seen: list[tuple[Any, ...]] = []
        """Of each tensor, where its data is and how it lies there."""

    def pack(self, value: Any) -> Any:  # noqa: ANN401 - whatever a state holds
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._note(value)
        if kind is OrderedDict:
            packed = OrderedDict((key, self.pack(part)) for key, part in value.items())
            packed.__dict__.update(value.__dict__)  # a module's state has the versions of its parts there
            return packed
        if kind is dict:
            return {key: self.pack(part) for key, part in value.items()}
        if kind in {list, tuple}:
            return value if _PLAIN.issuperset(map(type, value)) else kind(map(self.pack, value))
        raise UnknownKindError(f"wanted tensors and plain values, got {kind.__module__}.{kind.__qualname__}")

    def _note(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if not is_ordinary(tensor):
            packed = io.BytesIO()
            torch.save(tensor.detach().cpu(), packed)
            return (_PACKED, packed.getvalue())
        self.tensors.append(tensor)
        self.seen.append((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad))
        return (_MARK, len(self.tensors) - 1)


def _lay_out(walk: _Walk) -> Layout:
    table, places, at = [], [], 0
    sources: list[torch.Tensor] = []
    indices: dict[int, int] = {}
    for tensor in walk.tensors:
        storage = tensor.untyped_storage()
        # An address in memory may be on any device, or be no address at all.
        index = indices.setdefault(storage._cdata, len(sources))  # noqa: SLF001 - it has no other name
        if index == len(sources):
            sources.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            places.append(at)
            at += _aligned(storage.nbytes())
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        table.append((index, tensor.dtype, *place, tensor.requires_grad, isinstance(tensor, nn.Parameter)))
    where = list(zip(places, map(len, sources), strict=True))
    return Layout(walk.seen, pickle.dumps((table, where), _PROTOCOL), sources, places, at)


def unflatten(data: mmap.mmap | memoryview) -> Any:  # noqa: ANN401 - as it was
    """Return the state in these bytes, its tensors laid over them.

    Raises:
        ValueError, RuntimeError, pickle.UnpicklingError: the bytes are something else.
    """
    skeleton_bytes, table_bytes, begin = _HEAD.unpack_from(data)
    table_at = _HEAD.size + skeleton_bytes
    skeleton = _read(data[_HEAD.size : table_at])
    table, where = _read(data[table_at : table_at + table_bytes])
    storages = [_over(data, begin + at, length) for at, length in where]
    return _unpack(skeleton, [_tensor(storages, *place) for place in table])


def _read(pickled: bytes | memoryview) -> Any:  # noqa: ANN401 - as it was
    before, after = _frame()
    return torch.load(io.BytesIO(b"".join((before, pickled, after))), weights_only=True)


@cache
def _frame() -> tuple[bytes, bytes]:
    """Return what `torch.load` wants before and after a pickle."""
    whole = io.BytesIO()
    torch.save(0, whole, _use_new_zipfile_serialization=False)
    before, _, after = whole.getvalue().partition(pickle.dumps(0, _PROTOCOL))
    return before, after


def _unpack(value: Any, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401 - as it was
    kind = type(value)
    if kind is tuple and value and value[0] == _MARK:
        return tensors[value[1]]
    if kind is tuple and value and value[0] == _PACKED:
        return torch.load(io.BytesIO(value[1]), weights_only=True)
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _unpack(part, tensors)
        return value
    if kind in {list, tuple}:
        return kind(_unpack(part, tensors) for part in value)
    return value


def _tensor(
    storages: list[torch.UntypedStorage],
    index: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,  # noqa: FBT001 - in the order in which it is written
    is_parameter: bool,  # noqa: FBT001 - as above
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storages[index], offset, shape, stride)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _over(data: mmap.mmap | memoryview, at: int, length: int) -> torch.UntypedStorage:
    if not length:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(data, dtype=torch.uint8, count=length, offset=at).untyped_storage()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
