"""Programs of the checks, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpu_check.results import JOBS, ROOT, CheckFailed

from agent.children import at_parents_end

LIMIT_S = 150.0


def run(program: str, *arguments: object, environ: Mapping[str, str] | None = None) -> tuple[dict[str, Any], float]:
    """Run a program to its end; return what it printed as JSON on its last line, and the seconds from start to end.

    Raises:
        CheckFailed: it failed, or took longer than `LIMIT_S`.
    """
    began = time.monotonic()
    argv = [sys.executable, str(JOBS / program), *map(str, arguments)]
    try:
        done = subprocess.run(argv, env=_environ(environ), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{program} did not end within {LIMIT_S:g} s") from error
    if done.returncode:
        raise CheckFailed(f"{program} failed with code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - began


@contextmanager
def started(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a program, wait for the line that it prints once it is ready, and yield its process; then kill it.

    Raises:
        CheckFailed: it ended without a line.
    """
    argv = [sys.executable, str(JOBS / program), *map(str, arguments)]
    with subprocess.Popen(
        argv,
        env=_environ(None),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=at_parents_end(9),  # noqa: PLW1509 - if this process is killed, nobody ends it
    ) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise CheckFailed(f"{program} ended before it was ready")
            yield process
        finally:
            process.kill()


def _environ(more: Mapping[str, str] | None) -> dict[str, str]:
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, **(more or {})}
