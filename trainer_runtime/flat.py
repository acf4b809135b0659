"""A state as one flat run of bytes: a skeleton, and after it the storages of its tensors as they are in memory.

To write one is one copy of memory for each storage; to read one, the tensors are laid over the bytes where they are.
Storages are kept, not tensors, so that what shares memory (tied weights) is there once.

| bytes | content |
|---|---|
| 8, 8 | size of the skeleton; number of storages |
| 16 each | of the storages: where it begins, and its size |
| the skeleton | the structure, with a reference in each tensor's place |
| the rest | the storages, each aligned |

The skeleton is a pickle in the frame of a file of `torch.load`, which reads it with `weights_only`: that builds plain
values and runs nothing else.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
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
_HEAD = struct.Struct("<QQ")
_PLACE = struct.Struct("<QQ")
_PROTOCOL = 2  # the one that `weights_only` reads


class UnknownKindError(TypeError):
    """A value is of a kind that is not known to load back."""


def _frame() -> tuple[bytes, bytes]:
    """Return what `torch.load` wants before and after the skeleton."""
    whole = io.BytesIO()
    torch.save(0, whole, _use_new_zipfile_serialization=False)
    before, _, after = whole.getvalue().partition(pickle.dumps(0, _PROTOCOL))
    return before, after


class Flattened:
    """A state that can be written: the skeleton as it was, the storages as they are when they are copied.

    Raises:
        UnknownKindError: there is something else in it than tensors and plain values.
    """

    def __init__(self, value: object) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._indices: dict[int, int] = {}
        skeleton = pickle.dumps(self._pack(value), _PROTOCOL)
        at = _HEAD.size + len(self.storages) * _PLACE.size + len(skeleton)
        head = [_HEAD.pack(len(skeleton), len(self.storages))]
        self.places: list[int] = []
        """Where the storages begin."""
        for storage in self.storages:
            at = _aligned(at)
            self.places.append(at)
            head.append(_PLACE.pack(at, storage.nbytes()))
            at += storage.nbytes()
        self.bytes = _aligned(at)
        """Of all of it."""
        self._head = b"".join((*head, skeleton))

    def write(self, target: torch.Tensor) -> None:
        """Copy all of it.

        Args:
            target: as many bytes on the CPU.
        """
        self.write_head(target)
        for index in range(len(self.storages)):
            self.write_storage(target, index)

    def write_head(self, target: torch.Tensor) -> None:
        """Copy all but the storages."""
        target[: len(self._head)] = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)

    def write_storage(self, target: torch.Tensor, index: int) -> None:
        """Copy one storage."""
        storage = self.storages[index]
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        target[self.places[index] :][: len(source)] = source

    def _pack(self, value: Any) -> Any:  # noqa: ANN401 - whatever a state holds
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._refer(value)
        if kind is OrderedDict:
            packed = OrderedDict((key, self._pack(part)) for key, part in value.items())
            packed.__dict__.update(value.__dict__)  # a module's state has the versions of its parts there
            return packed
        if kind is dict:
            return {key: self._pack(part) for key, part in value.items()}
        if kind in {list, tuple}:
            return value if _PLAIN.issuperset(map(type, value)) else kind(map(self._pack, value))
        raise UnknownKindError(f"wanted tensors and plain values, got {kind.__module__}.{kind.__qualname__}")

    def _refer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if not is_ordinary(tensor):
            packed = io.BytesIO()
            torch.save(tensor.detach().cpu(), packed)
            return (_PACKED, packed.getvalue())
        storage = tensor.untyped_storage()
        identity = storage._cdata  # noqa: SLF001 - an address in memory may be on any device, or be no address at all
        index = self._indices.setdefault(identity, len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return (_MARK, index, tensor.dtype, *place, tensor.requires_grad, isinstance(tensor, nn.Parameter))


def unflatten(data: mmap.mmap | memoryview) -> Any:  # noqa: ANN401 - as it was
    """Return the state in these bytes, its tensors laid over them.

    Raises:
        ValueError, RuntimeError, pickle.UnpicklingError: the bytes are something else.
    """
    size, count = _HEAD.unpack_from(data)
    begin = _HEAD.size + count * _PLACE.size
    places = list(_PLACE.iter_unpack(data[_HEAD.size : begin]))
    before, after = _frame()
    file = io.BytesIO(b"".join((before, data[begin : begin + size], after)))
    skeleton = torch.load(file, weights_only=True)
    storages = [_over(data, at, length) for at, length in places]
    return _unpack(skeleton, storages)


def _unpack(value: Any, storages: list[torch.UntypedStorage]) -> Any:  # noqa: ANN401 - as it was
    kind = type(value)
    if kind is tuple and value and value[0] == _MARK:
        return _tensor(storages, *value[1:])
    if kind is tuple and value and value[0] == _PACKED:
        return torch.load(io.BytesIO(value[1]), weights_only=True)
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _unpack(part, storages)
        return value
    if kind in {list, tuple}:
        return kind(_unpack(part, storages) for part in value)
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
