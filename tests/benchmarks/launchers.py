"""The launchers that are compared: how each is started, and what it can do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).resolve().parent
PLAIN, _STATE, _RUN, _LOSING = (
    str(_HERE / name) for name in ("plain_job.py", "state_job.py", "run_job.py", "losing_job.py")
)
_MANY = "1000000"
"""Restarts: a budget is not what is measured."""
_BEST_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


@dataclass(frozen=True)
class Place:
    """Where a job's agents meet, and where its script writes."""

    job_id: str
    etcd: str
    """Endpoint; all jobs of a benchmark share it."""
    port: int
    """Of the job's own rendezvous, for launchers that have one."""
    trace: Path
    checkpoint: Path

    def script(self, path: str) -> list[str]:
        """The script with its options."""
        return [path, f"--trace={self.trace}", f"--checkpoint={self.checkpoint}"]


@dataclass(frozen=True)
class Launcher:
    """One column of the comparison."""

    name: str
    title: str
    argv: Callable[[Place, str, str], list[str]]
    """Of a node, from its place, its name and np."""
    environ: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    is_elastic: bool = True
    """Trains with any number of nodes within np; else with the least, and the others are spares."""
    program: str = ""
    """Without it on PATH the launcher is left out; empty: it is always there."""
    keeps_processes: bool = False
    """Ranks that stay have the same process in the new world."""
    is_quick: bool = True
    """False: takes a minute or more for each of some faults, so it is given fewer runs."""

    @property
    def is_there(self) -> bool:
        """Whether it is installed."""
        return not self.program or shutil.which(self.program) is not None


def _ours(script: str, *arguments: str, given: tuple[str, ...] = ()) -> Callable[[Place, str, str], list[str]]:
    def argv(place: Place, name: str, np: str) -> list[str]:
        options = [f"--np={np}", f"--node_id={name}", f"--max_restarts={_MANY}", *given]
        return [*elastic_agent("run", place.etcd, place.job_id), *options, *place.script(script), *arguments]

    return argv


def elastic_agent(command: str, etcd: str, job_id: str) -> list[str]:
    """One of our own commands about a job."""
    return [sys.executable, "-m", "agent", command, f"--elastic_server={etcd}", f"--job_id={job_id}"]


def _torch(start: list[str], *options: str) -> Callable[[Place, str, str], list[str]]:
    def argv(place: Place, _name: str, np: str) -> list[str]:
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{place.port}", f"--rdzv-id={place.job_id}"]
        usual = [f"--nnodes={np}", "--nproc-per-node=1", "--local-addr=127.0.0.1", f"--max-restarts={_MANY}"]
        return [*start, *rendezvous, *usual, *options, *place.script(PLAIN)]

    return argv


_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_TUNED = ("--monitor-interval=0.1", f"--rdzv-conf={_BEST_CONF}")

OURS = Launcher("ours", "elastic-agent", _ours(_STATE), is_ours=True)
LAUNCHERS = {
    each.name: each
    for each in (
        OURS,
        Launcher("ours-run", "elastic-agent, State.run", _ours(_RUN), is_ours=True, keeps_processes=True),
        Launcher(
            "ours-hot",
            "elastic-agent, State.run, standbys set up",
            _ours(_RUN, given=("--standby=hot",)),
            is_ours=True,
            is_elastic=False,
            keeps_processes=True,
        ),
        Launcher("ours-plain", "elastic-agent, plain script", _ours(PLAIN), is_ours=True),
        Launcher(
            "torchrun-best",
            "torchrun at its best",
            _torch(_TORCHRUN, *_TUNED),
            environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
        Launcher("torchrun", "torchrun, defaults", _torch(_TORCHRUN), is_quick=False),
        Launcher(
            "ft_launcher",
            "NVIDIA ft_launcher",
            _torch(["ft_launcher"], "--ignore-missing-fault-tol-cfg", *_TUNED),
            environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            is_elastic=False,
            program="ft_launcher",
            is_quick=False,
        ),
    )
}


def losing(megabytes: int, step_s: float, *, is_sharded: bool) -> Launcher:
    """Ours, with a State and steps of such sizes."""
    script = _ours(_LOSING, f"--megabytes={megabytes}", f"--step_s={step_s}", *(["--sharded"] if is_sharded else []))
    return Launcher("ours", "elastic-agent", script, is_ours=True)
