"""Snapshots: copies of the State in memory that the agent holds, so that a crash loses next to nothing.

The local rank 0 of every node writes what is equal on all ranks, and each rank writes its own part. The interval
follows from the measured time for which a snapshot delays the training, such that snapshots stay within their share of
the steps' time (`contract.SNAPSHOT_OVERHEAD`). If the share allows it, there is one after every second step. What
copying and sending take from the steps that run meanwhile is measured too (`_Interval`). The interval is also at least
twice as long as copying and sending take.

A rank keeps its newest two snapshots. If it replaced the older one while other ranks still copy the newer one, or parts
of that are still on their way to other nodes, and a rank or a node was lost then, no snapshot would be complete. So
each rank waits at the end of the step before a snapshot until its last one is complete, and its part was sent
(`replication`). A rank that takes the next snapshot has completed a step with the others, and therefore knows that they
have waited too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer_runtime import contract
from trainer_runtime.checkpoint import limit_behind, warn
from trainer_runtime.dist import is_main
from trainer_runtime.free_memory import free_memory
from trainer_runtime.phases import phase_time_s, runtime_phase
from trainer_runtime.snapshot_memory import snapshot_descriptor
from trainer_runtime.snapshot_page import KEPT
from trainer_runtime.snapshot_schedule import (
    Schedule,
    first_schedule,
    next_schedule,
    schedule_of,
    text_of,
)

if TYPE_CHECKING:
    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.capture.capturing import Capturer, FlatState
    from trainer_runtime.rank_messages import RankMessages
    from trainer_runtime.replication import Replication
    from trainer_runtime.snapshot_copy import Capture

NEVER = sys.maxsize
_COST = "A crash loses the steps since the last checkpoint"
_LEAST_STEP_S = 1e-6


@dataclass(slots=True)
class _Period:
    """Measurements since the last settlement."""

    step: int
    began: float
    phase_time_s: float
    costs_s: list[float] = field(default_factory=list)
    """Cost of each snapshot, or of the one before with what it cost beside the steps."""

    def step_s(self, step: int) -> float:
        """Return the seconds that a step has taken, without snapshots and phases."""
        trained_s = time.monotonic() - self.began - sum(self.costs_s) - (phase_time_s() - self.phase_time_s)
        return max(_LEAST_STEP_S, trained_s / max(1, step - self.step))

    def cost_s(self, number: int) -> float:
        """Return the seconds that a snapshot takes, for the settlement of this number, from 1.

        It is the median, because a busy machine delays steps now and then as well as snapshots. For the first
        settlement it is the minimum, because the very first snapshots also allocate memory.
        """
        return min(self.costs_s) if number == 1 else statistics.median(self.costs_s)


@dataclass(slots=True)
class _Interval:
    """The steps from a snapshot to the next one, in two halves.

    The copying thread, and what sends the parts, may take processor time and memory bandwidth from the steps. They are
    busy in the first half only, so it takes longer than the second one by what they cost.
    """

    step: int
    """Of the snapshot."""
    end: int
    """Step of the next one."""
    began_s: float
    """When the steps began, on a clock that stands still in phases."""
    halfway_s: float | None = None
    """When the first half ended."""

    @property
    def middle(self) -> int:
        """The last step of the first half. The snapshot's own step: there are no two halves."""
        return self.step + (self.end - self.step) // 2

    def slowdown_s(self, now_s: float) -> float:
        """Return by how much the first half took longer, at the end of the interval; seconds."""
        if self.halfway_s is None:
            return 0.0
        first, second = self.middle - self.step, self.end - self.middle
        return (self.halfway_s - self.began_s) - (now_s - self.halfway_s) * first / second


def _trained_s() -> float:
    return time.monotonic() - phase_time_s()


def _begin_period(step: int) -> _Period:
    return _Period(step, time.monotonic(), phase_time_s())


class SnapshotTaker:
    """Takes this rank's snapshots.

    Args:
        capturer: copies the state into the agent's memory.
        channel: channel to the agent.
        messages: connection to the rank store.
        replication: what the agent reports of this rank's parts. None: no other node is to hold them.
    """

    def __init__(
        self, capturer: Capturer, channel: AgentChannel, messages: RankMessages, replication: Replication | None
    ) -> None:
        self._capturer = capturer
        self._channel = channel
        self._messages = messages
        self._replication = replication
        self._overhead = _overhead()
        self._held_bytes = channel.restored_snapshot_bytes()
        """Size of the restored snapshot on this node, which the agent frees after the first new snapshots."""
        self._limit: int | None = None
        self._schedule: Schedule | None = None
        self._settled = 0
        self._period = _begin_period(0)
        self._interval: _Interval | None = None
        self._store_error: dist.DistError | None = None
        """The error with which this rank failed to read rank 0's last schedule."""
        self._next = 0
        """The step after which the next snapshot is due; 0: after the next step."""
        self.due = 0
        """The step after which `take` is to be called again."""

    def take(self, step: int, *, is_saved: bool) -> Capture | None:
        """Take the snapshot that is due after this step, and find out when the next one is due.

        Args:
            step: number of committed steps.
            is_saved: this rank has to save this step. A checkpoint is written from a copy, so one is made in any case;
                it counts as a snapshot only if one is due, because other ranks may make none.

        Returns:
            The copy; None if there is none of this step.

        Raises:
            TypeError: something in the State could not be loaded back; the message has its name.
            torch.distributed.DistError: this rank, unlike others, can no longer reach the store.
        """
        is_due = step >= self._next
        if self._interval is not None and step == self._interval.middle:
            self._interval.halfway_s = _trained_s()
        if step == self._next - 1:  # before a copy is made for a checkpoint: training does not wait for that one
            self.wait_until_sent()
        # None while the last checkpoint is still being written.
        is_extra = is_saved and not is_due and not self._capturer.is_leased
        capture = self._take(step, is_snapshot=is_due) if is_due or is_extra else None
        self._set_due(step)
        return capture

    def _take(self, step: int, *, is_snapshot: bool) -> Capture | None:
        if self._store_error is not None:
            raise self._store_error
        beside_s = self._beside_s(step)
        self._capturer.settle()
        began = time.monotonic()
        capture = self._copy_state(is_snapshot=is_snapshot)
        self._period.costs_s.append(time.monotonic() - began + beside_s)
        if is_snapshot and capture is None:
            self._stop()
        elif is_snapshot:
            if self._schedule is None or step >= self._schedule.until:
                self._settle(step)
            else:
                self._next = self._schedule.after(step)
            self._interval = _Interval(step, self._next, _trained_s())
        return capture

    @property
    def _busy_s(self) -> float:
        """Seconds from the beginning of the last snapshot until it was complete, and its part sent."""
        return self._capturer.took_s + (0.0 if self._replication is None else self._replication.took_s)

    def _beside_s(self, step: int) -> float:
        """Return the seconds that the last snapshot has taken from the steps since then.

        At least the training has waited for the copying thread, and at most that long and as long as the snapshot was
        copied and sent: other differences between the halves of the interval have other causes.
        """
        waited_s = self._capturer.take_waited_s()
        if self._interval is None or step != self._interval.end:
            return waited_s
        return max(waited_s, min(self._interval.slowdown_s(_trained_s()), self._busy_s))

    def take_and_wait(self, step: int) -> bool:
        """Take a snapshot of a step after which all ranks are quiesced; return whether it is complete.

        Raises:
            TypeError: as `take`.
        """
        self.wait_until_sent()
        if self._capturer.newest == step:
            return True
        if self._next == NEVER or self._copy_state(is_snapshot=True) is None:
            return False
        if self._schedule is not None and self._next <= step + 1:
            self._next = self._schedule.after(self._next)  # if there was no change after all
        self.due = self._next
        self._capturer.settle()
        return self._capturer.newest == step

    def _set_due(self, step: int) -> None:
        if self._next == NEVER:
            self.due = NEVER
            return
        self.due = self._next if step == self._next - 1 else self._next - 1
        if self._interval is not None and step < self._interval.middle:
            self.due = min(self.due, self._interval.middle)

    def wait_until_sent(self) -> None:
        """Wait until the last snapshot is complete, and this rank's part of it was sent to other nodes."""
        self._capturer.settle()
        if self._replication is not None:
            step = self._channel.reported_snapshot
            if not self._replication.is_over(step):
                with runtime_phase("replicate"):
                    self._replication.wait(step)

    def _copy_state(self, *, is_snapshot: bool) -> Capture | None:
        """Copy the state, and report it to the agent if it is a snapshot; None if there is no room for it."""
        state = self._capturer.flatten()
        if is_snapshot and not self._fits(state):
            if self._capturer.expects_saves:
                self._capturer.prepare(state)
            self._capturer.forget()
            return None
        try:
            return self._capturer.copy(state, is_snapshot=is_snapshot, may_defer=True)
        except OSError as error:  # the memory cannot grow
            if is_snapshot:
                warn(f"no snapshots in memory: {error}{limit_behind(error)}. {_COST}")
            return None

    def _fits(self, state: FlatState) -> bool:
        """Return whether the snapshots of this node's ranks stay within the limit, if all parts are as large.

        If the copies of another node's parts would exceed it, the agent keeps these on disk.
        """
        if self._limit is None:
            given = os.environ.get(contract.SNAPSHOT_MEMORY)
            self._limit = int(given) if given else self._half_of_what_is_free()
        parts_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        size = KEPT * ((state.common.bytes if state.common is not None else 0) + parts_here * state.part.bytes)
        if size > self._limit:
            warn(
                f"no snapshots in memory: they would take {size >> 20} MiB on this node, and may take "
                f"{self._limit >> 20}; raise --snapshot_memory. {_COST}"
            )
        return size <= self._limit

    def _half_of_what_is_free(self) -> int:
        """Return half of the memory that was free before anything was restored, but no more than is free now; bytes."""
        free = free_memory()
        return min(free, (free + self._held_bytes) // 2)

    def _settle(self, step: int) -> None:
        """Read rank 0's next schedule; on rank 0, set it.

        Raises:
            torch.distributed.DistError: on rank 0, for which the others wait: it can no longer reach the store.
        """
        name = _name(self._settled)
        try:
            text = self._messages.broadcast(name, lambda: text_of(self._propose(step)))
        except dist.DistError as error:
            if is_main():
                raise
            # Rank 0 has crashed, or its script has ended. If this rank commits again, neither was the case.
            self._store_error, self._next = error, step + 1
            return
        self._schedule = schedule_of(text)
        self._settled += 1
        self._period = _begin_period(step)
        self._next = NEVER if self._schedule is None else self._schedule.after(step)

    def _propose(self, step: int) -> Schedule:
        if self._schedule is None:
            return first_schedule(step)
        number, period = self._settled, self._period
        return next_schedule(
            number,
            step,
            cost_s=period.cost_s(number),
            step_s=period.step_s(step),
            overhead=self._overhead,
            busy_s=self._busy_s,
        )

    def _stop(self) -> None:
        """Take no more snapshots; the others stop too, unless rank 0 has already set the next schedule."""
        self._next = NEVER
        _end(self._messages, self._settled)


def open_snapshot_memory(channel: AgentChannel | None, messages: RankMessages, *, has_load_hooks: bool) -> int | None:
    """Return the descriptor of the agent's memory for this rank's snapshots; None if there are none.

    All ranks follow rank 0, whose hooks are the ones that count: at each settlement they wait for its schedule.

    Args:
        channel: channel to the agent; None without an agent.
        messages: connection to the rank store.
        has_load_hooks: the script also resumes from files of its own, which are in no snapshot.
    """
    if channel is None:
        return None
    descriptor = snapshot_descriptor() if _overhead() > 0 else None
    are_taken = messages.broadcast(
        "snapshots/are", lambda: str(descriptor is not None and _can_resume(has_load_hooks=has_load_hooks))
    )
    if are_taken != str(True):
        return None
    if descriptor is None:
        warn("no snapshots in memory: rank 0's agent takes some, and this node's none; give all the same options")
        _end(messages, 0)
    return descriptor


def _overhead() -> float:
    """Return the largest share of the steps' time that snapshots may take, from 0 to 1."""
    return float(os.environ.get(contract.SNAPSHOT_OVERHEAD, "1")) / 100


def _can_resume(*, has_load_hooks: bool) -> bool:
    """Return whether a snapshot contains everything that a group needs to resume."""
    if has_load_hooks:
        warn(f"no snapshots in memory: the script resumes from files of its own, too (state.on_load). {_COST}")
    return not has_load_hooks


def _end(messages: RankMessages, settled: int) -> None:
    """End snapshots on all ranks: at this settlement unless rank 0 has set a schedule, else at the next one."""
    for number in (settled, settled + 1):
        messages.propose(_name(number), text_of(None))


def _name(number: int) -> str:
    return f"snapshots/{number}"
