"""Vectorized hashes of ids: they determine the slot of a row and its initial values.

The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014): every bit of the result depends on every bit of the id, and it is the same on every machine.
"""

from __future__ import annotations

import hashlib

import torch

SLOTS = 1024
"""Number of slots into which ids are hashed; a shard has whole slots."""
_SLOT_SHIFT = 54  # the upper bits; `Index` uses the lower ones
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
    """Return the slot of each id, from 0 to `SLOTS` - 1."""
    return _shifted(mix(ids), _SLOT_SHIFT)


def seed_of(seed: int, name: str) -> int:
    """Return a table's own seed as a signed 64-bit integer, so that the tables of a job have different initial rows."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(ids: torch.Tensor, columns: int, seed: int) -> torch.Tensor:
    """Return numbers in [0, 1) for each id, (ids, columns), as a pure function of the arguments."""
    rows = mix(ids + seed)
    counted = rows[:, None] + torch.arange(1, columns + 1) * _GAMMA
    return _shifted(mix(counted), 40).to(torch.float32).mul_(2.0**-24)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right as unsigned integers."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)
