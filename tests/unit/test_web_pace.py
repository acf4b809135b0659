"""How fast steps are made, seen once a second."""

from __future__ import annotations

import pytest

from agent.web.step_rate import StepRate


def paces(pace: StepRate, step_s: float, seconds: int, begin: float = 0.0) -> list[float]:
    """What it says of steps that take so long, looked at once a second."""
    return [pace.take(begin + second, int((begin + second) / step_s)) for second in range(seconds)]


@pytest.mark.parametrize("step_s", [0.05, 1.0, 4.0, 60.0])
def test_steps_of_any_length_have_their_pace(step_s: float) -> None:
    last = paces(StepRate(), step_s, 300)[-30:]
    assert last == pytest.approx([1 / step_s] * 30, rel=0.3)


def test_no_step_for_long_is_no_pace() -> None:
    pace = StepRate()
    paces(pace, 0.1, 20)
    assert pace.take(20.0, 195) > 0.0
    assert pace.take(30.0, 195) == 0.0


def test_steps_done_again_are_no_gain() -> None:
    pace = StepRate()
    for second, step in enumerate((100, 110, 120, 105, 115, 125)):
        pace.take(float(second), step)
    assert pace.gained == 25
