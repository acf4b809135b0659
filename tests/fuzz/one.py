#!/usr/bin/env python3
"""Fuzzes one target, FUZZ_TARGET, in this process: `one.py [options of libFuzzer]`.

libFuzzer starts it again to merge corpora, with options of its own.
"""

from __future__ import annotations

import os
import sys

import atheris

with atheris.instrument_imports(include=["agent", "click", "h11", "starlette", "uvicorn", "trainer_runtime.ps"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Until it is told to stop, or something breaks."""
    target = TARGETS[os.environ["FUZZ_TARGET"]]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
