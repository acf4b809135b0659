"""Several machines on this one: network namespaces, each with an address of its own, on one bridge."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

# Without root there is a user namespace around all of them, in which we are.
_UNSHARE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
_ENTER_USER = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
_KEEP = ["sh", "-c", "echo ready; exec sleep 100000"]


BIN = Path(sys.executable).parent
DRIVER = """#!/bin/sh
for gpu in 0 1 2 3; do echo "$gpu, GPU-$gpu, 00000000:0$gpu:00.0"; done
"""
OURS = ("PADDLE_", "ELASTIC_AGENT_", "PET_", "CUDA_", "POD_IP", "FLAGS_", "SLURM")


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Of a machine with four GPUs, as far as one can see."""
    (directory / "bin").mkdir(exist_ok=True)
    driver = directory / "bin" / "nvidia-smi"
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**plain, "PATH": f"{directory / 'bin'}:{BIN}:{plain['PATH']}", "ELASTIC_AGENT_STANDBY": "off", **more}


class Network:
    """Machines `0`, `1`, …, which reach each other and nothing else. Use it in a `with` block."""

    def __init__(self, *last: int) -> None:
        """`last`: of each machine's address, after 10.0.0."""
        self.addresses = [f"10.0.0.{number}" for number in last]
        self._bridge = _keeper([*_UNSHARE, *_KEEP])
        self._keepers = [_keeper([*self._inside(self._bridge), "unshare", "--net", *_KEEP]) for _ in self.addresses]
        self._started: list[subprocess.Popen[str]] = []
        self._run(self._bridge, "ip link add br0 type bridge; ip link set br0 up; ip link set lo up")
        for number, keeper in enumerate(self._keepers):
            self._run(
                self._bridge,
                f"ip link add v{number} type veth peer name eth0 netns {keeper.pid};"
                f"ip link set v{number} master br0 up",
            )
            self._run(
                keeper, f"ip addr add {self.addresses[number]}/24 dev eth0; ip link set eth0 up; ip link set lo up"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for keeper in (*self._keepers, self._bridge):
            keeper.kill()
            keeper.communicate()

    def start(self, machine: int, argv: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program on a machine."""
        process = subprocess.Popen(
            self.on(machine, argv),
            cwd=cwd,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def on(self, machine: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs this one on a machine."""
        return [*self._inside(self._keepers[machine]), *argv]

    def open_only(self, *ports: int, local: range) -> None:
        """Refuse connections from outside to other ports than these and the range that the kernel chooses from."""
        first, last = local[0], local[-1]
        dports = ",".join([*map(str, ports), f"{first}:{last}"])
        for keeper in self._keepers:
            self._run(
                keeper,
                f"echo {first} {last} >/proc/sys/net/ipv4/ip_local_port_range;"
                f"iptables -A INPUT -i eth0 -p tcp --syn -m multiport ! --dports {dports} -j DROP",
            )

    def lose(self, machine: int) -> None:
        """Take a machine away: it cannot be reached any more, and all that runs there is killed."""
        self._run(self._keepers[machine], "ip link set eth0 down")
        self.kill_all(machine)
        self._run(self._keepers[machine], "ip link set eth0 up")

    def kill_all(self, machine: int) -> None:
        """Kill all that runs on a machine."""
        inode = os.stat(f"/proc/{self._keepers[machine].pid}/ns/net").st_ino  # noqa: PTH116 - of the link's target
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:  # noqa: PTH208
            if pid != self._keepers[machine].pid and _network_of(pid) == inode:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _inside(self, keeper: subprocess.Popen[str]) -> list[str]:
        return ["nsenter", f"--target={keeper.pid}", *_ENTER_USER, "--net", "--"]

    def _run(self, keeper: subprocess.Popen[str], script: str) -> None:
        subprocess.run([*self._inside(keeper), "sh", "-ec", script], check=True, capture_output=True, text=True)


def _keeper(argv: list[str]) -> subprocess.Popen[str]:
    """A process that holds a namespace open. It has execed all the way when it speaks: its pid is the one inside."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino  # noqa: PTH116 - of the link's target
    except OSError:  # it has ended
        return None
