"""One rank: its guardian process, the wire to it, and the worker's control page and channel.

Nothing here waits: the guardian is spawned, gets its order in shared memory, and tells what happens in packets.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.workers.channel import Channel, leave_answer
from agent.workers.stacks import StacksFile
from trainer_runtime import contract
from trainer_runtime.snapshot_page import create_memory

if TYPE_CHECKING:
    from agent.workers.launch import RankCommand

GUARDIAN_MARK = "ELASTIC_AGENT_GUARDIAN"
"""In the environment of a worker, and so of its descendants: whose they are, once the guardian is gone."""

CANNOT_START = 127
"""Exit code of a rank that could not be started, as a shell gives it."""

_GUARDIAN = Path(__file__).with_name("guardian.py")
_OOM_SCORE_ABOVE_AGENT = 300
_OOM_SCORE_MAX = 1000
_PACKET_BYTES = 1 << 17


class Exited(msgspec.Struct, frozen=True):
    """How the worker's main process ended."""

    exit_code: int | None
    signal: int | None
    tail: str
    at: float
    """Wall clock, seconds since 1970."""
    error: str = ""
    traceback: str = ""
    why: str = ""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packet from the guardian: one of these."""

    started: int = 0
    exited: Exited | None = None
    warning: str = ""
    gone: bool = False


_decoder = msgspec.json.Decoder(Message)


class RankProcess:
    """A rank from the spawn of its guardian until nothing of it is left."""

    def __init__(self, command: RankCommand) -> None:
        """Spawn the guardian. OSError: that cannot be done."""
        self.command = command
        self.mark = secrets.token_hex(8)
        self.worker_pid = 0
        """0 until the guardian has told it."""
        self.exited: Exited | None = None
        """None: it has not, or nobody has told yet."""
        self.memory: int | None = None
        """Where it puts its snapshots; None: it takes none."""
        self._is_terminated = False
        with ExitStack() as theirs, ExitStack() as ours:
            self.page, control_fd = contract.ControlPage.create(f"rank-{command.rank}")
            theirs.callback(os.close, control_fd)
            self.channel = Channel()
            theirs.callback(self.channel.theirs.close)
            ours.callback(self.channel.close)
            order_fd = os.memfd_create("elastic-agent:order", os.MFD_CLOEXEC)
            theirs.callback(os.close, order_fd)
            self.stacks = StacksFile(f"rank-{command.rank}")
            ours.callback(self.stacks.close)
            self._sock, their_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.callback(their_sock.close)
            ours.callback(self._sock.close)
            self._sock.setblocking(False)
            handed_down = {
                contract.CONTROL_FD: control_fd,
                contract.CHANNEL_FD: self.channel.theirs.fileno(),
                contract.STACKS_FD: self.stacks.fileno(),
            }
            if command.takes_snapshots:
                self.memory = handed_down[contract.SNAPSHOT_FD] = create_memory(f"rank-{command.rank}")
                ours.callback(os.close, self.memory)
            _write_order(order_fd, command, self.mark, handed_down)
            self._popen = _spawn(their_sock.fileno(), order_fd, *handed_down.values())
            self.pidfd = os.pidfd_open(self._popen.pid)
            ours.pop_all()

    @property
    def guardian_pid(self) -> int:
        """Process id of the guardian."""
        return self._popen.pid

    def fileno(self) -> int:
        """Readable when the guardian has something to tell, or has ended."""
        return self._sock.fileno()

    def start(self) -> None:
        """Let the guardian start the worker."""
        self._send(b"S")

    def ask_to_end(self) -> bool:
        """Ask the worker to end; True: it has not been told yet, or may not have heard, so ask again soon.

        One that stands still for a handoff is told over its channel, once it asks: it ends in its own way. It may
        also find, at the same moment, that it has waited long enough, and train on. Any other gets SIGTERM, once.
        """
        if self._is_terminated:
            return False
        if not self.page.stopped or self.page.stopped != self.page.handoff:
            self._is_terminated = True
            self._send(b"T")
            return False
        if self.channel.asks_leave:
            self.channel.asks_leave = False
            self.channel.send(leave_answer())
        return True

    def kill(self) -> None:
        """SIGKILL to the worker and all its descendants."""
        self._send(b"K")

    def receive(self) -> tuple[list[Message], bool]:
        """All packets that are there, and whether they were the last."""
        messages: list[Message] = []
        try:
            while packet := self._sock.recv(_PACKET_BYTES):
                message = _decoder.decode(packet)
                self.worker_pid = message.started or self.worker_pid
                self.exited = message.exited or self.exited
                messages.append(message)
        except BlockingIOError:
            return messages, False
        except ConnectionResetError:  # it ended before it had read all orders
            return messages, True
        return messages, True

    def wait(self) -> None:
        """Wait for the guardian's end; it comes last of all that it guards."""
        self._popen.wait()

    def close(self) -> None:
        """Reap the ended guardian and let go of its wire and the channel. The control page stays readable."""
        self._popen.wait()
        self.channel.close()
        self.stacks.close()
        self._sock.close()
        os.close(self.pidfd)
        if self.memory is not None:
            os.close(self.memory)

    def _send(self, order: bytes) -> None:
        with suppress(OSError):  # the guardian has ended: its pidfd says so
            self._sock.send(order)


def _spawn(*fds: int) -> subprocess.Popen[bytes]:
    sock, order, *_ = fds
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARDIAN), str(sock), str(order)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,  # a terminal's Ctrl-C is for the agent alone
    )


def _write_order(fd: int, command: RankCommand, mark: str, handed_down: dict[str, int]) -> None:
    env = {**command.env, **{name: str(given) for name, given in handed_down.items()}, GUARDIAN_MARK: mark}
    order = {
        "argv": [_latin(argument) for argument in command.argv],
        "env": {_latin(name): _latin(value) for name, value in env.items()},
        "cwd": _latin(command.cwd),
        "log_path": _latin(command.log_path),
        "console_prefix": None if command.console_prefix is None else _latin(command.console_prefix),
        "inherited_fds": [*handed_down.values()],
        "page_fd": handed_down[contract.CONTROL_FD],
        "output_at": contract.OUTPUT_AT,
        "oom_score_adj": _worker_oom_score(),
    }
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(json.dumps(order).encode())
    os.lseek(fd, 0, os.SEEK_SET)


def _worker_oom_score() -> int:
    """Above the agent's, so that the kernel takes the rank and the agent lives to name it."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    return min(_OOM_SCORE_MAX, own + _OOM_SCORE_ABOVE_AGENT)


def _latin(text: str | Path) -> str:
    """The exact bytes that the system takes, in a form that JSON can carry."""
    return os.fsencode(text).decode("latin-1")
