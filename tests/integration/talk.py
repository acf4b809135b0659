"""A rank that says lines until it is told, by a file in the directory given, to crash or to finish."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

here, rank = Path(sys.argv[1]), os.environ["RANK"]
number = 0
while not (here / "finish").exists():
    crash = here / f"crash-{rank}"
    if crash.exists():
        crash.unlink()
        sys.exit("crashing")
    number += 1
    sys.stdout.write(f"line {number}\n")
    sys.stdout.flush()
    time.sleep(0.05)
sys.stdout.write("the last word\n")
