"""Configuration of an agent: frozen, validated, one dataclass per concern.

`agent/cli/agent_config.py` builds it from the command line and the environment. A value that is out of range, or does
not fit another one, is a `ConfigError`; it is never silently adjusted. Durations are in seconds.
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
from agent.core.bounds import MAX_NP
from agent.core.model import Timing
from agent.core.neighbours import SILENT_HEARTBEATS
from agent.core.policy import Policy
from agent.errors import ConfigError
from agent.local_etcd.ensemble import Ensemble
from agent.roles.plan import RolePlan
from agent.store.access import ANONYMOUS, Credentials
from agent.store.keys import check_id
from trainer_runtime.tls import TlsFiles

MIN_LEASE_S = 2
"""etcd with its default election timeout grants no shorter lease."""
LEASE_SLACK_S = 0.5
"""etcd may end a lease this much late."""
MIN_DETECT_WITHIN_S = MIN_LEASE_S + LEASE_SLACK_S
_SHOWN = 40
"""Maximum number of characters of a wrong value in an error message."""
_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("", "K", "M", "G", "T"))}


StandbyMode = Literal["off", "torch", "learned", "hot"]


def check_script(name: str, otherwise: str) -> None:
    """Check that python can run a script: it is a file, or a directory with `__main__.py`.

    Args:
        name: of the script.
        otherwise: end of the error message: the alternatives to a script.

    Raises:
        ConfigError: python cannot run it, or its directory cannot be read.
    """
    try:
        path = Path(name)
        found = path.is_file() or (path / "__main__.py").is_file()
        if not found and path.is_dir():
            raise ConfigError(f"{name!r} is a directory without __main__.py, which python would run{otherwise}")
    except OSError as error:  # the name is too long, or the directory may not be read
        raise ConfigError(f"cannot look for script {name!r}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"no script {name!r} in {Path.cwd()}{otherwise}")


def parse_np(text: str) -> tuple[int, int]:
    """Parse `--np`: `2` is (2, 2), `1:3` is (1, 3). Raises `ConfigError`."""
    found = re.fullmatch(
        r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip()
    )  # `int` would also accept signs and other digits than 0-9
    np_min, np_max = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, 0)
    if not 1 <= np_min <= np_max <= MAX_NP:
        raise ConfigError(
            f"--np must be N or MIN:MAX with 1 <= MIN <= MAX <= {MAX_NP}, for example --np=2 or --np=1:3, "
            f"not {text[:_SHOWN]!r}"
        )
    return np_min, np_max


def parse_bytes(option: str, text: str | None) -> int | None:
    """Parse a number of bytes: `512M` is 512 * 2**20. None stays None. Raises `ConfigError`."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or (size := int(float(found[1]) * _UNITS[found[2].upper()])) < 1:
        raise ConfigError(f"{option} must be a number of bytes, for example 500M or 8G, not {text!r}")
    return size


def parse_command(option: str, text: str | None) -> tuple[str, ...]:
    """Split a command into words as a shell does, without expansions. Raises `ConfigError`."""
    try:
        words = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise ConfigError(f"{option} must be a command, not {text!r}: {error}") from None
    if text is not None and (not words or which(words[0]) is None):
        raise ConfigError(f"{option}: no program {words[0] if words else text!r} on PATH")
    return words


@dataclass(frozen=True)
class JobConfig:
    """The job: its name and its number of nodes."""

    job_id: str
    np_min: int
    np_max: int
    fresh: bool = False
    """Start a finished job over, and ignore the checkpoints of earlier runs."""

    def __post_init__(self) -> None:
        check_id("--job_id", self.job_id)


@dataclass(frozen=True)
class NodeConfig:
    """This node: its name, its addresses and its ranks."""

    node_id: str
    is_node_id_chosen: bool
    """False: it is the host name, to which a second agent on this host adds `-2`."""
    address: str
    """IP address or host name at which the other nodes reach this one."""
    ips: tuple[str, ...]
    """IP addresses of `address`, resolved once at the start, so that nothing waits for DNS later."""
    nproc: int
    """Number of rank processes on this node."""
    position: int = 0
    """Position in the operator's list of machines, from 1. 0: there is no list."""
    domain: str = ""
    """What this node shares with nodes that fail together, such as a rack. Empty: not known."""
    cpus: tuple[tuple[int, ...], ...] = ()
    """CPUs that each local rank may run on. Empty: all."""

    def __post_init__(self) -> None:
        check_id("--node_id", self.node_id)
        if self.domain:
            check_id("--fault_domain", self.domain)

    def cpus_of(self, local_rank: int) -> tuple[int, ...]:
        """CPUs that a local rank may run on. Empty: all."""
        return self.cpus[local_rank] if self.cpus else ()


@dataclass(frozen=True)
class TimingOverrides:
    """Durations that the user has set. None: derived from `detect_within_s`."""

    lease_ttl_s: float | None = None
    link_heartbeat_s: float | None = None
    settle_s: float | None = None


@dataclass(frozen=True)
class TimingConfig:
    """How fast failures are detected, and how long processes get to end."""

    detect_within_s: float = 5.0
    """A node that vanishes silently is noticed within this time. The durations in `overrides` derive from it."""
    overrides: TimingOverrides = TimingOverrides()
    stop_grace_s: float = 15.0
    """Time between SIGTERM and SIGKILL when workers are stopped for a planned change."""
    kill_timeout_s: float = 10.0
    """A node is unfit if a worker survives SIGKILL for this long (in the kernel, state D)."""
    handoff_timeout_s: float = 20.0
    """How long a node that was asked to leave waits for its group to stop after a common step and save it."""
    handoff_wait_s: float = 1.0
    """How long ranks that stopped and saved wait for the next group before they train on."""
    elastic_timeout_s: float | None = None
    """How long the job waits for missing nodes before it ends with code 75. None: no limit."""
    preempted_code: int = 0
    """Exit code of an agent that has left because a signal asked it to."""

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
        """Lease length: whole seconds. etcd may end a lease up to half a second late."""
        derived = max(MIN_LEASE_S, math.floor(self.detect_within_s - LEASE_SLACK_S))
        return derived if self.overrides.lease_ttl_s is None else self.overrides.lease_ttl_s

    @property
    def link_heartbeat_s(self) -> float:
        """Heartbeat interval on a link. After three missed heartbeats the neighbour is silent."""
        override = self.overrides.link_heartbeat_s
        return self.detect_within_s / 10 if override is None else override

    @property
    def settle_s(self) -> float:
        """Nodes that are started together are expected to arrive within this time of each other."""
        return self.detect_within_s / 5 if self.overrides.settle_s is None else self.overrides.settle_s

    @property
    def effective(self) -> Timing:
        """The durations in effect, as `elastic-agent status` shows them."""
        return Timing(
            detect_within_s=self.detect_within_s,
            lease_ttl_s=self.lease_ttl_s,
            link_heartbeat_s=self.link_heartbeat_s,
            settle_s=self.settle_s,
        )


@dataclass(frozen=True)
class WorkerConfig:
    """The rank processes: their command, directories, output and restarts."""

    command: tuple[str, ...]
    """Complete argv of a rank process."""
    log_dir: Path
    checkpoint_dir: str
    """Absolute path, or the URL of an object store."""
    max_restarts: int
    """Restarts after worker failures without progress."""
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    """Which output of the ranks the console shows."""
    role: str = "default"
    """Value of ROLE_NAME."""
    cwd: Path = field(default_factory=Path.cwd)
    """Working directory of the ranks: where the agent was started, even if that was removed or replaced since."""
    progress_window_s: float = 60.0
    """Progress is as many new steps as usually take this long."""
    standby: StandbyMode = "learned"
    """What standby processes have done: imported torch, or what the script imported last time; `hot`: also set up the
    script, if it trains within `State.run`. off: there are none."""
    ends_at_script_errors: bool = False
    """End the job if a script error ends every rank twice in a row before the first training step."""
    stdin_rank: int | None = None
    """Rank that reads the agent's standard input. None: rank 0 if it is the only rank."""
    script_from_stdin: str | None = None
    """File with the content of a script named `-`, which python reads from standard input. None: it has a file."""

    def stdin_of(self, rank: int, world_size: int) -> str | None:
        """File to use as the standard input of a rank. None: the agent's standard input."""
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
    """When a rank is suspected of hanging. A rank within `tr.phase` never is."""

    timeout_s: float | None = None
    """Time without a step and without output after which any program hangs; the other fields are then not used.
    0: hangs are not detected. None: only ranks that commit steps are watched, by the other fields."""
    floor_s: float = 60.0
    """A step that takes less than this is never suspected."""
    factor: float = 50.0
    """A step is suspected after this many usual step times."""
    first_s: float = 3600.0
    """Takes the place of `floor_s` for a group's first step, and while the usual step time is not known."""

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
    """What snapshots in memory may cost."""

    overhead_percent: float = 1.0
    """Share of the step time. The interval between snapshots follows from it. 0: no snapshots."""
    memory_bytes: int | None = None
    """Memory for the snapshots of all ranks of this node. None: half of the free memory of their cgroup."""

    def __post_init__(self) -> None:
        if not 0 <= self.overhead_percent <= 100:
            raise ConfigError(f"--snapshot_overhead must be from 0 (off) to 100 percent, not {self.overhead_percent:g}")

    @property
    def is_enabled(self) -> bool:
        """Whether snapshots are taken."""
        return self.overhead_percent > 0


@dataclass(frozen=True)
class HealthConfig:
    """The operator's health check of the node, beside the check of its GPUs."""

    command: tuple[str, ...] = ()
    """Exits with code 0 if the node can train; otherwise the last line of its output is the reason. Empty: none."""
    timeout_s: float = 60.0
    """Time limit of the command, after which it counts as failed."""
    retry_s: float = 60.0
    """Interval between checks of a node that is not fit."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--health_timeout must be more than 0 s, not {self.timeout_s:g}")


@dataclass(frozen=True)
class HttpConfig:
    """The web page: its address and access token."""

    host: str
    port: int
    """0: the kernel chooses a free one."""
    token: str | None = field(default=None, repr=False)
    """The access token. None: derived from the job's secret."""


@dataclass(frozen=True)
class AgentConfig:
    """The complete configuration of an agent."""

    endpoints: tuple[str, ...]
    store_timeout_s: float
    """How long to try to reach etcd at the start before the agent ends with code 69. May be infinite."""
    job: JobConfig
    node: NodeConfig
    timing: TimingConfig
    workers: WorkerConfig
    health: HealthConfig = HealthConfig()
    preemption_notice: tuple[str, ...] = ()
    """Command that exits with code 0 once this machine is to be preempted. It is repeated until then. Empty: none."""
    credentials: Credentials = ANONYMOUS
    """Certificates and user for the connection to the endpoints."""
    hang: HangConfig = HangConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    ensemble: Ensemble | None = None
    """The etcd that the job's agents bring. None: they use an existing one, or a private one."""
    roles: RolePlan | None = None
    """The processes of a job with parameter servers. None: the job has ranks."""
    gpus: tuple[str, ...] = ()
    """GPUs that the processes of a job with parameter servers may use on this machine."""
    http: HttpConfig | None = None
    """None: no web page is served."""
    events: str | None = None
    """File to which events are appended, one JSON object per line. `-`: standard output. None: no events."""
    tls: TlsFiles | None = None
    """Certificate, key and CA for links, the web page and parameter servers. None: the user gave none."""
    facts: tuple[tuple[str, str], ...] = ()
    """Versions of the software on this machine, to be compared with the other machines."""
    shown_options: tuple[tuple[str, str], ...] = ()
    """Names and values of the options for the banner. Empty: there is no banner."""

    @property
    def policy(self) -> Policy:
        """The part of the configuration that the core uses."""
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
            ends_at_script_errors=self.workers.ends_at_script_errors,
        )
