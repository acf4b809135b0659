"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(is_so: Callable[[], object], what: str, within_s: float = 20.0) -> None:
    """Wait until the condition is true; fail in time if it never is."""
    give_up_at = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < give_up_at, f"not in time: {what}"
        time.sleep(0.01)
