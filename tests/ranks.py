"""Ranks of a group without an agent, as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from ports import free_port

from trainer_runtime import contract

if TYPE_CHECKING:
    from pathlib import Path

BOUND_S = 150.0


def run(
    script: str,
    directory: Path,
    *args: str,
    world: int,
    group: int,
    own: dict[int, dict[str, str]] | None = None,
) -> list[tuple[int, list[str]]]:
    """Run a group to its end; return exit codes and lines in rank order.

    Args:
        script: what each rank runs.
        directory: of the checkpoints.
        *args: the script's.
        world: number of ranks.
        group: the group's number.
        own: variables of ranks.
    """
    port = free_port()
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        contract.RUN_ID: "r",
        contract.GROUP: str(group),
        contract.CHECKPOINT_DIR: str(directory),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *args],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (own or {}).get(rank, {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=BOUND_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output.splitlines()) for process, output in zip(processes, outputs, strict=True)]
