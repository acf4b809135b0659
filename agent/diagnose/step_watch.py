"""Is it a hang? What is usual for a step is learnt, and what takes far longer is suspicious. No clock, no process here.

A rank is looked at about once a second. It is **judged** once its State has what it begins from, until it has ended: it
commits steps, so a step must come. How long that may take:

| when | limit |
|---|---|
| before the group's first step | `first_s`, or 100 usual steps of the group before, if that is more |
| while not enough is known | `first_s` (`floor_s` if the group before tells what is usual), or 100 usual steps |
| after that | `floor_s`, `factor` usual steps, or three times the longest pause seen lately: the largest of these |

What is usual is the median of the last pauses between steps, so that evaluations, checkpoints and the first steps
do not change it: they are few. In a phase no step is due: while one rank of the node is in one, nobody is judged, for
the others may wait for it. Time in which nobody looked (the agent was stopped, the machine slept) hardly counts.

With `timeout_s` nothing is learnt: any program is judged, and every step and every byte of output, of any rank of the
node, is a sign of life.

While a neighbour that answered before is silent, a step that is longer than `soon_s`, than three usual ones and than
the longest pause seen lately is suspicious already. What is certain is not changed by it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import HangConfig

_ENOUGH = 8
"""Pauses by which it is known what is usual."""
_RECENT = 32
_EARLY_FACTOR = 100.0
_LONGEST_FACTOR = 3.0
_SOON_FACTOR = 3.0
_LATELY_S = 3600.0
_UNSEEN_S = 5.0
"""More than this between two looks was not seen."""

_PACED_STEPS = 20
_PACED_SLOW_STEPS = 2
_PACED_SLOW_S = 10.0
_PACED_EVERY_S = 10.0
_PACED_CHANGE = 0.1
_PACED_LOOKS = 64


@dataclass(frozen=True)
class Sample:
    """What a rank shows."""

    step: int = 0
    """The last that it committed in this group; 0: none."""
    is_due: bool = False
    """It commits steps, and has all that it needs for the next."""
    is_away: bool = False
    """It is in a phase."""
    output: int = 0
    """Bytes so far."""
    own_us: int = 0
    """Microseconds that its steps took itself; 0: not known."""
    has_ended: bool = False
    """With code 0."""


@dataclass(frozen=True)
class Standstill:
    """How long there was no step, and what is too long. Seconds."""

    for_s: float = 0.0
    limit_s: float = 1.0
    soon_s: float = 1.0
    """After so long it is suspicious; the limit, unless a neighbour is silent."""

    @property
    def share(self) -> float:
        """Of the limit. 2: it is certain."""
        return self.for_s / self.limit_s

    @property
    def is_suspicious(self) -> bool:
        """Whether it is worth a closer look."""
        return self.for_s >= self.soon_s


class _RecentSteps:
    """The longest pause of this hour and the last."""

    def __init__(self) -> None:
        self._since = 0.0
        self._now_s = self._before_s = 0.0

    @property
    def longest_s(self) -> float:
        return max(self._now_s, self._before_s)

    def note(self, now: float, pause_s: float) -> None:
        if now - self._since > _LATELY_S:
            self._since, self._before_s, self._now_s = now, self._now_s, 0.0
        self._now_s = max(self._now_s, pause_s)


class StepWatch:
    """Watches the local ranks of one group after another."""

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self.soon_s: float | None = None
        """A neighbour is silent: what may be suspicious already. None: none is. May be set from another thread."""
        self._before_s = 0.0
        """A usual step of the group before; 0: not known."""
        self._lately = _RecentSteps()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.begin()

    def begin(self) -> None:
        """Another group begins: what is known of a step is what is to be expected of it."""
        if self.is_known:
            self._before_s = self.usual_s
        self._recent.clear()
        self._looked_at: float | None = None
        self._samples: tuple[Sample, ...] = ()
        self._quiet_s: list[float] = []
        self._pause_s = 0.0
        """Since the last step of any rank."""
        self._step = 0

    @property
    def usual_s(self) -> float:
        """From step to step; 0: there was none yet."""
        return sorted(self._recent)[(len(self._recent) - 1) // 2] if self._recent else 0.0

    @property
    def is_known(self) -> bool:
        """Whether what is usual rests on enough."""
        return len(self._recent) >= _ENOUGH

    def look(self, now: float, samples: Sequence[Sample]) -> Standstill:
        """Take what the ranks show now; return what is the longest silence among them, in shares of its limit."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _UNSEEN_S)
        before = self._samples or tuple(samples)
        self._looked_at, self._samples = now, tuple(samples)
        self._learn(now, passed_s)
        self._quiet_s = self._quiet_s or [0.0] * len(samples)
        signs = [_is_sign(old, new, with_output=self._is_timed) for old, new in zip(before, samples, strict=True)]
        is_anyone_away = any(sample.is_away for sample in samples)
        for place, is_sign in enumerate(signs):
            is_over = is_sign or is_anyone_away or (self._is_timed and any(signs))
            self._quiet_s[place] = 0.0 if is_over else self._quiet_s[place] + passed_s
        judged = (
            Standstill(quiet_s, limit_s := self._limit_s(sample), self._soon_limit_s(sample, limit_s))
            for quiet_s, sample in zip(self._quiet_s, samples, strict=True)
            if self._is_judged(sample)
        )
        return max(judged, key=lambda quiet: quiet.share, default=Standstill())

    @property
    def _is_timed(self) -> bool:
        return self._config.timeout_s is not None

    def _is_judged(self, sample: Sample) -> bool:
        if sample.has_ended or self._config.timeout_s == 0:
            return False
        return self._is_timed or sample.is_due

    def _learn(self, now: float, passed_s: float) -> None:
        if not any(sample.is_away for sample in self._samples):
            self._pause_s += passed_s
        step = max((sample.step for sample in self._samples), default=0)
        if step <= self._step:
            return
        if self._step:
            self._lately.note(now, self._pause_s)
        # The first one that is seen has a number that says nothing of how many there were in this group.
        self._recent.append(self._pause_s / (step - self._step if self._step else 1))
        self._step, self._pause_s = step, 0.0

    def _limit_s(self, sample: Sample) -> float:
        config = self._config
        if config.timeout_s is not None:
            return config.timeout_s
        if not sample.step:
            return max(config.first_s, _EARLY_FACTOR * self._before_s)
        longest_s = _LONGEST_FACTOR * self._lately.longest_s
        if self.is_known:
            return max(config.floor_s, config.factor * self.usual_s, longest_s)
        least_s = config.floor_s if self._before_s else config.first_s
        return max(least_s, _EARLY_FACTOR * max(self.usual_s, self._before_s), longest_s)

    def _soon_limit_s(self, sample: Sample, limit_s: float) -> float:
        soon_s = self.soon_s
        if soon_s is None or self._is_timed or not sample.step:
            return limit_s
        return min(limit_s, max(soon_s, _SOON_FACTOR * self.usual_s, self._lately.longest_s))


def _is_sign(old: Sample, new: Sample, *, with_output: bool) -> bool:
    """Whether a rank has shown that it goes on."""
    return new.step != old.step or new.is_due != old.is_due or (with_output and new.output != old.output)


@dataclass(frozen=True)
class StepTime:
    """What a step takes, in seconds."""

    step_s: float
    own_s: tuple[float, ...]
    """Of each rank, for itself; empty: not known of all, or not from enough steps."""

    def differs_from(self, other: StepTime) -> bool:
        """Whether that is worth telling."""
        if len(self.own_s) != len(other.own_s):
            return True
        pairs = zip((self.step_s, *self.own_s), (other.step_s, *other.own_s), strict=True)
        return any(abs(new - old) > _PACED_CHANGE * old for new, old in pairs)


class StepTimeWatch:
    """What is to be told of the pace of one group's local ranks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Sequence[Sample]]] = deque(maxlen=_PACED_LOOKS)
        """When there was a step since the one before."""
        self._told: StepTime | None = None
        self._told_at = 0.0

    def look(self, now: float, usual_s: float, samples: Sequence[Sample]) -> StepTime | None:
        """Return the pace if it has changed by something, after enough steps, and not too often."""
        if not self._looks or any(new.step > old.step for new, old in zip(samples, self._looks[-1][1], strict=True)):
            self._looks.append((now, samples))
        since, first = self._looks[0]
        if not all(sample.step for sample in first):
            self._looks.popleft()
            return None
        pairs = list(zip(samples, first, strict=True))
        made = min(new.step - old.step for new, old in pairs)
        if made < (_PACED_STEPS if now - since < _PACED_SLOW_S else _PACED_SLOW_STEPS):
            return None
        own_s = tuple((new.own_us - old.own_us) / 1e6 / (new.step - old.step) for new, old in pairs)
        pace = StepTime(usual_s, own_s if all(own_s) and made >= _PACED_STEPS else ())
        if self._told is not None and (now - self._told_at < _PACED_EVERY_S or not pace.differs_from(self._told)):
            return None
        self._told, self._told_at = pace, now
        return pace
