"""A wall clock that is wrong by what /ledger/clock.{host} says, in seconds: for all Python processes of that container.

It is found on PYTHONPATH by the interpreter itself, before anything else runs. gRPC alone is told the truth: it makes
deadlines for a part of it in C, which asks the kernel.
"""

import contextlib
import socket
import sys
import time
from pathlib import Path


def _be_wrong_by(ahead_s: float) -> None:
    right, right_ns = time.time, time.time_ns

    def wrong() -> float:
        is_grpc = sys._getframe(1).f_globals.get("__name__", "").startswith("grpc")
        return right() if is_grpc else right() + ahead_s

    time.time = wrong
    time.time_ns = lambda: right_ns() + int(ahead_s * 1e9)


with contextlib.suppress(FileNotFoundError):
    _be_wrong_by(float(Path(f"/ledger/clock.{socket.gethostname()}").read_text(encoding="utf-8")))
