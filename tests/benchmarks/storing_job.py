"""How much memory a rank takes as it saves and restores: `storing_job.py OUT MEGABYTES` writes megabytes as JSON.

Runs under an agent without snapshots. The first process saves, and ends with code 1; the second one restores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch
from saving_job import build_weights

import trainer_runtime as tr

_NEVER = 10**9


def resident_mb(field: str, process: str = "self") -> float:
    """Resident memory of a process: now (`VmRSS`), or its peak (`VmHWM`)."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    found = next(line for line in lines if line.startswith(f"{field}:"))
    return int(found.split()[1]) * 1024 / 1e6


def begin() -> float:
    """Forget the peak; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_mb("VmRSS")


def agent_mb() -> float:
    """The peak of the agent that has started this process."""
    agents = [each for each in psutil.Process().parents() if each.cmdline()[1:3] == ["-m", "agent"]]
    return resident_mb("VmHWM", str(agents[-1].pid))


def main() -> None:
    """Save, or restore if there is a checkpoint."""
    out = Path(sys.argv[1])
    tr.init()
    weights = build_weights(int(sys.argv[2]))
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    state = tr.State(model=weights, optimizer=optimizer, save_every=_NEVER)
    before = begin()
    state.restore()
    if state.step:
        restored = {"before_mb": before, "peak_mb": resident_mb("VmHWM"), "agent_mb": agent_mb()}
        out.write_text(json.dumps({**json.loads(out.read_text(encoding="utf-8")), "restored": restored}))
        return
    state.commit()
    before = begin()
    state.save()
    saved = {"before_mb": before, "peak_mb": resident_mb("VmHWM"), "agent_mb": agent_mb()}
    out.write_text(json.dumps({"saved": saved}), encoding="utf-8")
    sys.exit(1)


if __name__ == "__main__":
    main()
