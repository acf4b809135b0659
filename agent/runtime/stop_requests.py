"""Requests to leave the job that reach an agent from outside it: signals, and the notice that its machine is preempted.

Clouds announce a preemption through a metadata service, each in its own way. The operator gives a command that asks it
(`--preemption_notice`); deploy/preemption has one for each of the large clouds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from agent.core.events import StopAsked
from agent.diagnose.commands import CommandRunner, last_line
from agent.observe.log import log

_REPEAT_S = 5.0
"""Time between two runs of the command. Clouds announce a preemption 30 s ahead or more."""
_HANDLED_AS: dict[int, int] = {signal.SIGQUIT: signal.SIGTERM}
"""Container engines and users of torchrun also send SIGQUIT to ask a job to leave."""


class StopRequests:
    """Passes requests to leave on, as `StopAsked`.

    A second SIGTERM hurries an agent that is leaving, so that steps may be lost. But a cloud shuts a machine down soon
    after its notice, or at the same time. So a notice and one SIGTERM are a single request, in either order.
    """

    def __init__(self, post: Callable[[StopAsked], None]) -> None:
        self._post = post
        self._has_asked = False
        self._is_by_notice = False
        """The request was a notice, and no signal has come since."""
        self._lock = threading.RLock()  # reentrant: one signal handler may interrupt another

    def on_signal(self, number: int) -> None:
        """Pass a signal on. Called by signal handlers."""
        number = _HANDLED_AS.get(number, number)
        with self._lock:
            is_same_request = self._is_by_notice and number == signal.SIGTERM
            self._has_asked, self._is_by_notice = True, False
            if not is_same_request:
                self._post(StopAsked(number))

    def on_notice(self) -> None:
        """Ask the agent to leave as after SIGTERM, unless a signal has done so."""
        with self._lock:
            if not self._has_asked:
                self._has_asked = self._is_by_notice = True
                self._post(StopAsked(signal.SIGTERM))


@contextmanager
def noticing_preemption(
    command: tuple[str, ...], environ: Mapping[str, str], on_notice: Callable[[], None]
) -> Iterator[None]:
    """Run the operator's command again and again, on a thread of its own, until it exits with code 0.

    Args:
        command: empty: nothing is run.
        environ: the environment that the agent was given; the command gets it without the agent's secrets.
        on_notice: called once, on that thread.
    """
    if not command:
        yield
        return
    commands, has_ended = CommandRunner(environ), threading.Event()

    def watch() -> None:
        reported = None
        while True:
            trouble, output = commands.run(command)
            if commands.is_closing:
                return
            if not trouble:
                log.warning("this machine is to be preempted: the node leaves", notice=last_line(output))
                on_notice()
                return
            if trouble != reported:
                log.info("no preemption notice so far", reason=trouble, asked_every_s=_REPEAT_S)
                reported = trouble
            if has_ended.wait(_REPEAT_S):
                return

    thread = threading.Thread(target=watch, name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        commands.end()
        has_ended.set()
        thread.join()
        commands.close()
