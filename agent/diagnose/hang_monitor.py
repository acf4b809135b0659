"""Looks at the local ranks about once a second, on a thread of its own: are they slow, do they stand still?

What is to be thought of what they show is decided in `step_watch.py`. When it becomes suspicious, the stacks of all
local ranks are dumped (`stacks.py`), again at half as much again, when they may turn out to stand still, and at twice
the limit. Each change is posted as `RanksStalled`, and what a step takes as `StepTimeChanged`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

from agent import clock
from agent.core.events import RanksStalled, StepTimeChanged
from agent.core.incident import RankStall
from agent.diagnose.stacks import Dump, dump
from agent.diagnose.step_watch import Sample, Standstill, StepTimeWatch, StepWatch
from agent.observe.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.config import HangConfig
    from agent.core.events import Event
    from agent.workers.process import RankProcess

    Stage = Literal["over", "suspicious", "still", "certain"]

_LOOK_EVERY_S = 1.0
_LOOKS_PER_LIMIT = 10
_DUMP_AT = (1.5, 2.0)
"""Shares of the limit, once it was suspicious: still perhaps, certain."""
_CLOSE_WITHIN_S = 1.0


class _HangAlarm:
    """The silence of one group, as it goes on."""

    def __init__(self) -> None:
        self.stage: Stage = "over"
        self.dumps: list[Dump] = []
        self._dumped = 0
        """Of the shares at which it is looked at again."""

    def is_over(self, quiet: Standstill) -> bool:
        """Whether there was an alarm, and nothing is suspicious any more."""
        return self.stage != "over" and not quiet.is_suspicious

    def is_due(self, quiet: Standstill) -> bool:
        """Whether the ranks are to be looked at more closely now."""
        if self.stage == "over":
            return quiet.is_suspicious
        return self._dumped < len(_DUMP_AT) and quiet.share >= _DUMP_AT[self._dumped]

    def take(self, quiet: Standstill, dumps: list[Dump]) -> bool:
        """Take what was seen; True: the stage has changed."""
        stage: Stage = "certain" if quiet.share >= _DUMP_AT[-1] else self.stage
        if stage == "over":
            stage = "suspicious"
        elif stage == "suspicious" and all(
            new.stands_still_since(old) for new, old in zip(dumps, self.dumps, strict=True)
        ):
            stage = "still"
        self._dumped = sum(quiet.share >= share for share in _DUMP_AT)
        self.dumps = dumps
        has_changed, self.stage = stage != self.stage, stage
        return has_changed


class HangMonitor:
    """Watches one group after another. What it sees it posts from its own thread."""

    def __init__(self, post: Callable[[Event], None], config: HangConfig) -> None:
        self._post = post
        self._watch = StepWatch(config)
        shortest_s = config.timeout_s or config.floor_s
        self._every_s = min(_LOOK_EVERY_S, shortest_s / _LOOKS_PER_LIMIT)
        self._changed = threading.Condition()
        self._group = 0
        self._ranks: tuple[RankProcess, ...] = ()
        """Empty: there is nothing to look at."""
        self._is_new = False
        self._alarm, self._pace = _HangAlarm(), StepTimeWatch()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()

    def begin(self, group: int, ranks: Sequence[RankProcess]) -> None:
        """Look at these from now on."""
        with self._changed:
            self._group, self._ranks, self._is_new = group, tuple(ranks), True
            self._changed.notify()

    def suspect_after(self, soon_s: float | None) -> None:
        """Tell of ranks that stand still after so long already; None: after what is too long at any time."""
        self._watch.soon_s = soon_s

    def end(self) -> None:
        """Look at nothing: the group is being ended."""
        with self._changed:
            self._ranks = ()

    def close(self) -> None:
        """End the thread. What it waits for is bounded, but not waited for."""
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
                self._alarm, self._pace = _HangAlarm(), StepTimeWatch()
            try:
                if ranks and not any(_has_failed(rank) for rank in ranks):
                    self._look(group, ranks)
            except Exception as error:  # noqa: BLE001 - to watch less is better than to end an agent that trains
                log.warning("this group is not watched any more for ranks that stand still", error=repr(error))
                self.end()

    def _look(self, group: int, ranks: tuple[RankProcess, ...]) -> None:
        samples = tuple(_sample(rank) for rank in ranks)
        now, alarm = clock.now(), self._alarm
        quiet = self._watch.look(now, samples)
        if alarm.is_over(quiet):
            self._post_stall(group, quiet, "over", ranks, alarm.dumps)
            self._alarm = _HangAlarm()
        elif alarm.is_due(quiet):
            dumps = dump(ranks)
            if ranks is self._ranks and not any(_has_failed(rank) for rank in ranks) and alarm.take(quiet, dumps):
                self._post_stall(group, quiet, alarm.stage, ranks, dumps)
        paced = self._pace.look(now, self._watch.usual_s, samples)
        if paced is not None:
            self._post(StepTimeChanged(group=group, step_s=paced.step_s, own_s=paced.own_s))

    def _post_stall(
        self, group: int, quiet: Standstill, stage: Stage, ranks: Sequence[RankProcess], dumps: Sequence[Dump]
    ) -> None:
        told = tuple(_stall(rank, seen) for rank, seen in zip(ranks, dumps, strict=True))
        self._post(RanksStalled(group=group, stage=stage, for_s=quiet.for_s, limit_s=quiet.limit_s, ranks=told))


def _sample(rank: RankProcess) -> Sample:
    page = rank.page
    return Sample(
        step=page.step,
        is_due=bool(page.restored),
        is_away=bool(page.phase),
        output=page.output,
        own_us=page.own_us,
        has_ended=rank.exited is not None,
    )


def _has_failed(rank: RankProcess) -> bool:
    return rank.exited is not None and rank.exited.exit_code != 0


def _stall(rank: RankProcess, seen: Dump) -> RankStall:
    return RankStall(
        rank=rank.rank, step=rank.page.step, doing=seen.doing, where=seen.stacks.where, stack=seen.stacks.text
    )
