"""Freeing memory: one request that fails does not stop the others."""

from __future__ import annotations

import os

import pytest
from structlog.testing import capture_logs

from agent.workers.memory_release import MemoryRelease


def test_a_failure_to_free_memory_is_reported_once_and_stops_no_other() -> None:
    """Some kernels refuse to free a part of a memory."""
    read, write = os.pipe()
    other = os.memfd_create("test")
    with capture_logs() as logs:
        release = MemoryRelease()
        release.punch_hole_soon(write, 0, 4096)  # not a memory
        release.punch_hole_soon(write, 4096, 8192)
        release.close_soon(other)
        release.close()
    os.close(read)
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    assert [(each["log_level"], each["event"]) for each in logs] == [
        ("warning", "cannot free memory of older snapshots")
    ]
