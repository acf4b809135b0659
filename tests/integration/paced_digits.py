"""The digits example, whose steps take their time only until a file is there: a test is done before the training is.

Usage: paced_digits.py HURRY SCRIPT [OPTION...]. TEST_SNAPSHOT_OVERHEAD in the environment, in percent, wins over what
the agent allows, which is 100 at the most: then a machine that stands still for a while makes snapshots rarer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from trainer_runtime import contract


def main() -> None:
    """Train."""
    hurry, script, sys.argv[1:] = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]

    def sleep(duration_s: float) -> None:
        if not hurry.exists():
            time.sleep(duration_s)

    if overhead := os.environ.get("TEST_SNAPSHOT_OVERHEAD"):
        os.environ[contract.SNAPSHOT_OVERHEAD] = overhead
    spec = importlib.util.spec_from_file_location("digits", script)
    assert spec is not None
    assert spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    digits.__dict__["time"] = SimpleNamespace(time=time.time, sleep=sleep)
    digits.main()


if __name__ == "__main__":
    main()
