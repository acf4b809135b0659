"""Plays the guardian's side of a standby: starts one, and tells it to go."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_runtime import contract
from trainer_runtime.standby import Imports, read_imports, with_hook

_WAIT_S = 150.0
RANK = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What is told at "go"."""


@dataclass(frozen=True)
class Ended:
    """What came of a command."""

    code: int
    out: str
    err: str
    imports: Imports = field(default_factory=Imports, compare=False)


def run_plain(command: list[str], env: dict[str, str], cwd: Path) -> Ended:
    """Run it without anything of ours."""
    done = subprocess.run(
        command,
        env=env | RANK,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=_WAIT_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run_cold(command: list[str], env: dict[str, str], cwd: Path) -> Ended:
    """Run it as a cold start that is recorded."""
    imports = _memory()
    told = with_hook(env | RANK) | {contract.IMPORTS_FD: str(imports)}
    process = _start(command, told, cwd, (imports,))
    try:
        out, err = process.communicate(timeout=_WAIT_S)
        return Ended(process.returncode, out, err, read_imports(imports))
    finally:
        _kill(process)
        os.close(imports)


class Standby:
    """One that was started and may be told to go."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path, **standby: list[str]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_WAIT_S)
        self._order, self._imports = os.memfd_create("order"), _memory()
        self._fds: tuple[int, ...] = (self._order, self._imports)
        self._env = with_hook(env)
        self._write({"standby": {"modules": [], "watched": sorted(RANK), **standby}})
        told = self._env | {
            contract.STANDBY_FD: str(theirs.fileno()),
            contract.STANDBY_ORDER_FD: str(self._order),
            contract.IMPORTS_FD: str(self._imports),
        }
        self.process = _start(command, told, cwd, (theirs.fileno(), self._order, self._imports))
        theirs.close()

    def receive(self) -> dict[str, Any]:
        """Return what it says once; empty if it ended without a word."""
        said = self._sock.recv(1 << 16)
        received: dict[str, Any] = json.loads(said) if said else {}
        return received

    def receive_tainted(self) -> list[str]:
        """Return all the names that it may not import, which are the last that it says; it may say them in parts."""
        names: list[str] = []
        while received := self.receive():
            names += received["tainted"]
        return names

    def go(self, **changed: str) -> None:
        """Tell it to go, with the rank's own variables and these."""
        self._write({"env": self._env | RANK | changed, "stdin": None})
        self._sock.send(b"go")

    def spoil(self) -> None:
        """Tell it to go with an order that is none."""
        os.ftruncate(self._order, 0)
        self._sock.send(b"go")

    def leave(self) -> None:
        """Be gone, as an agent that dies."""
        self._sock.close()

    def end(self) -> Ended:
        """Wait for its end."""
        try:
            out, err = self.process.communicate(timeout=_WAIT_S)
            return Ended(self.process.returncode, out, err, read_imports(self._imports))
        finally:
            self.close()

    def close(self) -> None:
        """Leave nothing of it; once more is harmless."""
        self._sock.close()
        _kill(self.process)
        for fd in self._fds:
            os.close(fd)
        self._fds = ()

    def _write(self, order: dict[str, object]) -> None:
        os.ftruncate(self._order, 0)
        os.pwrite(self._order, json.dumps(order).encode(), 0)


def run_warm(command: list[str], env: dict[str, str], cwd: Path, **standby: list[str]) -> Ended:
    """Run it as a standby that is told to go."""
    waiting = Standby(command, env, cwd, **standby)
    try:
        received = waiting.receive()
        assert "warm" in received, (received, waiting.end())
        waiting.go()
        return waiting.end()
    finally:
        waiting.close()


def _memory() -> int:
    fd = os.memfd_create("imports")
    os.ftruncate(fd, contract.IMPORTS_BYTES)
    return fd


def _start(command: list[str], env: dict[str, str], cwd: Path, fds: tuple[int, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
