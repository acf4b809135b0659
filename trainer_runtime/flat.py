"""A state as one run of bytes: a description, the storages of its tensors as they are in memory, plain values.

Writing one takes one memory copy per storage. Reading one maps the tensors onto the bytes in place. Storages are
written, not tensors, so that tensors which share memory (tied weights) are written once.

| bytes | content |
|---|---|
| 8, 8, 8 | size of the description; offset of the storages; offset of the values |
| the description | the containers; for each tensor its leaf, and its offset, shape and stride in a storage; for each storage its offset and size |
| the storages | each aligned |
| 8 | size of the values |
| the values | the leaves that are not tensors |

Everything but the bytes of storages and the values usually stays the same from step to step. It is computed once, and
if values need a little more room than before, nothing else moves. Description and values are pickles, each of which is
put into the frame of a `torch.load` file and read with `weights_only`, which builds plain values and runs nothing else.
A leaf that is neither plain nor an ordinary tensor is packed by `torch.save`, and is a value in this format.
"""  # noqa: E501 - a table

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_runtime.hostcopy import is_ordinary
from trainer_runtime.snapshot_same import SameTensors
from trainer_runtime.structure import PLAIN, Apart, Container, put_together, take_apart

if TYPE_CHECKING:
    import mmap

ALIGNED_BYTES = 64
"""Alignment that suffices for every tensor."""

_VALUES_ALIGNED_BYTES = 4096
"""Values usually vary in size by less than this, so that what follows them does not move."""

_PACKED = "trainer_runtime.flat: packed"
_LEAVES = PLAIN | {list, tuple, dict}  # lists and tuples of plain values, and an OrderedDict's attributes
_HEAD, _SIZE = struct.Struct("<QQQ"), struct.Struct("<Q")
_PROTOCOL = 2  # the pickle protocol that `weights_only` reads


class UnknownKindError(TypeError):
    """A value could not be loaded back."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a state in memory and in the file; usually the same from step to step."""

    containers: list[Container]
    kinds: list[type]
    """Types of the leaves."""
    is_tensor: list[bool]
    """Whether each leaf is an ordinary tensor; False for those that are packed as a value."""
    is_value: list[bool]
    same: SameTensors
    sources: list[torch.Tensor]
    """Uint8 tensors to copy: the header with the description, then the storages. The references keep the storages
    alive, so that no other storage can get their addresses."""
    places: list[int]
    """Offset of each source from the beginning of the state."""
    bytes: int

    def fits(self, apart: Apart, kinds: list[type]) -> bool:
        """Return whether this is the layout of that state."""
        if kinds != self.kinds or apart.containers != self.containers:
            return False
        return self.same.are([*compress(apart.leaves, self.is_tensor)])


@dataclass(frozen=True, slots=True)
class Flattened:
    """A state that can be written: its values as they were, its storages as they are when they are copied."""

    layout: Layout
    values: bytes

    @property
    def bytes(self) -> int:
        """Size of the whole state."""
        return self.layout.bytes + len(self.values)

    def write_values(self, memory: mmap.mmap | bytearray, at: int) -> None:
        """Write everything but the layout's sources into a memory, with the state beginning at offset `at`."""
        memory[at + self.layout.bytes : at + self.bytes] = self.values

    def targets(self, target: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of `target` to which the layout's sources are to be copied."""
        return [
            target[at : at + len(source)] for at, source in zip(self.layout.places, self.layout.sources, strict=True)
        ]

    def to_bytes(self) -> bytearray:
        """Return the whole state in a memory of its own."""
        data = bytearray(self.bytes)
        self.write_values(data, 0)
        for source, target in zip(
            self.layout.sources, self.targets(torch.frombuffer(data, dtype=torch.uint8)), strict=True
        ):
            target.copy_(source)
        return data


class Flattener:
    """Flattens the same state repeatedly; what stays the same is computed once."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._proven: dict[int, tuple[str, bytes]] = {}
        """Leaves, neither plain nor tensors, that are known to load back: the test takes longer than saving."""

    def flatten(self, value: object) -> Flattened:
        """Return the state in a form that can be written.

        Raises:
            UnknownKindError: it contains a value that could not be loaded back.
        """
        apart = take_apart(value)
        kinds = [*map(type, apart.leaves)]
        layout = self._layout
        if layout is None or not layout.fits(apart, kinds):
            layout = self._layout = _lay_out(apart, kinds)
        values = [
            leaf if type(leaf) in _LEAVES else self._pack(number, leaf)
            for number, leaf in compress(enumerate(apart.leaves), layout.is_value)
        ]
        pickled = pickle.dumps(values, _PROTOCOL)
        size = _aligned(_SIZE.size + len(pickled), _VALUES_ALIGNED_BYTES)
        return Flattened(layout, b"".join((_SIZE.pack(len(pickled)), pickled)).ljust(size, b"\0"))

    def _pack(self, number: int, leaf: object) -> tuple[str, bytes]:
        """Return a leaf that is neither plain nor a view of one storage in the form of a value."""
        if isinstance(leaf, torch.Tensor):
            return packed(leaf.detach().cpu())
        try:
            found = packed(leaf)
            if self._proven.get(number) != found:
                _value(found)
                self._proven[number] = found
        except Exception as error:
            kind = type(leaf)
            raise UnknownKindError(f"wanted what loads back, got {kind.__module__}.{kind.__qualname__}") from error
        return found


def packed(value: object) -> tuple[str, bytes]:
    """Return a value in a form that is one leaf, which `unflatten` turns back into the value."""
    file = io.BytesIO()
    torch.save(value, file)
    return _PACKED, file.getvalue()


def _lay_out(apart: Apart, kinds: list[type]) -> Layout:
    is_tensor = [isinstance(leaf, torch.Tensor) and is_ordinary(leaf) for leaf in apart.leaves]
    table, at = [], 0
    storages: list[torch.Tensor] = []
    places: list[int] = []
    indices: dict[int, int] = {}
    for number, tensor in compress(enumerate(apart.leaves), is_tensor):
        storage = tensor.untyped_storage()
        # The address of the storage object: a data pointer may belong to any device, or be null.
        index = indices.setdefault(storage._cdata, len(storages))  # noqa: SLF001 - it has no other name
        if index == len(storages):
            storages.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            places.append(at)
            at += _aligned(storage.nbytes())
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        table.append((number, index, tensor.dtype, *place, tensor.requires_grad, isinstance(tensor, nn.Parameter)))
    where = [*zip(places, map(len, storages), strict=True)]
    described = _proven((apart.containers, table, where))
    begin = _aligned(_HEAD.size + len(described))
    head = b"".join((_HEAD.pack(len(described), begin, begin + at), described))
    return Layout(
        apart.containers,
        kinds,
        is_tensor,
        [not each for each in is_tensor],
        SameTensors([*compress(apart.leaves, is_tensor)]),
        [torch.frombuffer(bytearray(head), dtype=torch.uint8), *storages],
        [0, *(begin + place for place in places)],
        begin + at,
    )


def _proven(description: object) -> bytes:
    """Return the pickled description after a trial load: its dict keys are not checked one by one."""
    try:
        described = pickle.dumps(description, _PROTOCOL)
        _read(described)
    except Exception as error:
        raise UnknownKindError("wanted keys that load back") from error
    return described


def unflatten(data: mmap.mmap | memoryview) -> Any:  # noqa: ANN401 - any state
    """Return the state in these bytes; its tensors are views of the bytes.

    Raises:
        ValueError, RuntimeError, pickle.UnpicklingError: the bytes are not a flattened state.
    """
    described_bytes, begin, values_at = _HEAD.unpack_from(data)
    containers, table, where = _read(data[_HEAD.size : _HEAD.size + described_bytes])
    (values_bytes,) = _SIZE.unpack_from(data, values_at)
    values = _read(data[values_at + _SIZE.size : values_at + _SIZE.size + values_bytes])
    storages = [_over(data, begin + at, length) for at, length in where]
    tensors = {number: _tensor(storages, *place) for number, *place in table}
    rest = map(_value, values)
    leaves = [tensors[number] if number in tensors else next(rest) for number in range(len(tensors) + len(values))]
    return put_together(containers, leaves)


def ends_of(data: memoryview) -> tuple[int, int]:
    """Return where the description of a flattened state ends, and where its values begin: offsets in bytes."""
    described_bytes, _, values_at = _HEAD.unpack_from(data)
    return _HEAD.size + described_bytes, values_at


def _read(pickled: bytes | memoryview) -> Any:  # noqa: ANN401 - any state
    before, after = _frame()
    return torch.load(io.BytesIO(b"".join((before, pickled, after))), weights_only=True)


@cache
def _frame() -> tuple[bytes, bytes]:
    """Return the bytes that a `torch.load` file has before and after its pickle."""
    whole = io.BytesIO()
    torch.save(0, whole, _use_new_zipfile_serialization=False)
    before, _, after = whole.getvalue().partition(pickle.dumps(0, _PROTOCOL))
    return before, after


def _value(value: Any) -> Any:  # noqa: ANN401 - any value
    if type(value) is tuple and value and value[0] == _PACKED:
        with torch.device("cpu"):  # torch.load builds a sparse tensor on the default device, despite map_location
            return torch.load(io.BytesIO(value[1]), weights_only=True, map_location="cpu")
    return value


def _tensor(
    storages: list[torch.UntypedStorage],
    index: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,  # noqa: FBT001 - the order of the table
    is_parameter: bool,  # noqa: FBT001 - as above
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storages[index], offset, shape, stride)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _over(data: mmap.mmap | memoryview, at: int, length: int) -> torch.UntypedStorage:
    if not length:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(data, dtype=torch.uint8, count=length, offset=at).untyped_storage()


def _aligned(size: int, to: int = ALIGNED_BYTES) -> int:
    return -(-size // to) * to
