"""Fuzzes one target after the other, each until it is done. See `scripts/fuzz`.

Slices of a minute, each in a process of its own, add to a corpus in `.cache/`. A target is done when for so many
minutes nothing new was reached. What is kept is merged into the committed corpus: the fewest inputs that do as much.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent
_WORK = Path(".cache/fuzz")
_SLICE_S = 60
_TARGETS = ("codec", "stranger", "reader", "peer", "http", "command-line", "ps")
_COVERED = re.compile(r"\bcov: (\d+)")


def main() -> int:
    """Fuzz what is asked for; 1 if something broke."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(_TARGETS)}")
    parser.add_argument("--idle", type=int, default=10, metavar="MINUTES", help="without anything new (10)")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(_TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}: there are {', '.join(_TARGETS)}")
    return max(_fuzz(target, arguments.idle) for target in arguments.targets or _TARGETS)


def _fuzz(target: str, idle: int) -> int:
    committed, found = _HERE / "corpus" / target, _WORK / target
    found.mkdir(parents=True, exist_ok=True)
    began_at, quiet, covered = time.monotonic(), 0, 0
    while quiet < idle:
        done = _run(target, f"-max_total_time={_SLICE_S}", str(found), str(committed))
        if done.returncode:
            print(f"{done.stdout}\nfuzz: {target} broke; the input is in {_WORK}")
            return 1
        reached = max(map(int, _COVERED.findall(done.stdout)), default=0)
        quiet, covered = (0, reached) if reached > covered else (quiet + 1, covered)
    merged = _run(target, "-merge=1", str(committed), str(found))
    if merged.returncode:
        print(f"{merged.stdout}\nfuzz: {target}: what was found could not be merged")
        return 1
    minutes = (time.monotonic() - began_at) / 60
    inputs = len(list(committed.iterdir()))
    print(f"fuzz: {target} is done after {minutes:.0f} minutes: {covered} places reached, {inputs} inputs", flush=True)
    return 0


def _run(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        str(_HERE / "one.py"),
        f"-artifact_prefix={_WORK}/{target}-",
        "-timeout=20",
        *options,
    ]
    return subprocess.run(
        argv,
        env={**os.environ, "FUZZ_TARGET": target},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
