"""The rate of steps, polled once a second."""

from __future__ import annotations

import pytest

from agent.web.rank_poller import StepRate


def rates(rate: StepRate, step_s: float, seconds: int, begin: float = 0.0) -> list[float]:
    """Return the rates for steps of this duration, polled once a second."""
    return [rate.update(begin + second, int((begin + second) / step_s)) for second in range(seconds)]


@pytest.mark.parametrize("step_s", [0.05, 1.0, 4.0, 60.0])
def test_the_rate_is_right_for_steps_of_any_duration(step_s: float) -> None:
    last = rates(StepRate(), step_s, 300)[-30:]
    assert last == pytest.approx([1 / step_s] * 30, rel=0.3)


def test_the_rate_is_zero_after_a_standstill() -> None:
    rate = StepRate()
    rates(rate, 0.1, 20)
    assert rate.update(20.0, 195) > 0.0
    assert rate.update(30.0, 195) == 0.0


def test_replayed_steps_are_not_new() -> None:
    rate = StepRate()
    for second, step in enumerate((100, 110, 120, 105, 115, 125)):
        rate.update(float(second), step)
    assert rate.new_steps == 25
