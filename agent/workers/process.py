"""One rank: its guardian process, the wire to it, and the worker's control page and channel.

A process may be started as a *standby*, before it is known which rank it will be: see `standbys.py`.

Nothing here waits: the guardian is spawned, gets its order in shared memory, and tells what happens in packets.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.diagnose.stacks import StacksFile
from agent.workers.channel import Channel, leave_answer
from agent.workers.environment import TOLD
from agent.workers.standby_hook import StandbyHook, takes_hook
from agent.workers.terminal import shared_terminal
from agent.workers.worker_start import CANNOT_START
from trainer_runtime import contract
from trainer_runtime.snapshot_page import create_memory
from trainer_runtime.standby import Imports

if TYPE_CHECKING:
    from agent.workers.launch_plan import RankCommand, StandbyCommand

__all__ = ["CANNOT_START", "GUARDIAN_MARK", "Exited", "Message", "RankProcess", "Standby", "Warm"]

GUARDIAN_MARK = "ELASTIC_AGENT_GUARDIAN"
"""In the environment of a worker, and so of its descendants: whose they are, once the guardian is gone."""

_GUARDIAN = Path(__file__).with_name("guardian.py")
_OOM_SCORE_ABOVE_AGENT = 300
_OOM_SCORE_MAX = 1000
_PACKET_BYTES = 1 << 17
_MAX_OPEN_FILES = 1 << 16
"""In containers a thousand million may be allowed, and there are programs that go through all numbers up to there."""


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
    mistake: str = ""


class Warm(msgspec.Struct, frozen=True):
    """What a standby tells once it has imported all that it should."""

    rss_bytes: int
    took_s: float
    left_out: dict[str, str]
    """Modules that could not be imported, and why."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packet from the guardian: one of these."""

    warm: Warm | None = None
    tainted: tuple[str, ...] | None = None
    """A standby has ended since these modules look, while they are imported, at what it could not know."""
    started: int = 0
    exited: Exited | None = None
    warning: str = ""
    gone: bool = False


_decoder = msgspec.json.Decoder(Message)


@dataclass(frozen=True)
class Standby:
    """A process that waits to become a rank."""

    command: StandbyCommand
    imports: Imports
    """`modules`: what it imports before it waits; the rest says what it must look out for."""


class RankProcess:
    """A rank from the spawn of its guardian until nothing of it is left; before it has a rank, maybe a standby."""

    def __init__(self, command: RankCommand | Standby) -> None:
        """Spawn the guardian. OSError: that cannot be done."""
        self.rank = -1 if isinstance(command, Standby) else command.rank
        """Its rank in the world; -1: none yet."""
        self.mark = secrets.token_hex(8)
        self.worker_pid = 0
        """0 until the guardian has told it."""
        self.exited: Exited | None = None
        """None: it has not, or nobody has told yet."""
        self.memory: int | None = None
        """Where it puts its snapshots; None: it takes none."""
        self._is_terminated = False
        standing = command.command if isinstance(command, Standby) else command
        name = f"guarded-{self.mark}"
        with ExitStack() as theirs, ExitStack() as ours:
            self.page, control_fd = contract.ControlPage.create(name)
            theirs.callback(os.close, control_fd)
            self.channel = Channel()
            theirs.callback(self.channel.theirs.close)
            ours.callback(self.channel.close)
            self._order_fd = os.memfd_create("elastic-agent:order", os.MFD_CLOEXEC)
            ours.callback(os.close, self._order_fd)
            self.stacks = StacksFile(name)
            ours.callback(self.stacks.close)
            waits_at = self._order_fd if isinstance(command, Standby) else None
            self._hook = StandbyHook(waits_at) if takes_hook(standing.argv) else None
            if self._hook is None and isinstance(command, Standby):
                raise FileNotFoundError(errno.ENOENT, "nothing would hold it before its script")
            if self._hook:
                theirs.callback(self._hook.let_go)
                ours.callback(self._hook.close)
            self._sock, their_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.callback(their_sock.close)
            ours.callback(self._sock.close)
            self._sock.setblocking(False)
            self._handed_down = {
                contract.CONTROL_FD: control_fd,
                contract.CHANNEL_FD: self.channel.theirs.fileno(),
                contract.STACKS_FD: self.stacks.fileno(),
            }
            if contract.SNAPSHOT_OVERHEAD in standing.env:
                self.memory = self._handed_down[contract.SNAPSHOT_FD] = create_memory(name)
                ours.callback(os.close, self.memory)
            self._write_order(self._first_order(command, self._hook))
            hook_fds = (*self._hook.fds.values(), *filter(None, [self._hook.guardian_fd])) if self._hook else ()
            shared = shared_terminal()
            terminal_fds = (shared.memory_fd,) if shared else ()
            handed = (*self._handed_down.values(), *hook_fds, *terminal_fds)
            self._popen = _spawn(
                their_sock.fileno(), self._order_fd, *handed, reads_stdin=standing.stdin is None and _may_read_stdin()
            )
            restore_open_files_limit(self._popen.pid)
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

    def adopt(self, command: RankCommand) -> None:
        """Let the standby, which is warm, be this rank. It may not be closed meanwhile."""
        self.rank = command.rank
        self._write_order({**self._order(command, None), **_rank_order(command)})
        self._send(b"A")

    def imports(self) -> Imports:
        """What the worker has imported since it is a rank, as far as it is known."""
        return self._hook.imports() if self._hook else Imports()

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
        if self._hook:
            self._hook.close()
        os.close(self._order_fd)
        self._sock.close()
        os.close(self.pidfd)
        if self.memory is not None:
            os.close(self.memory)

    def _first_order(self, command: RankCommand | Standby, hook: StandbyHook | None) -> dict[str, object]:
        if not isinstance(command, Standby):
            return {**self._order(command, hook), **_rank_order(command)}
        first = {**asdict(command.imports), "watched": sorted(TOLD)}
        order = self._order(command.command, hook)
        return {
            **order,
            "standby": first,
            "log_path": os.devnull,
            "console_prefix": None,
            "holds_tracebacks": False,
            "oom_score_adj": _OOM_SCORE_MAX,
        }

    def _order(self, command: RankCommand | StandbyCommand, hook: StandbyHook | None) -> dict[str, object]:
        names = {name: str(given) for name, given in self._handed_down.items()}
        env = {**command.env, **names, GUARDIAN_MARK: self.mark}
        env = hook.environment(env) if hook else env
        return {
            "argv": [_latin(argument) for argument in command.argv],
            "env": {_latin(name): _latin(value) for name, value in env.items()},
            "cwd": _latin(command.cwd),
            "cpus": command.cpus,
            "stdin": None if command.stdin is None else _latin(command.stdin),
            "inherited_fds": [*self._handed_down.values(), *(hook.fds.values() if hook else ())],
            "terminal_fd": shared.memory_fd if (shared := shared_terminal()) else None,
            "page_fd": self._handed_down[contract.CONTROL_FD],
            "output_at": contract.OUTPUT_AT,
            "hook_fd": hook.guardian_fd if hook else None,
        }

    def _write_order(self, order: dict[str, object]) -> None:
        data = json.dumps(order).encode()
        os.pwrite(self._order_fd, data, 0)
        os.ftruncate(self._order_fd, len(data))

    def _send(self, order: bytes) -> None:
        with suppress(OSError):  # the guardian has ended: its pidfd says so
            self._sock.send(order)


def cannot_start(error: OSError) -> str:
    """Why there is no process for a rank, with what to do where that is known."""
    if error.errno == errno.ENOENT and error.filename is not None:
        gone = os.fsdecode(error.filename)
        return f"cannot start {gone}, which is not there any more: put the agent's Python environment back"
    limits = {errno.EMFILE: "open files (ulimit -n)", errno.EAGAIN: "processes (ulimit -u)"}
    limit = limits.get(error.errno or 0)
    do = f": the agent's limit of {limit} is too low" if limit else ""
    return f"cannot start a process: {error.strerror or error}{do}"


def _spawn(*fds: int, reads_stdin: bool) -> subprocess.Popen[bytes]:
    sock, order, *_ = fds
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARDIAN), str(sock), str(order)],
        stdin=None if reads_stdin else subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,  # a terminal's Ctrl-C is for the agent alone
    )


def _may_read_stdin() -> bool:
    """Not on a terminal whose foreground is another program's.

    A rank has a session of its own, so the system would not stop it there with SIGTTIN: it would take that program's
    input.
    """
    try:
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # it does not control the agent: it has no foreground
        return True


def _rank_order(command: RankCommand) -> dict[str, object]:
    prefix = command.console_prefix
    return {
        "log_path": _latin(command.log_path),
        "console_prefix": None if prefix is None else _latin(prefix),
        "console_streams": command.console_streams,
        "holds_tracebacks": command.has_peers,
        "oom_score_adj": _worker_oom_score(),
    }


def _worker_oom_score() -> int:
    """Above the agent's, so that the kernel takes the rank and the agent lives to name it."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    return min(_OOM_SCORE_MAX, own + _OOM_SCORE_ABOVE_AGENT)


def _latin(text: str | Path) -> str:
    """The exact bytes that the system takes, in a form that JSON can carry."""
    return os.fsencode(text).decode("latin-1")


def raise_open_files_limit() -> None:
    """Let this process have more files open, if the system lets it."""
    soft, hard = _started_with()
    if soft < (most := min(hard, _MAX_OPEN_FILES)):
        with suppress(OSError, ValueError):  # a sandbox does not allow it: then it has what it had
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_open_files_limit(pid: int) -> None:
    """Give a process, and what it will start, the limit that this one was started with."""
    with suppress(OSError):  # it has ended, or a sandbox does not allow it: then it has more than it needs
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _started_with())


@cache
def _started_with() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
