"""This rank's part in a handoff: all ranks stop after the same step, save it, and wait for the next group.

The agent writes the handoff's number to the rank's control page. The ranks see it at different times, possibly some
steps apart. They agree on the step to stop after over the rank store, where the first proposal wins:

- The first rank that sees the request, at its step k, proposes k + lead. Ranks that see it later read that proposal.
- A rank that has already passed the step says so. All ranks then try again, with twice the lead
  (at most eight times the first).
- A rank that arrives at the step waits for the others. The last rank to arrive decides "stop"; a rank whose wait times
  out decides "missed". The first decision wins, so it never happens that one rank stops and another continues.
- If all have arrived by the next try, only too late (one is far from the store), the wait is doubled for that one (at
  most to eight times the first).

No collective is used, so a rank that does not take part in this simply takes its steps. At the common step each rank
takes a snapshot, if snapshots are enough for this handoff; a rank that cannot take one says so. If not all snapshots
are complete, or snapshots are not enough, rank 0 saves a checkpoint and says whether that succeeded. Then each rank
asks its agent whether to leave, waits for a moment, and continues training if the agent does not answer. Nothing here
waits for etcd or for the leading agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_runtime.agent_channel import AgentChannel, Leave, Move
    from trainer_runtime.contract import ControlPage
    from trainer_runtime.rank_messages import RankMessages

_LEAD = 2
"""Steps between the proposal and the stop. Another rank's page may be written later than ours by as many steps."""

_DOUBLINGS = 3

_STOP, _MISSED = "stop", "missed"
_SAVED, _FAILED = "saved", "failed"


class HandoffParticipant:
    """Handles the handoffs that the agent requests of this rank."""

    def __init__(
        self,
        messages: RankMessages,
        page: ControlPage,
        channel: AgentChannel,
        *,
        rank: int,
        world_size: int,
        wait_s: float,
    ) -> None:
        self._messages = messages
        self._page = page
        self._channel = channel
        self._rank = rank
        self._world_size = world_size
        self._wait_s = wait_s
        self._number = 0
        self._attempt = 0
        self._stop_at: int | None = None
        self._patience_s = wait_s
        """How long to wait for the other ranks in this try."""
        self._missed = ""
        """Where this rank waited last in vain."""

    def should_stop_after(self, step: int, prepare: Callable[[], None] = lambda: None) -> bool:
        """Return whether all ranks stop after this step. Called when it was committed and a handoff is requested.

        Args:
            step: the step.
            prepare: called if this is the common step, before this rank tells the others that it has arrived.

        Raises:
            torch.distributed.DistError: rank 0 is gone.
        """
        if self._page.handoff != self._number:
            self._number, self._attempt, self._stop_at = self._page.handoff, 0, None
            self._patience_s, self._missed = self._wait_s, ""
        if self._stop_at is None:
            self._propose(step)
        while self._stop_at is not None and self._stop_at < step:
            self._messages.propose(self._name("verdict"), _MISSED)
            self._try_again()
            self._propose(step)
        if self._stop_at != step:
            return False
        prepare()
        return self._all_arrive()

    def save_and_wait(
        self, step: int, take_snapshot: Callable[[int], bool], save: Callable[[int], bool]
    ) -> Leave | Move | None:
        """Save together with the other ranks, and wait; return what becomes of this rank; None: it trains on.

        Args:
            step: step at which all ranks are quiesced.
            take_snapshot: called with the step on every rank, if a snapshot is enough; returns whether it took one.
            save: called with the handoff's number on every rank, if not all ranks have a snapshot; returns whether
                this rank's part succeeded.
        """
        # Before the save: the next group may be written before all ranks know that the save succeeded. With this field
        # set, the agent waits for their question, instead of sending SIGTERM.
        self._page.quiesced = self._number
        is_saved = self._save_in_memory(step, take_snapshot) or self._save_on_disk(save)
        answer = self._channel.ask_leave(self._wait_s) if is_saved else None
        if answer is None:
            self._page.quiesced = 0
            if is_saved:  # the agent may have answered just before that
                answer = self._channel.late_answer()
        return answer

    def _save_in_memory(self, step: int, take_snapshot: Callable[[int], bool]) -> bool:
        """Take a snapshot; return whether all ranks have taken theirs. The first outcome in the store wins."""
        if not self._page.in_memory:
            return False
        name = self._name("snapshot outcome")
        if not take_snapshot(step):
            self._messages.propose(name, _FAILED)
        elif self._have_all_come("snapshots"):
            self._messages.propose(name, _SAVED)
        outcome = self._messages.wait_for_proposal(name, self._patience_s) or self._messages.propose(name, _FAILED)
        if outcome == _SAVED:
            self._channel.report_quiesced(self._number, step)
            self._wait_until_all_know()
        return outcome == _SAVED

    def _save_on_disk(self, save: Callable[[int], bool]) -> bool:
        has_worked = save(self._number)
        name = self._name("checkpoint outcome")
        if self._rank == 0:
            self._messages.propose(name, _SAVED if has_worked else _FAILED)
        outcome = self._messages.wait_for_proposal(name) or self._messages.propose(name, _FAILED)
        self._wait_until_all_know()
        return outcome == _SAVED

    def _wait_until_all_know(self) -> None:
        """Wait until all ranks have read the outcome; only rank 0 waits, whose exit ends the store."""
        if self._have_all_come("notified"):
            self._messages.propose(self._name("all notified"), _STOP)
        if self._rank == 0:
            self._messages.wait_for_proposal(self._name("all notified"), self._patience_s)

    def _have_all_come(self, where: str) -> bool:
        return self._messages.arrive(self._name(where), self._rank, self._world_size)

    def _propose(self, step: int) -> None:
        lead = 0 if self._world_size == 1 else _LEAD << min(self._attempt, _DOUBLINGS)
        self._stop_at = int(self._messages.propose(self._name("step"), str(step + lead)))

    def _all_arrive(self) -> bool:
        verdict = self._name("verdict")
        if self._missed:
            doubled_s = min(2 * self._patience_s, self._wait_s * (1 << _DOUBLINGS))
            came_late = self._messages.have_arrived(self._missed, self._world_size)
            self._patience_s = doubled_s if came_late else self._wait_s
        if self._have_all_come("arrived"):
            self._messages.propose(verdict, _STOP)
        waited = self._messages.wait_for_proposal(verdict, self._patience_s)
        decision = waited or self._messages.propose(verdict, _MISSED)
        if decision == _MISSED:
            self._missed = self._name("arrived")
            self._try_again()
        return decision == _STOP

    def _try_again(self) -> None:
        self._attempt += 1
        self._stop_at = None

    def _name(self, what: str) -> str:
        return f"handoff/{self._number}/{self._attempt}/{what}"
