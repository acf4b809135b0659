"""The runtime of an agent, whatever the kind of its job: from the start until the job, or its part in it, has ended.

Each kind of job has a subclass, which names the core that decides and carries out its effects: `CollectiveRuntime` and
`ParameterServerRuntime`.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic

from agent.config import AgentConfig
from agent.core.effects import Exit
from agent.core.reasons import LeaveReason
from agent.observe import banner
from agent.observe.log import log
from agent.observe.messages import describe_exit
from agent.observe.notices import EtcdOutageNotice
from agent.observe.stderr import standard_error
from agent.runtime.loop import Core, Effect, Event, Heartbeat, Inbox, State, end_with_any_thread, run_loop
from agent.runtime.store_client import StoreClient

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""They ask an agent to leave, or to stop. The code that starts a runtime lets them put events into its inbox."""


class JobRuntime(ABC, Generic[State, Event, Effect]):
    """The parts of an agent that do not depend on the kind of its job.

    Args:
        config: of the agent.
        inbox: may hold events already.
    """

    _client: StoreClient

    def __init__(self, config: AgentConfig, inbox: Inbox[Event]) -> None:
        self._config = config
        self._inbox = inbox
        end_with_any_thread(inbox)
        self._heartbeat = Heartbeat(config.timing.lease_ttl_s)
        self._outages = EtcdOutageNotice(lambda: self._client.outage, lambda what, why: log.warning(f"{what} ({why})"))
        self._has_started = False
        self.end: LeaveReason | str = ""
        """Why the agent has ended."""

    def run(self) -> int:
        """Run the agent until its end, and return its exit code."""
        try:
            state = self._begin()
            ended = run_loop(self._core(), state, self._inbox, self._heartbeat, self._act, self._look)
        finally:
            self._close()
            for number in SIGNALS:  # a late signal must not change the exit code
                signal.signal(number, signal.SIG_IGN)
        self._report_end(ended)
        return ended.code

    @abstractmethod
    def _core(self) -> Core[State, Event, Effect]:
        """Return the core that decides."""

    @abstractmethod
    def _begin(self) -> State:
        """Start what the loop needs, and return its first state."""

    @abstractmethod
    def _act(self, effect: Effect) -> None:
        """Carry out an effect; must not block."""

    @abstractmethod
    def _look(self, state: State, now: float) -> None:
        """Look at the state after a step of the core, before its effects are carried out: log what is new in it."""

    @abstractmethod
    def _close(self) -> None:
        """End the workers and all threads. May be called before `_begin` came to its end."""

    def _report_end(self, ended: Exit) -> None:
        self.end = ended.reason
        if ended.code == 0:
            log.info(describe_exit(ended))
        else:
            log.error(describe_exit(ended), exit_code=ended.code)

    def _report_first_start(self, environments: Sequence[Mapping[str, str]], log_directory: Path) -> None:
        """When workers are started for the first time: show what they are given, and where their output is kept."""
        if self._has_started:
            return
        self._has_started = True
        if self._config.shown_options:
            standard_error().write(banner.first_process(environments))
        log.info(f"the output of all ranks is kept in {log_directory}")
