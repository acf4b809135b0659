"""A real Slurm on several machines, which are network namespaces."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from machines import Network
from waiting import wait_for

PATIENCE_S = 60.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({first})
AuthInfo=socket={directory}/munge.socket,cred_expire=20
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname={host} NodeAddr={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL OverSubscribe=EXCLUSIVE PriorityTier=2
"""


class Slurm:
    """Jobs of the partition `high` preempt those of `low`, which have a minute to end. Use it in a `with` block.

    Args:
        directory: for its files.
        machines: the nodes, which are named by their addresses.
    """

    def __init__(self, directory: Path, machines: Network) -> None:
        self.directory = directory
        self.machines = machines
        self.environ = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf"), "ELASTIC_AGENT_STANDBY": "off"}
        self.environ["PATH"] += ":/usr/sbin"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        here, addresses = self.directory, self.machines.addresses
        (here / "state").mkdir(parents=True)
        (here / "slurm.conf").write_text(
            CONFIGURATION.format(
                directory=here,
                host=socket.gethostname(),
                first=addresses[0],
                nodes=",".join(addresses),
                cpus=len(os.sched_getaffinity(0)),
            )
        )
        (here / "munge.key").write_bytes(os.urandom(64))
        (here / "munge.key").chmod(0o600)
        files = [f"--{each}-file={here}/munge.{each}" for each in ("key", "log", "pid", "seed")]
        try:
            self._start(0, "munged", "--foreground", "--force", f"--socket={here}/munge.socket", *files)
            wait_for((here / "munge.socket").exists, "munged", PATIENCE_S)
            self._start(0, "slurmctld", "-D", "-c")
            for number, address in enumerate(addresses):
                self._start(number, "slurmd", "-D", "-N", address)
            wait_for(lambda: self._idle() == len(addresses), "idle nodes", PATIENCE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self.machines.addresses)):
            self.machines.kill_all(number)
        for daemon in self._daemons:
            daemon.wait()

    def ask(self, *argv: str) -> str:
        """Return what a command prints, run on the first machine."""
        done = subprocess.run(
            self.machines.on(0, argv), cwd=self.directory, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *options: str) -> str:
        """Submit a job of all nodes; return its id."""
        return self.ask("sbatch", "--parsable", f"--nodes={len(self.machines.addresses)}", *options)

    def shown(self, job: str) -> dict[str, str]:
        """What `scontrol` shows of a job."""
        words = (word.partition("=") for word in self.ask("scontrol", "show", "job", job).split())
        return {name: value for name, _, value in words}

    def _idle(self) -> int:
        done = subprocess.run(
            self.machines.on(0, ["sinfo", "--noheader", "--Node", "--partition=low", "--states=idle", "--format=%N"]),
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return len(done.stdout.split())

    def _start(self, machine: int, *argv: str) -> None:
        log = self.directory / f"{argv[0]}.{machine}.out"
        with log.open("wb") as sink:
            daemon = subprocess.Popen(
                self.machines.on(machine, argv),
                cwd=self.directory,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self._daemons.append(daemon)


def missing(programs: Sequence[str] = PROGRAMS) -> list[str]:
    """Return the programs of Slurm that this machine does not have."""
    paths = [*os.environ["PATH"].split(os.pathsep), "/usr/sbin"]
    return [each for each in programs if not any((Path(path) / each).exists() for path in paths)]
