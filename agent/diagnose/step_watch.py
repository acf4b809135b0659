"""Decides whether ranks hang. It learns the usual time of a step and suspects much longer ones. Uses no clock.

A rank is sampled about once a second. It is **judged** from the time that its State is restored until it has ended: it
commits steps, so another step must come. The limit for one step:

| when | limit |
|---|---|
| before the group's first step | `first_s`, or 100 usual steps of the previous group, whichever is longer |
| until enough steps were seen | `first_s` (`floor_s` if the previous group's steps are known), or 100 usual steps |
| after that | the longest of `floor_s`, `factor` usual steps, and three times the longest recent pause |

The usual time is the median of the last pauses between steps. Evaluations, checkpoints and the first steps are few, so
they do not change it. In a phase no step is due. While one rank of the node is in a phase, no rank is judged, because
the others may wait for it. Time without samples (the agent was stopped, the machine was suspended) is counted for a few
seconds only.

With `timeout_s` nothing is learned. Any program is judged, and each step and each byte of output of any rank of the
node is a sign of life.

While a neighbour that answered before is silent, a step is suspicious earlier: when it takes longer than
`early_limit_s`, than three usual steps, and than the longest recent pause. The time until a hang is certain does not
change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import HangConfig

_ENOUGH_PAUSES = 8
"""Number of pauses from which the usual time is learned."""
_PAUSES = 32
_UNLEARNED_FACTOR = 100.0
_LONGEST_FACTOR = 3.0
_EARLY_FACTOR = 3.0
_LONGEST_PAUSE_WINDOW_S = 3600.0
_MAX_LOOK_GAP_S = 5.0
"""A longer time between two samples is counted as this."""

_REPORT_STEPS = 20
_REPORT_SLOW_STEPS = 2
_REPORT_SLOW_S = 10.0
_REPORT_EVERY_S = 10.0
_REPORT_CHANGE = 0.1
_MAX_SAMPLES = 64


@dataclass(frozen=True)
class Sample:
    """The state of one rank at one moment."""

    step: int = 0
    """The last step that it committed in this group; 0: none."""
    expects_step: bool = False
    """Whether it commits steps, and has all that it needs for the next one."""
    is_in_phase: bool = False
    """Whether it is in a phase."""
    output: int = 0
    """Bytes of output so far."""
    own_us: int = 0
    """Microseconds that its steps took without waiting for other ranks; 0: unknown."""
    has_ended: bool = False
    """Whether it has exited with code 0."""


@dataclass(frozen=True)
class Standstill:
    """Time without a step, and the limits for it."""

    for_s: float = 0.0
    limit_s: float = 1.0
    suspicious_s: float = 1.0
    """Time after which it is suspicious: the limit, or less while a neighbour is silent."""

    @property
    def share(self) -> float:
        """Time without a step as a multiple of the limit. At 2 a hang is certain."""
        return self.for_s / self.limit_s

    @property
    def is_suspicious(self) -> bool:
        """Whether the ranks are to be examined."""
        return self.for_s >= self.suspicious_s


class _LongestPause:
    """The longest pause of this hour and of the hour before."""

    def __init__(self) -> None:
        self._since = 0.0
        self._current_s = self._previous_s = 0.0

    @property
    def longest_s(self) -> float:
        return max(self._current_s, self._previous_s)

    def note(self, now: float, pause_s: float) -> None:
        if now - self._since > _LONGEST_PAUSE_WINDOW_S:
            self._since, self._previous_s, self._current_s = now, self._current_s, 0.0
        self._current_s = max(self._current_s, pause_s)


class StepWatch:
    """Watches the local ranks of one group after another."""

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self.early_limit_s: float | None = None
        """Earlier limit for suspicion while a neighbour is silent. None: no neighbour is. May be set from another
        thread."""
        self._previous_usual_s = 0.0
        """Usual step time of the previous group; 0: unknown."""
        self._longest_pause = _LongestPause()
        self._pauses_s: deque[float] = deque(maxlen=_PAUSES)
        self.begin()

    def begin(self) -> None:
        """Start to watch another group. What was learned becomes the expectation for its first steps."""
        if self.has_learned:
            self._previous_usual_s = self.usual_s
        self._pauses_s.clear()
        self._sampled_at: float | None = None
        self._samples: tuple[Sample, ...] = ()
        self._silences_s: list[float] = []
        self._pause_s = 0.0
        """Time since the last step of any rank."""
        self._step = 0

    @property
    def usual_s(self) -> float:
        """Usual time from step to step; 0: no step yet."""
        return sorted(self._pauses_s)[(len(self._pauses_s) - 1) // 2] if self._pauses_s else 0.0

    @property
    def has_learned(self) -> bool:
        """Whether the usual time is based on enough steps."""
        return len(self._pauses_s) >= _ENOUGH_PAUSES

    def update(self, now: float, samples: Sequence[Sample]) -> Standstill:
        """Take the samples of this moment. Return the longest standstill of any rank, measured by its limit."""
        passed_s = 0.0 if self._sampled_at is None else min(now - self._sampled_at, _MAX_LOOK_GAP_S)
        before = self._samples or tuple(samples)
        self._sampled_at, self._samples = now, tuple(samples)
        self._learn(now, passed_s)
        self._silences_s = self._silences_s or [0.0] * len(samples)
        signs = [
            _is_sign_of_life(old, new, with_output=self._is_timed) for old, new in zip(before, samples, strict=True)
        ]
        is_any_in_phase = any(sample.is_in_phase for sample in samples)
        for index, is_sign in enumerate(signs):
            is_over = is_sign or is_any_in_phase or (self._is_timed and any(signs))
            self._silences_s[index] = 0.0 if is_over else self._silences_s[index] + passed_s
        judged = (
            Standstill(silence_s, limit_s := self._limit_s(sample), self._suspicion_limit_s(sample, limit_s))
            for silence_s, sample in zip(self._silences_s, samples, strict=True)
            if self._is_judged(sample)
        )
        return max(judged, key=lambda standstill: standstill.share, default=Standstill())

    @property
    def _is_timed(self) -> bool:
        return self._config.timeout_s is not None

    def _is_judged(self, sample: Sample) -> bool:
        if sample.has_ended or self._config.timeout_s == 0:
            return False
        return self._is_timed or sample.expects_step

    def _learn(self, now: float, passed_s: float) -> None:
        if not any(sample.is_in_phase for sample in self._samples):
            self._pause_s += passed_s
        step = max((sample.step for sample in self._samples), default=0)
        if step <= self._step:
            return
        if self._step:
            self._longest_pause.note(now, self._pause_s)
        # The first step number that is seen does not tell how many steps this group has made.
        self._pauses_s.append(self._pause_s / (step - self._step if self._step else 1))
        self._step, self._pause_s = step, 0.0

    def _limit_s(self, sample: Sample) -> float:
        config = self._config
        if config.timeout_s is not None:
            return config.timeout_s
        if not sample.step:
            return max(config.first_s, _UNLEARNED_FACTOR * self._previous_usual_s)
        longest_s = _LONGEST_FACTOR * self._longest_pause.longest_s
        if self.has_learned:
            return max(config.floor_s, config.factor * self.usual_s, longest_s)
        least_s = config.floor_s if self._previous_usual_s else config.first_s
        return max(least_s, _UNLEARNED_FACTOR * max(self.usual_s, self._previous_usual_s), longest_s)

    def _suspicion_limit_s(self, sample: Sample, limit_s: float) -> float:
        early_limit_s = self.early_limit_s
        if early_limit_s is None or self._is_timed or not sample.step:
            return limit_s
        return min(limit_s, max(early_limit_s, _EARLY_FACTOR * self.usual_s, self._longest_pause.longest_s))


def _is_sign_of_life(old: Sample, new: Sample, *, with_output: bool) -> bool:
    """Whether a rank has shown a sign of life."""
    return new.step != old.step or new.expects_step != old.expects_step or (with_output and new.output != old.output)


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, in seconds."""

    step_s: float
    own_s: tuple[float, ...]
    """Own time of each rank, without waiting for others; empty: unknown for some rank, or based on too few steps."""

    def differs_from(self, other: StepTime) -> bool:
        """Whether the difference is worth an event."""
        if len(self.own_s) != len(other.own_s):
            return True
        pairs = zip((self.step_s, *self.own_s), (other.step_s, *other.own_s), strict=True)
        return any(abs(new - old) > _REPORT_CHANGE * old for new, old in pairs)


class StepTimeWatch:
    """Decides when the step time of one group's local ranks is reported."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, Sequence[Sample]]] = deque(maxlen=_MAX_SAMPLES)
        """The samples in which a step was new, with their times."""
        self._reported: StepTime | None = None
        self._reported_at = 0.0

    def update(self, now: float, usual_s: float, samples: Sequence[Sample]) -> StepTime | None:
        """Return the step time if it has changed noticeably, after enough steps, and not too often."""
        if not self._history or any(
            new.step > old.step for new, old in zip(samples, self._history[-1][1], strict=True)
        ):
            self._history.append((now, samples))
        since, first = self._history[0]
        if not all(sample.step for sample in first):
            self._history.popleft()
            return None
        pairs = list(zip(samples, first, strict=True))
        steps = min(new.step - old.step for new, old in pairs)
        if steps < (_REPORT_STEPS if now - since < _REPORT_SLOW_S else _REPORT_SLOW_STEPS):
            return None
        own_s = tuple((new.own_us - old.own_us) / 1e6 / (new.step - old.step) for new, old in pairs)
        step_time = StepTime(usual_s, own_s if all(own_s) and steps >= _REPORT_STEPS else ())
        if self._reported is not None and (
            now - self._reported_at < _REPORT_EVERY_S or not step_time.differs_from(self._reported)
        ):
            return None
        self._reported, self._reported_at = step_time, now
        return step_time
