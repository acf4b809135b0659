"""Hashes of ids in whole batches: where a row lies, and what it begins with.

The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014): every bit of the result depends on every bit of the id, and it is the same on every machine.
"""

from __future__ import annotations

import hashlib

import torch

SLOTS = 1024
"""Ids are spread over so many slots; a server has whole slots."""
_SLOT_SHIFT = 54  # the upper bits; `Index` goes by the lower ones
_GAMMA = -0x61C8864680B583EB  # the golden ratio, as SplitMix64 counts; signed, as torch's integers are


def mix(values: torch.Tensor) -> torch.Tensor:
    """Scramble 64-bit integers of any shape, one to one."""
    mixed = values ^ _shifted(values, 30)
    mixed *= -0x40A7B892E31B1A47
    mixed ^= _shifted(mixed, 27)
    mixed *= -0x6B2FB644ECCEEE15
    mixed ^= _shifted(mixed, 31)
    return mixed


def slots_of(ids: torch.Tensor) -> torch.Tensor:
    """The slot of each id, from 0 to `SLOTS` - 1."""
    return _shifted(mix(ids), _SLOT_SHIFT)


def seed_of(seed: int, name: str) -> int:
    """A table's own seed, as a signed 64-bit integer: tables of one job begin with different rows."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(ids: torch.Tensor, columns: int, seed: int) -> torch.Tensor:
    """Numbers from 0 to below 1 for each id, (ids, columns): a pure function of its arguments."""
    rows = mix(ids + seed)
    counted = rows[:, None] + torch.arange(1, columns + 1) * _GAMMA
    return _shifted(mix(counted), 40).to(torch.float32).mul_(2.0**-24)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted right as if they were unsigned."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)
