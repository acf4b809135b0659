"""How fast steps are made, seen once a second."""

from __future__ import annotations

import pytest

from agent.web.rank_poller import StepRate


def paces(pace: StepRate, step_s: float, seconds: int, begin: float = 0.0) -> list[float]:
    """What it says of steps that take so long, looked at once a second."""
    return [pace.update(begin + second, int((begin + second) / step_s)) for second in range(seconds)]


@pytest.mark.parametrize("step_s", [0.05, 1.0, 4.0, 60.0])
def test_steps_of_any_length_have_their_pace(step_s: float) -> None:
    last = paces(StepRate(), step_s, 300)[-30:]
    assert last == pytest.approx([1 / step_s] * 30, rel=0.3)


def test_no_step_for_long_is_no_pace() -> None:
    pace = StepRate()
    paces(pace, 0.1, 20)
    assert pace.update(20.0, 195) > 0.0
    assert pace.update(30.0, 195) == 0.0


def test_replayed_steps_are_not_new() -> None:
    pace = StepRate()
    for second, step in enumerate((100, 110, 120, 105, 115, 125)):
        pace.update(float(second), step)
    assert pace.new_steps == 25
