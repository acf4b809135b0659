"""Configuration: frozen, validated, one dataclass per concern.

Built by `agent/cli/command_line.py` from the command line and the environment. A law that does not hold is a
`ConfigError`, never silently adjusted. Durations are in seconds.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Literal

from agent.console import ConsoleConfig
from agent.core.model import MAX_NP, Policy, Timing
from agent.core.neighbours import SILENT_HEARTBEATS
from agent.errors import ConfigError
from agent.local_etcd.ensemble import Ensemble
from agent.roles.plan import RolePlan
from agent.store.access import ANONYMOUS, Credentials
from agent.store.keys import check_id
from trainer_runtime.tls import TlsFiles

MIN_LEASE_S = 2
"""etcd with its default election timeout grants no shorter one."""
LEASE_SLACK_S = 0.5
"""So late etcd may end a lease."""
MIN_DETECT_WITHIN_S = MIN_LEASE_S + LEASE_SLACK_S
_SHOWN = 40
"""Characters of a wrong value in an error."""
_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("", "K", "M", "G", "T"))}


StandbyMode = Literal["off", "torch", "learned"]


def check_script(name: str, otherwise: str) -> None:
    """Check that python can run it: a file, or a directory with `__main__.py`.

    Args:
        name: of the script.
        otherwise: what else is taken: the end of the error.

    Raises:
        ConfigError: it cannot, or nobody may know.
    """
    try:
        path = Path(name)
        found = path.is_file() or (path / "__main__.py").is_file()
        if not found and path.is_dir():
            raise ConfigError(f"{name!r} is a directory without __main__.py, which python would run{otherwise}")
    except OSError as error:  # a name that is too long, a directory that is locked
        raise ConfigError(f"cannot look for script {name!r}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"no script {name!r} in {Path.cwd()}{otherwise}")


def parse_np(text: str) -> tuple[int, int]:
    """`2` is (2, 2), `1:3` is (1, 3). Raises `ConfigError`."""
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())  # `int` takes signs and other scripts too
    np_min, np_max = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, 0)
    if not 1 <= np_min <= np_max <= MAX_NP:
        raise ConfigError(
            f"--np must be N or MIN:MAX with 1 <= MIN <= MAX <= {MAX_NP}, for example --np=2 or --np=1:3, "
            f"not {text[:_SHOWN]!r}"
        )
    return np_min, np_max


def parse_bytes(option: str, text: str | None) -> int | None:
    """`512M` is 512 * 2**20; None stays None. Raises `ConfigError`."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or (size := int(float(found[1]) * _UNITS[found[2].upper()])) < 1:
        raise ConfigError(f"{option} must be a number of bytes, for example 500M or 8G, not {text!r}")
    return size


def parse_command(option: str, text: str | None) -> tuple[str, ...]:
    """Words as a shell would split them, without its other arts. Raises `ConfigError`."""
    try:
        words = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise ConfigError(f"{option} must be a command, not {text!r}: {error}") from None
    if text is not None and (not words or which(words[0]) is None):
        raise ConfigError(f"{option}: no program {words[0] if words else text!r} on PATH")
    return words


@dataclass(frozen=True)
class JobConfig:
    """Which job, and how large."""

    job_id: str
    np_min: int
    np_max: int
    fresh: bool = False
    """Start a finished job over, and look at no checkpoint of an earlier run."""

    def __post_init__(self) -> None:
        check_id("--job_id", self.job_id)


@dataclass(frozen=True)
class NodeConfig:
    """This agent's place."""

    node_id: str
    is_node_id_chosen: bool
    """False: it is the host's name, and a second agent on this host adds `-2`."""
    address: str
    """Where the other nodes reach this one: an IP address, or a name."""
    ips: tuple[str, ...]
    """What `address` led to at the start: DNS is asked once, since nobody may wait for it later."""
    nproc: int
    """Rank processes on this node."""
    position: int = 0
    """In the operator's list of machines, from 1; 0: there is none."""
    cpus: tuple[tuple[int, ...], ...] = ()
    """Where each local rank may run; empty: anywhere."""

    def __post_init__(self) -> None:
        check_id("--node_id", self.node_id)

    def cpus_of(self, local_rank: int) -> tuple[int, ...]:
        """Where it may run; empty: anywhere."""
        return self.cpus[local_rank] if self.cpus else ()


@dataclass(frozen=True)
class Chosen:
    """Durations that were set alone. None: derived from `detect_within_s`."""

    lease_ttl_s: float | None = None
    link_heartbeat_s: float | None = None
    settle_s: float | None = None


@dataclass(frozen=True)
class TimingConfig:
    """How fast things are noticed, and how patiently they are ended."""

    detect_within_s: float = 5.0
    """A node that vanishes silently is noticed within this time; what is not chosen alone derives from it."""
    chosen: Chosen = Chosen()
    stop_grace_s: float = 15.0
    """Between SIGTERM and SIGKILL when workers are stopped for a planned change."""
    kill_timeout_s: float = 10.0
    """A node on which a worker lives on so long after SIGKILL (in the kernel, state D) is unfit."""
    handoff_timeout_s: float = 20.0
    """How long a node that was asked to leave waits for its group to stop after a common step and save it."""
    handoff_wait_s: float = 1.0
    """How long ranks that stopped and saved wait for the next group before they train on."""
    elastic_timeout_s: float | None = None
    """How long the job waits for missing nodes before it ends with code 75. None: without end."""
    preempted_code: int = 0
    """Exit code of an agent that a signal has asked to leave, and that has left."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.detect_within_s) or self.detect_within_s < MIN_DETECT_WITHIN_S:
            raise ConfigError(
                f"--detect_within must be at least {MIN_DETECT_WITHIN_S:g} s (etcd's shortest lease is 2 s), "
                f"not {self.detect_within_s:g}"
            )
        if self.lease_ttl_s < MIN_LEASE_S or self.lease_ttl_s % 1:
            raise ConfigError(f"--lease must be whole seconds, {MIN_LEASE_S} or more, not {self.lease_ttl_s:g}")
        if self.lease_ttl_s + LEASE_SLACK_S > self.detect_within_s:
            raise ConfigError(
                f"--lease must be at most --detect_within - {LEASE_SLACK_S:g} s = "
                f"{self.detect_within_s - LEASE_SLACK_S:g} s, for etcd may end it that late, not {self.lease_ttl_s:g}"
            )
        if not 0 < SILENT_HEARTBEATS * self.link_heartbeat_s <= self.lease_ttl_s:
            raise ConfigError(
                f"--link_heartbeat must be more than 0 and at most a third of the lease ({self.lease_ttl_s:g} s), "
                f"not {self.link_heartbeat_s:g}"
            )
        if not 0 <= self.settle_s < math.inf:
            raise ConfigError(f"--settle must be 0 s or more, not {self.settle_s:g}")
        if not 0 < self.kill_timeout_s < math.inf:
            raise ConfigError(f"--kill_timeout must be more than 0 s, not {self.kill_timeout_s:g}")
        if not 0 <= self.stop_grace_s < math.inf:
            raise ConfigError(f"--stop_grace must be 0 s or more, not {self.stop_grace_s:g}")
        if not 0 < self.handoff_wait_s <= self.handoff_timeout_s < math.inf:
            raise ConfigError(
                f"--handoff_wait must be more than 0 s and at most --handoff_timeout ({self.handoff_timeout_s:g} s), "
                f"not {self.handoff_wait_s:g}"
            )
        if self.elastic_timeout_s is not None and not 0 < self.elastic_timeout_s < math.inf:
            raise ConfigError(f"--elastic_timeout must be more than 0 s, not {self.elastic_timeout_s:g}")

    @property
    def lease_ttl_s(self) -> float:
        """The lease: whole seconds, and etcd ends it up to half a second late."""
        derived = max(MIN_LEASE_S, math.floor(self.detect_within_s - LEASE_SLACK_S))
        return derived if self.chosen.lease_ttl_s is None else self.chosen.lease_ttl_s

    @property
    def link_heartbeat_s(self) -> float:
        """Between two signs of life on a link; three that fail to come make a silence."""
        chosen = self.chosen.link_heartbeat_s
        return self.detect_within_s / 10 if chosen is None else chosen

    @property
    def settle_s(self) -> float:
        """Nodes that start together arrive within this time of each other."""
        return self.detect_within_s / 5 if self.chosen.settle_s is None else self.chosen.settle_s

    @property
    def effective(self) -> Timing:
        """What `status` shows."""
        return Timing(
            detect_within_s=self.detect_within_s,
            lease_ttl_s=self.lease_ttl_s,
            link_heartbeat_s=self.link_heartbeat_s,
            settle_s=self.settle_s,
        )


@dataclass(frozen=True)
class WorkerConfig:
    """What is run, and where its output goes."""

    command: tuple[str, ...]
    """Complete argv of a rank process."""
    log_dir: Path
    checkpoint_dir: Path
    max_restarts: int
    """Worker failures without progress that are answered with a restart."""
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    """What of the ranks' output is shown."""
    role: str = "default"
    """What ROLE_NAME says."""
    cwd: Path = field(default_factory=Path.cwd)
    """Where ranks begin: what the agent began in, also if that was removed or replaced meanwhile."""
    progress_window_s: float = 60.0
    """New steps that take so long, at their usual pace, are progress."""
    standby: StandbyMode = "learned"
    """What processes that wait for the next restart have imported: torch, or what the script imported last time."""
    ends_at_mistakes: bool = False
    """The job ends when a mistake in the script ends every rank twice in a row before anything is trained."""
    stdin_rank: int | None = None
    """Rank that reads the agent's standard input. None: rank 0, if there is no other."""
    script_from_stdin: str | None = None
    """File with the script where that is `-`, which python reads from standard input. None: it has a name."""

    def stdin_of(self, rank: int, world_size: int) -> str | None:
        """File that is the standard input of a rank. None: it is the agent's own."""
        if self.script_from_stdin is not None:
            return self.script_from_stdin
        reads = rank == self.stdin_rank if self.stdin_rank is not None else world_size == 1
        return None if reads else os.devnull

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"--max_restarts must be 0 or more, not {self.max_restarts}")
        if not 0 < self.progress_window_s < math.inf:
            raise ConfigError(f"--progress_window must be more than 0 s, not {self.progress_window_s:g}")


@dataclass(frozen=True)
class HangConfig:
    """What is taken for a hang. A rank in a phase is never taken for one."""

    timeout_s: float | None = None
    """So long without a step and without a byte of output, for any program; the rest then counts for nothing.
    0: nothing is a hang. None: only ranks that commit steps are watched, by the rest."""
    floor_s: float = 60.0
    """Less than this is never too long for a step."""
    factor: float = 50.0
    """So many usual steps are too long for one."""
    first_s: float = 3600.0
    """So long may the first step of a group take, and each step while it is not known what is usual."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 <= self.timeout_s < math.inf:
            raise ConfigError(f"--hang_timeout must be 0 s (off) or more, not {self.timeout_s:g}")
        if not 0 < self.floor_s < math.inf:
            raise ConfigError(f"--hang_floor must be more than 0 s, not {self.floor_s:g}")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"--hang_factor must be at least 1, not {self.factor:g}")
        if not self.floor_s <= self.first_s < math.inf:
            raise ConfigError(f"--hang_first must be at least --hang_floor ({self.floor_s:g} s), not {self.first_s:g}")


@dataclass(frozen=True)
class SnapshotConfig:
    """How much copies of the training in memory may cost."""

    overhead_percent: float = 1.0
    """Of the time that steps take; how often one is made follows from that. 0: none are made."""
    memory_bytes: int | None = None
    """What those of this node's ranks may take in all. None: half of what is free where they run."""

    def __post_init__(self) -> None:
        if not 0 <= self.overhead_percent <= 100:
            raise ConfigError(f"--snapshot_overhead must be from 0 (off) to 100 percent, not {self.overhead_percent:g}")

    @property
    def are_taken(self) -> bool:
        """Whether any are made."""
        return self.overhead_percent > 0


@dataclass(frozen=True)
class HealthConfig:
    """How the node is examined, beside its GPUs."""

    command: tuple[str, ...] = ()
    """Ends with code 0 where the node can train; else the last line that it prints says why not. Empty: none."""
    timeout_s: float = 60.0
    """A command that has not ended by then counts as one that failed."""
    again_s: float = 60.0
    """Between two examinations of a node that is not fit."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--health_timeout must be more than 0 s, not {self.timeout_s:g}")


@dataclass(frozen=True)
class HttpConfig:
    """Where the web page is served."""

    host: str
    port: int
    """0: the kernel chooses."""
    token: str | None = field(default=None, repr=False)
    """That lets in. None: it is derived from the job's secret."""


@dataclass(frozen=True)
class AgentConfig:
    """All of it."""

    endpoints: tuple[str, ...]
    store_timeout_s: float
    """How long to try to reach etcd at the start before the agent ends with code 69. May be without end."""
    job: JobConfig
    node: NodeConfig
    timing: TimingConfig
    workers: WorkerConfig
    health: HealthConfig = HealthConfig()
    credentials: Credentials = ANONYMOUS
    """How to connect to the endpoints, and as whom."""
    hang: HangConfig = HangConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    ensemble: Ensemble | None = None
    """The etcd that the job's agents bring. None: they meet in another one."""
    roles: RolePlan | None = None
    """The processes of a job with parameter servers. None: it has ranks."""
    gpus: tuple[str, ...] = ()
    """Those that its processes here may use."""
    http: HttpConfig | None = None
    """None: there is no page."""
    events: str | None = None
    """The file that events go to, as lines of JSON; `-`: standard output."""
    tls: TlsFiles | None = None
    """Certificate, key and authority that were given for links, the page and parameter servers. None: none."""
    facts: tuple[tuple[str, str], ...] = ()
    """What this machine runs: to be compared with the others."""
    given: tuple[tuple[str, str], ...] = ()
    """Names and values of what it was started with, to be shown."""

    @property
    def policy(self) -> Policy:
        """What the core needs to know of it."""
        return Policy(
            lease_ttl_s=self.timing.lease_ttl_s,
            settle_s=self.timing.settle_s,
            stop_grace_s=self.timing.stop_grace_s,
            kill_timeout_s=self.timing.kill_timeout_s,
            max_restarts=self.workers.max_restarts,
            progress_window_s=self.workers.progress_window_s,
            handoff_timeout_s=self.timing.handoff_timeout_s,
            handoff_wait_s=self.timing.handoff_wait_s,
            elastic_timeout_s=self.timing.elastic_timeout_s,
            preempted_code=self.timing.preempted_code,
            ends_at_mistakes=self.workers.ends_at_mistakes,
        )
