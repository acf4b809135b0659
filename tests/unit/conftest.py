"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


class _Forgetful(set[object]):
    def __contains__(self, _thing: object) -> bool:
        return False


@pytest.fixture(autouse=True)
def one_process_plays_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test restore a State again and again, as one process after the other does."""
    if "torch" in sys.modules:  # else the test is about something else, and would only wait for the import
        monkeypatch.setattr(import_module("trainer_runtime.state").State, "_restored", _Forgetful())
