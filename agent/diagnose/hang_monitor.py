"""Samples the local ranks about once a second, on a thread of its own, to detect hangs and measure step times.

`step_watch.py` decides what the samples mean. When a standstill becomes suspicious, the stacks of all local ranks are
dumped (`stacks.py`); again at 1.5 times the limit, to see whether the ranks have moved; and at twice the limit. Each
change is posted as `RanksStalled`, and step times as `StepTimeChanged`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

from agent import clock
from agent.core.events import RanksStalled, StepTimeChanged
from agent.core.incident import RankStall
from agent.diagnose.stacks import Dump, dump_ranks
from agent.diagnose.step_watch import Sample, Standstill, StepTimeWatch, StepWatch
from agent.observe.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.config import HangConfig
    from agent.core.events import Event
    from agent.workers.process import RankProcess

    Stage = Literal["over", "suspicious", "still", "certain"]

_SAMPLE_EVERY_S = 1.0
_SAMPLES_PER_LIMIT = 10
_DUMP_AT = (1.5, 2.0)
"""Shares of the limit at which a suspicious group is dumped again: is it standing still, is it certainly hung."""
_CLOSE_WITHIN_S = 1.0


class _HangAlarm:
    """The standstill of one group, from the first suspicion until it is over."""

    def __init__(self) -> None:
        self.stage: Stage = "over"
        self.dumps: list[Dump] = []
        self._dumped = 0
        """How many of the `_DUMP_AT` shares were reached."""

    def is_over(self, standstill: Standstill) -> bool:
        """Whether there was an alarm and nothing is suspicious any more."""
        return self.stage != "over" and not standstill.is_suspicious

    def is_due(self, standstill: Standstill) -> bool:
        """Whether the stacks of the ranks are to be dumped now."""
        if self.stage == "over":
            return standstill.is_suspicious
        return self._dumped < len(_DUMP_AT) and standstill.share >= _DUMP_AT[self._dumped]

    def update(self, standstill: Standstill, dumps: list[Dump]) -> bool:
        """Update the stage from new dumps. Return whether it has changed."""
        stage: Stage = "certain" if standstill.share >= _DUMP_AT[-1] else self.stage
        if stage == "over":
            stage = "suspicious"
        elif stage == "suspicious" and all(
            new.is_unchanged_since(old) for new, old in zip(dumps, self.dumps, strict=True)
        ):
            stage = "still"
        self._dumped = sum(standstill.share >= share for share in _DUMP_AT)
        self.dumps = dumps
        has_changed, self.stage = stage != self.stage, stage
        return has_changed


class HangMonitor:
    """Watches one group after another. Events are posted from the monitor's own thread."""

    def __init__(self, post: Callable[[Event], None], config: HangConfig) -> None:
        self._post = post
        self._watch = StepWatch(config)
        shortest_s = config.timeout_s or config.floor_s
        self._every_s = min(_SAMPLE_EVERY_S, shortest_s / _SAMPLES_PER_LIMIT)
        self._changed = threading.Condition()
        self._group = 0
        self._ranks: tuple[RankProcess, ...] = ()
        """Empty: no group is watched."""
        self._is_new = False
        self._alarm, self._step_times = _HangAlarm(), StepTimeWatch()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="hang-monitor", daemon=True)
        self._thread.start()

    def begin(self, group: int, ranks: Sequence[RankProcess]) -> None:
        """Watch these ranks from now on."""
        with self._changed:
            self._group, self._ranks, self._is_new = group, tuple(ranks), True
            self._changed.notify()

    def set_threshold(self, after_s: float | None) -> None:
        """Suspect ranks that complete no step for `after_s` seconds. None: only after the usual limit."""
        self._watch.early_limit_s = after_s

    def end(self) -> None:
        """Watch no ranks: the group is being ended."""
        with self._changed:
            self._ranks = ()

    def close(self) -> None:
        """End the thread. Wait only briefly: a dump under way takes seconds at most."""
        with self._changed:
            self._ranks, self._is_closing = (), True
            self._changed.notify()
        self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        while not self._is_closing:
            with self._changed:
                if not self._is_closing:
                    self._changed.wait(self._every_s if self._ranks else None)
                group, ranks = self._group, self._ranks
                is_new, self._is_new = self._is_new, False
            if is_new:
                self._watch.begin()
                self._alarm, self._step_times = _HangAlarm(), StepTimeWatch()
            try:
                if ranks and not any(_has_failed(rank) for rank in ranks):
                    self._check_ranks(group, ranks)
            except Exception as error:  # noqa: BLE001 - the agent goes on without hang detection
                log.warning("hang detection has failed and is off for this group", error=repr(error))
                self.end()

    def _check_ranks(self, group: int, ranks: tuple[RankProcess, ...]) -> None:
        samples = tuple(_sample(rank) for rank in ranks)
        now, alarm = clock.now(), self._alarm
        standstill = self._watch.update(now, samples)
        if alarm.is_over(standstill):
            self._post_stall(group, standstill, "over", ranks, alarm.dumps)
            self._alarm = _HangAlarm()
        elif alarm.is_due(standstill):
            dumps = dump_ranks(ranks)
            if (
                ranks is self._ranks
                and not any(_has_failed(rank) for rank in ranks)
                and alarm.update(standstill, dumps)
            ):
                self._post_stall(group, standstill, alarm.stage, ranks, dumps)
        step_time = self._step_times.update(now, self._watch.usual_s, samples)
        if step_time is not None:
            self._post(StepTimeChanged(group=group, step_s=step_time.step_s, own_s=step_time.own_s))

    def _post_stall(
        self, group: int, standstill: Standstill, stage: Stage, ranks: Sequence[RankProcess], dumps: Sequence[Dump]
    ) -> None:
        stalls = tuple(_rank_stall(rank, dump) for rank, dump in zip(ranks, dumps, strict=True))
        self._post(
            RanksStalled(group=group, stage=stage, for_s=standstill.for_s, limit_s=standstill.limit_s, ranks=stalls)
        )


def _sample(rank: RankProcess) -> Sample:
    page = rank.page
    return Sample(
        step=page.step,
        expects_step=bool(page.restored),
        is_in_phase=bool(page.phase),
        output=page.output,
        own_us=page.own_us,
        has_ended=rank.exited is not None,
    )


def _has_failed(rank: RankProcess) -> bool:
    return rank.exited is not None and rank.exited.exit_code != 0


def _rank_stall(rank: RankProcess, dump: Dump) -> RankStall:
    return RankStall(
        rank=rank.rank,
        step=rank.page.step,
        doing=dump.doing,
        where=dump.stacks.where,
        stack=dump.stacks.text,
        stack_shows=dump.stack_shows,
    )
