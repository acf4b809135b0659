"""What counts as a hang, and what never does: recorded traces of steps, with an injected clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from agent.config import HangConfig
from agent.diagnose.step_watch import Sample, Standstill, StepTime, StepTimeWatch, StepWatch

DEFAULT = HangConfig()
PACES_S = [0.001, 0.01, 0.1, 0.3, 1.0, 2.5, 7.0, 20.0, 60.0]
LOOK_EVERY_S = 1.0

# A trace lists the durations of its steps, in units of the usual step. Between two steps a script may evaluate (40) or
# write a checkpoint (20); the first steps take long (50), for a compiler, caches and connections.
TRACES: dict[str, list[float]] = {
    "evaluations": ([1.0] * 30 + [40.0]) * 4,
    "an evaluation right after the first step": [3.0, 40.0] + [1.0] * 40,
    "an evaluation right after the second step": [1.0, 1.0, 40.0] + [1.0] * 40,
    "quick steps, and an evaluation": [0.3, 0.3, 40.0] + [1.0] * 40,
    "an evaluation every third step": [1.0, 1.0, 40.0] * 12,
    "a first step of 50": [50.0] + [1.0] * 40 + [40.0] + [1.0] * 5,
    "first steps of 50, 50 and 30": [50.0, 50.0, 30.0] + [1.0] * 40 + [40.0],
    "a second step of 50": [1.0, 50.0] + [1.0] * 40,
    "a step that is compiled anew": [50.0] + [1.0] * 20 + [50.0 * 0.95] + [1.0] * 20,
    "checkpoints": ([1.0] * 9 + [20.0]) * 8,
    "checkpoints at every other step": [1.0, 20.0] * 20,
    "a checkpoint at the first step": [20.0, 20.0] + [1.0] * 30,
    "warm-up": [10.0 - n / 4 for n in range(36)] + [1.0] * 20 + [40.0],
    "a straggling tail": [1.0] * 40 + [1.0 + n / 4 for n in range(40)] + [40.0],
    "refills of the data loader": ([0.4] * 15 + [10.0]) * 6 + [40.0 * 0.4],
    "noise": [0.5, 1.5, 0.7, 1.3, 1.0, 0.9, 3.0, 1.1] * 8 + [40.0],
    "all of them": [50.0, 20.0, 40.0] + ([1.0] * 9 + [20.0]) * 4 + [40.0] + [10.0, 1.0, 1.0] * 10 + [40.0],
}


def look_at(
    watch: StepWatch, durations: Iterable[float], *, from_step: int = 0, at: float = 0.0
) -> Iterator[tuple[float, Standstill]]:
    """Play a trace, sampling once a second. Yield the time, and the standstill seen then."""
    ends = [*itertools.accumulate(durations, initial=at)][1:]
    done = 0
    while done < len(ends):
        while done < len(ends) and ends[done] <= at:
            done += 1
        yield at, watch.update(at, [Sample(step=from_step + done, expects_step=True)])
        at += LOOK_EVERY_S


def longest_share(watch: StepWatch, durations: Iterable[float], *, from_step: int = 0, at: float = 0.0) -> float:
    return max(
        (standstill.share for _, standstill in look_at(watch, durations, from_step=from_step, at=at)), default=0.0
    )


def until_certain(watch: StepWatch, sample: Sample, *, at: float = 0.0) -> tuple[float, float]:
    """Let no step follow. Return the times at which that is suspicious, and certain."""
    suspicious_at = None
    for seconds in itertools.count():
        standstill = watch.update(at + seconds, [sample])
        if suspicious_at is None and standstill.share >= 1:
            suspicious_at = float(seconds)
        if standstill.share >= 2:
            assert suspicious_at is not None
            return suspicious_at, float(seconds)
    raise AssertionError


@pytest.mark.parametrize("pace_s", PACES_S)
@pytest.mark.parametrize("name", TRACES)
def test_what_scripts_do_between_steps_is_no_hang_at_any_pace(name: str, pace_s: float) -> None:
    """At the start of a job, and in its next group, which starts with what was learned in the previous one."""
    watch = StepWatch(DEFAULT)
    durations = [share * pace_s for share in TRACES[name]]
    if sum(durations) < 40:  # a trace that is too short shows nothing
        durations *= 1 + int(40 / sum(durations))
    assert longest_share(watch, durations) < 1
    watch.begin()
    assert longest_share(watch, durations) < 1


@pytest.mark.parametrize(("pace_s", "limit_s"), [(0.001, 60), (0.5, 60), (1.0, 60), (2.0, 100), (60.0, 3000)])
def test_a_hang_is_suspicious_at_the_limit_and_certain_at_twice_that(pace_s: float, limit_s: float) -> None:
    watch = StepWatch(DEFAULT)
    steps = max(20, int(20 / pace_s))
    for time, _ in look_at(watch, [pace_s] * steps):
        last = time
    suspicious_s, certain_s = until_certain(watch, Sample(step=steps, expects_step=True), at=last + 1)
    assert suspicious_s == pytest.approx(limit_s, abs=3)
    assert certain_s == pytest.approx(2 * limit_s, abs=5)


def until_suspicious(watch: StepWatch, sample: Sample, *, at: float) -> float:
    """Let no step follow. Return the time without a step at which it is suspicious."""
    looks = (watch.update(at + LOOK_EVERY_S * look, [sample]) for look in itertools.count())
    return next(standstill.for_s for standstill in looks if standstill.is_suspicious)


def test_while_a_neighbour_is_silent_a_stall_is_suspicious_sooner_and_no_sooner_certain() -> None:
    for pace_s, lately_s, suspicious_s in ((0.1, 0.1, 4), (3.0, 3.0, 9), (0.1, 20.0, 20)):
        watch = StepWatch(DEFAULT)
        trace = [pace_s] * 40 + [lately_s] + [pace_s] * 40
        *_, (last, _) = look_at(watch, trace)
        watch.early_limit_s = 4.0
        stands = Sample(step=len(trace), expects_step=True)
        assert until_suspicious(watch, stands, at=last + 1) == pytest.approx(suspicious_s, abs=1.5)
        _, certain_s = until_certain(watch, stands, at=last + 40)
        assert certain_s > 70
        watch.early_limit_s = None
        assert watch.update(last + 300, [Sample(step=len(trace) + 1, expects_step=True)]).share == 0
        assert until_suspicious(watch, Sample(step=len(trace) + 1, expects_step=True), at=last + 301) >= 60
    watch = StepWatch(DEFAULT)
    watch.early_limit_s = 4.0
    assert until_suspicious(watch, Sample(expects_step=True), at=0.0) >= 3600, "nothing is usual before the first step"


def test_a_pause_that_ended_makes_similar_pauses_unsuspicious() -> None:
    watch = StepWatch(DEFAULT)
    trace = [1.0] * 20 + [110.0] + [1.0] * 40
    assert 1 < longest_share(watch, trace) < 2
    assert longest_share(watch, [300.0], from_step=61, at=200.0) < 1
    later = [1.0] * 8000  # more than two hours
    assert longest_share(watch, [*later, 110.0], from_step=62, at=501.0) > 1, "what was lately is forgotten in time"


def test_the_limit_before_the_first_step_is_longer_and_follows_the_usual_step_in_later_groups() -> None:
    watch = StepWatch(DEFAULT)
    assert until_certain(watch, Sample(expects_step=True)) == (3600, 7200)
    watch.begin()
    assert longest_share(watch, [60.0] * 40) < 1
    watch.begin()
    suspicious_s, _ = until_certain(watch, Sample(expects_step=True))
    assert suspicious_s == pytest.approx(100 * 60, abs=5)


def test_a_rank_that_is_not_restored_or_commits_no_steps_or_has_ended_is_not_judged() -> None:
    for sample in (Sample(), Sample(output=5), Sample(step=3, expects_step=True, has_ended=True)):
        watch = StepWatch(DEFAULT)
        assert all(watch.update(float(time), [sample]).share == 0 for time in range(0, 100_000, 5))


def test_of_two_ranks_the_one_without_steps_counts() -> None:
    watch = StepWatch(DEFAULT)
    shares = [
        watch.update(
            float(time), [Sample(step=time, expects_step=True), Sample(step=min(time, 50), expects_step=True)]
        ).share
        for time in range(1, 200)
    ]
    assert shares[50] < 0.1
    assert shares[-1] == pytest.approx(149 / 60, abs=0.1)
    ended = StepWatch(DEFAULT)
    for time in range(1, 50):
        ended.update(float(time), [Sample(step=time, expects_step=True)] * 2)
    pair = [Sample(step=50, expects_step=True, has_ended=True), Sample(step=50, expects_step=True)]
    assert max(ended.update(50.0 + time, pair).share for time in range(130)) > 2, "who ended well protects nobody"


def test_time_in_a_phase_does_not_count_and_one_rank_in_it_is_enough() -> None:
    watch = StepWatch(DEFAULT)
    for time in range(1, 30):
        watch.update(float(time), [Sample(step=time, expects_step=True)] * 2)
    away = [Sample(step=30, expects_step=True, is_in_phase=True), Sample(step=30, expects_step=True)]
    assert all(watch.update(30.0 + time, away).share == 0 for time in range(5000))
    here = [Sample(step=30, expects_step=True)] * 2
    assert watch.update(5030.0 + 50, here).share < 1
    assert watch.usual_s == pytest.approx(1.0)
    assert watch.update(5085.0, [Sample(step=31, expects_step=True)] * 2).share < 0.1
    shares = [watch.update(5085.0 + time, [Sample(step=31, expects_step=True)] * 2).share for time in range(130)]
    assert max(shares) > 2, "nor does it make later pauses unsuspicious"


def test_time_without_samples_hardly_counts() -> None:
    """The agent was stopped together with its workers, which had no time for a step either."""
    watch = StepWatch(DEFAULT)
    for time in range(1, 30):
        watch.update(float(time), [Sample(step=time, expects_step=True)])
    assert watch.update(10_000.0, [Sample(step=29, expects_step=True)]).share < 0.2


def test_a_timeout_applies_to_any_program_and_output_is_a_sign_of_life() -> None:
    watch = StepWatch(HangConfig(timeout_s=30.0))
    assert until_certain(watch, Sample()) == (30, 60)
    speaking = StepWatch(HangConfig(timeout_s=30.0))
    shares = [speaking.update(float(t), [Sample(), Sample(output=t // 20)]).share for t in range(500)]
    assert max(shares) < 1, "one rank that says something speaks for the others of its node"
    stepping = StepWatch(HangConfig(timeout_s=30.0))
    shares = [stepping.update(float(t), [Sample(step=t // 20, expects_step=True)]).share for t in range(500)]
    assert max(shares) < 1
    away = StepWatch(HangConfig(timeout_s=30.0))
    assert all(away.update(float(t), [Sample(is_in_phase=True)]).share == 0 for t in range(500))


def test_a_timeout_of_0_disables_hang_detection() -> None:
    watch = StepWatch(HangConfig(timeout_s=0.0))
    assert all(watch.update(float(t), [Sample(step=1, expects_step=True)]).share == 0 for t in range(0, 100_000, 5))


def paces(watch: StepTimeWatch, looks: Iterable[tuple[float, list[Sample]]], usual_s: float = 0.1) -> list[StepTime]:
    return [pace for now, samples in looks if (pace := watch.update(now, usual_s, samples)) is not None]


def test_the_step_time_is_reported_after_20_steps_and_when_it_changes() -> None:
    watch = StepTimeWatch()

    def run(begin_s: int, end_s: int, second_own_us: int) -> list[tuple[float, list[Sample]]]:
        made = []
        for time in range(begin_s, end_s):
            step = 10 * time
            first = Sample(step=step, own_us=20_000 * step)
            made.append((float(time), [first, replace(first, own_us=second_own_us * step)]))
        return made

    told = paces(watch, run(0, 4, 80_000))
    assert [pace.own_s for pace in told] == [pytest.approx((0.02, 0.08))]
    assert told[0].step_s == 0.1
    assert paces(watch, run(4, 10, 80_000), usual_s=0.2) == [], "not so soon again"
    assert paces(watch, run(10, 100, 80_000), usual_s=0.105) == [], "it has hardly changed"
    assert [pace.step_s for pace in paces(watch, run(100, 101, 80_000), usual_s=0.2)] == [0.2]
    assert paces(watch, run(111, 115, 400_000), usual_s=0.2), "one rank has become slower"


def test_own_times_are_reported_only_if_all_ranks_measure_them() -> None:
    looks = [(float(t), [Sample(step=10 * t), Sample(step=10 * t, own_us=t)]) for t in range(1, 20)]
    assert [pace.own_s for pace in paces(StepTimeWatch(), looks)] == [()]


def test_slow_steps_are_reported_sooner_without_own_times() -> None:
    """Slow steps are reported after two if these took ten seconds; each rank's own time after 20 steps."""
    watch = StepTimeWatch()
    looks = [(float(t), [Sample(step=1000 + t // 4, own_us=t)]) for t in range(100)]
    told = [(now, pace) for now, samples in looks for pace in paces(watch, [(now, samples)], usual_s=4.0)]
    assert [(now, pace.step_s, bool(pace.own_s)) for now, pace in told] == [(10.0, 4.0, False), (80.0, 4.0, True)]


def test_too_few_steps_are_not_reported() -> None:
    looks = [(0.5 * t, [Sample(step=1000 + t, own_us=t)]) for t in range(20)]
    assert paces(StepTimeWatch(), looks) == []
    looks = [(float(t), [Sample(step=1000 + min(t, 1), own_us=t)]) for t in range(100)]
    assert paces(StepTimeWatch(), looks) == []
