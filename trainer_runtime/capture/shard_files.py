"""Files of shards in the format of torch.distributed.checkpoint, without its collectives.

Each rank writes one file with the blocks that it holds. Rank 0 writes the list of all blocks, once it knows that they
make up every tensor. torch can read the result with any number of ranks, and convert it (`dcp_to_torch_save`). Each
rank that loads reads the list, and then the blocks that overlap with its own.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer_runtime.capture.blocks import are_disjoint
from trainer_runtime.capture.gathering import placed_tensors
from trainer_runtime.capture.shard_list import METADATA, ListedBlock, read_list
from trainer_runtime.checkpoint import open_file
from trainer_runtime.checkpoint_files import HashingFile, write_synced
from trainer_runtime.manifest import SHARDS, StoredFile
from trainer_runtime.object_store import is_remote, make_directory, new_file, read_range, size_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from trainer_runtime.capture.blocks import Place
    from trainer_runtime.capture.gathering import Captured, TensorPath
    from trainer_runtime.capture.sharded_objects import PlacedTensor
    from trainer_runtime.capture.shards import Shards

_VERSION = "1.0.0"
"""The version of the format, as torch 2.13 names it."""


class Entry(NamedTuple):
    """One block in a file."""

    path: TensorPath
    """Names of the object, the tensor, and for an optimizer the kind of its state."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    """Offset in the file, in bytes."""
    length: int
    """Size in the file, in bytes."""


class ShardFile(NamedTuple):
    """A file that one rank has written."""

    name: str
    bytes: int
    sha256: str
    entries: list[Entry]
    paths: list[TensorPath]
    """Of all tensors that the rank knows, of some of which other ranks write all blocks."""


def write_blocks(
    shard_dir: Path, rank: int, blocks: Mapping[TensorPath, PlacedTensor], paths: list[TensorPath]
) -> ShardFile:
    """Write this rank's blocks durably into a new file.

    Args:
        shard_dir: directory that rank 0 has made.
        rank: this rank.
        blocks: tensors on the CPU.
        paths: of all tensors that this rank knows.

    Raises:
        OSError: they could not be written, or the directory is not there.
    """
    if not is_remote(shard_dir) and not shard_dir.is_dir():
        raise FileNotFoundError(f"{shard_dir}, which rank 0 has made, is not there: is the directory still shared?")
    name = f"__{rank}_0.distcp"
    entries = []
    with new_file(shard_dir / name) as file:
        hashing = HashingFile(file)
        for path, ((shape, offsets), tensor) in blocks.items():
            begin = hashing.bytes
            whole = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
            hashing.save(whole)
            entries.append(Entry(path, tensor.dtype, shape, offsets, tuple(tensor.shape), begin, hashing.bytes - begin))
    return ShardFile(name, hashing.bytes, hashing.sha256.hexdigest(), entries, paths)


def write_list(
    shard_dir: Path, files: Iterable[ShardFile], aliases: Mapping[TensorPath, TensorPath]
) -> tuple[StoredFile, ...]:
    """Write the list of all blocks durably; return all files with their checksums.

    Args:
        shard_dir: directory of the files.
        files: what all ranks have written.
        aliases: further paths of tied tensors, and the path under which each is in a file.

    Raises:
        OSError: this rank does not see a file, or the blocks do not make up a tensor.
    """
    files = [*files]
    for file in files:
        if not _has(shard_dir / file.name, file.bytes):
            raise FileNotFoundError(f"rank 0 does not see in {shard_dir} what others wrote: {file.name}")
    blocks: dict[TensorPath, dict[tuple[int, ...], tuple[ShardFile, Entry]]] = {}
    for file in files:
        for entry in file.entries:
            blocks.setdefault(entry.path, {}).setdefault(entry.offsets, (file, entry))
    for path in (path for file in files for path in file.paths if path not in blocks):
        raise OSError(f"{'.'.join(path)} is known to some ranks only, so nobody has written it")
    for path, found in blocks.items():
        _require_whole(path, [entry for _, entry in found.values()])
    blocks |= {alias: blocks[path] for alias, path in aliases.items()}
    data = pickle.dumps(_list(blocks))
    write_synced(shard_dir / METADATA, data)
    stored = [StoredFile(f"{SHARDS}/{file.name}", file.bytes, file.sha256) for file in files]
    return StoredFile(f"{SHARDS}/{METADATA}", len(data), hashlib.sha256(data).hexdigest()), *stored


def write_all(
    shard_dir: Path, captured: Sequence[Captured], aliases: Mapping[TensorPath, TensorPath]
) -> tuple[StoredFile, ...]:
    """Write the blocks that all ranks held durably into a new directory, each once; return the files with checksums.

    Args:
        shard_dir: directory to create.
        captured: what each rank held, in rank order.
        aliases: as for `write_list`.

    Raises:
        OSError: they could not be written, or the blocks do not make up a tensor.
    """
    make_directory(shard_dir)
    written: set[tuple[TensorPath, Place]] = set()
    files = []
    for rank, each in enumerate(captured):
        blocks: dict[TensorPath, PlacedTensor] = {}
        held = [*placed_tensors(each)]
        for path, place, tensor in held:
            if (path, place) not in written and (tensor.numel() or not prod(place[0])):
                written.add((path, place))
                blocks[path] = place, tensor
        files.append(write_blocks(shard_dir, rank, blocks, [path for path, _, _ in held]))
    return write_list(shard_dir, files, aliases)


def load_files(objects: Shards, shard_dir: Path, plain: dict[str, Any]) -> None:
    """Load this rank's blocks from the files of all ranks that wrote a checkpoint.

    Args:
        objects: the sharded objects.
        shard_dir: directory of the shards.
        plain: the result of `Shards.plain_of` when they were written.

    Raises:
        UnsafeListError: the list of shards is not one.
        ValueError: the shards do not fit the objects.
        DamagedError, OSError: a file cannot be read.
    """
    listed = read_list(shard_dir)
    gathering = objects.gather()
    gathering.require_names({path[0] for path in listed} | plain.keys())
    for name, rest in plain.items():
        gathering.add_plain(name, rest["state"], rest["param_groups"])
    for path, blocks in listed.items():
        for block in blocks:
            if gathering.wants(path, block.shape, block.offsets, block.sizes):
                gathering.add_block(path, (block.shape, block.offsets), _read_block(shard_dir, block))
    objects.load(gathering.result())


def _has(path: Path, size_bytes: int) -> bool:
    try:
        return size_of(path) == size_bytes
    except FileNotFoundError:
        return False


def _read_block(shard_dir: Path, block: ListedBlock) -> torch.Tensor:
    path = shard_dir / block.file
    if is_remote(path):
        data = read_range(path, block.at, block.length)
    else:
        with open_file(path) as file:
            file.seek(block.at)
            data = file.read(block.length)
    found: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return found


def _require_whole(path: TensorPath, entries: list[Entry]) -> None:
    shapes = {(entry.shape, entry.dtype) for entry in entries}
    covered = sum(prod(entry.sizes) for entry in entries)
    is_disjoint = are_disjoint((entry.offsets, entry.sizes) for entry in entries)
    if len(shapes) != 1 or covered != prod(entries[0].shape) or not is_disjoint:
        raise OSError(
            f"the ranks' blocks do not make up {'.'.join(path)}: wanted disjoint blocks of one tensor with "
            f"{prod(entries[0].shape)} elements, got {[(entry.offsets, entry.sizes) for entry in entries]}"
        )


def _list(blocks: Mapping[TensorPath, Mapping[tuple[int, ...], tuple[ShardFile, Entry]]]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for path, found in blocks.items():
        name = ".".join(path)
        first = next(iter(found.values()))[1]
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=first.dtype),
            torch.Size(first.shape),
            [ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)) for _, entry in found.values()],
        )
        for number, (offsets, (file, entry)) in enumerate(found.items()):
            stored[MetadataIndex(name, offsets, number)] = _StorageInfo(file.name, entry.at, entry.length)
    listed = Metadata(tensors, {".".join(path): path for path in blocks}, stored, StorageMeta())
    listed.version = _VERSION  # not by the constructor, which has no such argument in older versions of torch
    return listed
