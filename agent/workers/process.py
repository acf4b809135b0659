"""One rank: its guardian process, the socket to the guardian, and the worker's control page and channel.

A process may be started as a *standby*, before its rank is known; see `standbys.py`.

Nothing here blocks. The guardian is spawned, reads its start order from shared memory, and reports events in packets.
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
from agent.workers.channel import Channel, leave_answer, move_answer
from agent.workers.environment import GROUP_VARIABLES
from agent.workers.process_resources import lower_priority
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
"""Environment variable of a worker, inherited by its descendants. It identifies them when their guardian is gone."""

_GUARDIAN = Path(__file__).with_name("guardian.py")
_OOM_SCORE_ABOVE_AGENT = 300
OOM_SCORE_MAX = 1000
"""Of a standby: the kernel ends it first if memory runs out."""
_PACKET_BYTES = 1 << 17
_MAX_OPEN_FILES = 1 << 16
"""Upper bound: containers may allow a thousand million, and some programs loop over all descriptors up to the limit."""


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
    script_error: str = ""


class Warm(msgspec.Struct, frozen=True):
    """Report of a standby that has finished its imports."""

    rss_bytes: int
    took_s: float
    left_out: dict[str, str]
    """Modules that could not be imported, and why."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packet from the guardian. Exactly one field is set."""

    warm: Warm | None = None
    tainted: tuple[str, ...] | None = None
    """Modules that read, while they are imported, values that a standby cannot know yet. The standby has ended
    because of them."""
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
    """`modules` are imported before it waits. The other fields configure what the import hook watches for."""


class RankProcess:
    """A rank, from the spawn of its guardian until none of its processes is left. It may have been a standby before."""

    def __init__(self, command: RankCommand | Standby) -> None:  # noqa: PLR0915 - it hands much down
        """Spawn the guardian.

        Raises:
            OSError: it cannot be spawned.
        """
        self.rank = -1 if isinstance(command, Standby) else command.rank
        """Its rank in the world; -1: none yet."""
        self.mark = secrets.token_hex(8)
        self.worker_pid = 0
        """0 until the guardian has reported it."""
        self.exited: Exited | None = None
        """How the worker ended. None: it has not, or the guardian has not reported it yet."""
        self.memory: int | None = None
        """Descriptor of the memory for its snapshots. None: it takes no snapshots."""
        self.replicated_event: int | None = None
        """Eventfd that signals a change of `replicated` or `over` on its page. None: it takes no snapshots."""
        self.is_ahead = False
        """It is a standby that sets up the script, or has done so. Its rank is not known yet."""
        self._is_terminated = False
        static_command = command.command if isinstance(command, Standby) else command
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
            self._hook = StandbyHook(waits_at) if takes_hook(static_command.argv) else None
            if self._hook is None and isinstance(command, Standby):
                raise FileNotFoundError(errno.ENOENT, "nothing would hold it before its script")
            if self._hook:
                theirs.callback(self._hook.close_inherited)
                ours.callback(self._hook.close)
            self._sock, their_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.callback(their_sock.close)
            ours.callback(self._sock.close)
            self._sock.setblocking(False)
            self.over_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            """Signals a change of `over` or `question` on its page."""
            ours.callback(os.close, self.over_event)
            self._handed_down = {
                contract.CONTROL_FD: control_fd,
                contract.OVER_FD: self.over_event,
                contract.CHANNEL_FD: self.channel.theirs.fileno(),
                contract.STACKS_FD: self.stacks.fileno(),
            }
            if contract.SNAPSHOT_OVERHEAD in static_command.env:
                self._create_memory(name, ours)
            self._write_order(self._first_order(command, self._hook))
            hook_fds = (*self._hook.fds.values(), *filter(None, [self._hook.guardian_fd])) if self._hook else ()
            shared = shared_terminal()
            terminal_fds = (shared.memory_fd,) if shared else ()
            handed = (*self._handed_down.values(), *hook_fds, *terminal_fds)
            self._popen = _spawn(
                their_sock.fileno(),
                self._order_fd,
                *handed,
                reads_stdin=static_command.stdin is None and _may_read_stdin(),
            )
            restore_open_files_limit(self._popen.pid)
            self.pidfd = os.pidfd_open(self._popen.pid)
            ours.pop_all()

    def _create_memory(self, name: str, ours: ExitStack) -> None:
        self.memory = self._handed_down[contract.SNAPSHOT_FD] = create_memory(name)
        self._memory_name = name
        ours.callback(os.close, self.memory)
        self.replicated_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handed_down[contract.REPLICATED_FD] = self.replicated_event
        ours.callback(os.close, self.replicated_event)

    @property
    def guardian_pid(self) -> int:
        """Process id of the guardian."""
        return self._popen.pid

    def fileno(self) -> int:
        """Return the guardian's socket. It is readable when there is a packet, and when the guardian has ended."""
        return self._sock.fileno()

    def start(self) -> None:
        """Tell the guardian to start the worker."""
        self._send(b"S")

    def adopt(self, command: RankCommand) -> None:
        """Turn the warm standby into this rank. The process may not be closed concurrently."""
        self.rank = command.rank
        self._write_order({**self._order(command, None), **_rank_order(command)})
        self._send(b"A")

    def set_up_ahead(self, command: RankCommand) -> None:
        """Let the warm standby set up the script, as a process that waits for a group. It stays a standby."""
        self.is_ahead = True
        self._write_order({**self._order(command, None), **_rank_order(command), "oom_score_adj": OOM_SCORE_MAX})
        lower_priority(self.worker_pid)
        self._send(b"A")

    @property
    def is_quiesced(self) -> bool:
        """Whether the worker has stopped for the requested handoff. It may decide at any moment to continue."""
        return bool(self.page.quiesced) and self.page.quiesced == self.page.handoff

    def break_group(self, group: int) -> None:
        """Let the worker, whose group is over, break its connections to the other ranks, and ask for its place."""
        self.page.over = group
        os.eventfd_write(self.over_event, 1)
        if self.replicated_event is not None:  # it may wait for this one
            os.eventfd_write(self.replicated_event, 1)

    def ask_unfinished(self) -> int:
        """Ask the worker how many collectives it has begun that are unfinished. Returns the number of the question."""
        number = self.page.question = self.page.question + 1
        os.eventfd_write(self.over_event, 1)
        return number

    def renew_memory(self) -> None:
        """Create another memory for the worker's snapshots: the old one holds those of the group that it leaves."""
        if self.memory is not None:
            os.close(self.memory)
            self.memory = create_memory(self._memory_name)

    def move(self, command: RankCommand) -> None:
        """Send the worker, which is quiesced and waits for an answer, into another group."""
        self.rank = command.rank
        self.is_ahead = False
        self.page.begin_group()
        self.channel.begin_group()
        self._write_order({**self._order(command, None), **_rank_order(command)})
        self._send(b"M")
        answer = move_answer({name: command.env.get(name) for name in GROUP_VARIABLES})
        self.channel.send(answer, [] if self.memory is None else [self.memory])

    def imports(self) -> Imports:
        """Return the modules that the worker has imported since it became a rank, as far as known."""
        return self._hook.imports() if self._hook else Imports()

    def ask_to_end(self) -> bool:
        """Ask the worker to end. Return whether it must be asked again soon.

        A worker that is quiesced for a handoff gets the answer over its channel, when it asks whether its group is
        over; it then exits by itself. It may decide at the same moment that it has waited long enough, and continue
        training, so the question is repeated. Any other worker gets SIGTERM, once.
        """
        if self._is_terminated:
            return False
        if not self.is_quiesced:
            self._is_terminated = True
            self._send(b"T")
            return False
        if self.channel.awaits_leave_answer:
            self.channel.awaits_leave_answer = False
            self.channel.send(leave_answer())
        return True

    def kill(self) -> None:
        """Send SIGKILL to the worker and all its descendants."""
        self._send(b"K")

    def receive(self) -> tuple[list[Message], bool]:
        """Return all available packets, and whether they were the last."""
        messages: list[Message] = []
        try:
            while packet := self._sock.recv(_PACKET_BYTES):
                message = _decoder.decode(packet)
                self.worker_pid = message.started or self.worker_pid
                self.exited = message.exited or self.exited
                messages.append(message)
        except BlockingIOError:
            return messages, False
        except ConnectionResetError:  # the guardian ended before it had read all commands
            return messages, True
        return messages, True

    def wait(self) -> None:
        """Wait for the guardian's end. It ends after every process that it guards."""
        self._popen.wait()

    def close(self) -> None:
        """Reap the ended guardian and close its socket and the channel. The control page stays readable."""
        self._popen.wait()
        self.channel.close()
        self.stacks.close()
        if self._hook:
            self._hook.close()
        os.close(self._order_fd)
        self._sock.close()
        os.close(self.pidfd)
        for descriptor in (self.memory, self.replicated_event, self.over_event):
            if descriptor is not None:
                os.close(descriptor)

    def _first_order(self, command: RankCommand | Standby, hook: StandbyHook | None) -> dict[str, object]:
        if not isinstance(command, Standby):
            return {**self._order(command, hook), **_rank_order(command)}
        first = {**asdict(command.imports), "watched": sorted(GROUP_VARIABLES)}
        order = self._order(command.command, hook)
        return {
            **order,
            "standby": first,
            "log_path": os.devnull,
            "console_prefix": None,
            "holds_tracebacks": False,
            "oom_score_adj": OOM_SCORE_MAX,
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
        with suppress(OSError):  # the guardian has ended, and its pidfd reports that
            self._sock.send(order)


def cannot_start(error: OSError) -> str:
    """Explain why no process could be started for a rank, with the remedy where it is known."""
    if error.errno == errno.ENOENT and error.filename is not None:
        gone = os.fsdecode(error.filename)
        return f"cannot start {gone}, which no longer exists: restore the agent's Python environment"
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
    """Whether the standard input is not a terminal with another program in the foreground.

    A rank has its own session, so the kernel would not stop it with SIGTTIN: it would steal that program's input.
    """
    try:
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # not the agent's controlling terminal, so there is no foreground
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
    """Return a score above the agent's: the kernel kills the rank first, and the agent lives to report it."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    return min(OOM_SCORE_MAX, own + _OOM_SCORE_ABOVE_AGENT)


def _latin(text: str | Path) -> str:
    """Return the exact bytes of a path or argument, in a form that JSON can carry."""
    return os.fsencode(text).decode("latin-1")


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files: the agent needs some twenty for each local rank."""
    soft, hard = _started_with()
    if soft < (most := min(hard, _MAX_OPEN_FILES)):
        with suppress(OSError, ValueError):  # forbidden in a sandbox: keep the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_open_files_limit(pid: int) -> None:
    """Give a process, and its future children, the limit of open files that the agent was started with."""
    with suppress(OSError):  # it has ended, or a sandbox forbids it: then it keeps the higher limit
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _started_with())


@cache
def _started_with() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
