"""The types of numbers and names in records, with their bounds.

Somebody may write a record by hand, or into a worker's memory. A number in it must not make a decision count up to it,
overflow a field of 64 bits, or be a time that no calendar has.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_NP = 100_000
MAX_NPROC = 10_000

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Np = Annotated[int, msgspec.Meta(ge=1, le=MAX_NP)]
Nproc = Annotated[int, msgspec.Meta(ge=0, le=MAX_NPROC)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
"""A duration. It may be negative where the clocks of two nodes were compared."""
WallClock = Annotated[float, msgspec.Meta(ge=-6e10, le=2.5e11)]
"""Seconds since 1970. The range is the years 68 to 9892, because the clock of a node may be wrong."""
Run = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")]
"""Part of the paths of logs and checkpoints."""
NodeId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
"""Part of the names of logs."""
Label = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,128}\Z")]

NpRange = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,6}(?::[0-9]{1,6})?\Z")]
"""A number of nodes as a user writes it: `2` or `1:3`."""
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{64})?\Z")]
"""SHA-256 of a certificate, in hexadecimal digits. Empty: there is no certificate."""
