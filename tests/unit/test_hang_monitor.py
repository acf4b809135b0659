"""The stages of a standstill, from suspicious to certain; an error of the monitor does no harm."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.config import HangConfig
from agent.diagnose.hang_monitor import HangMonitor, _HangAlarm
from agent.diagnose.stacks import Dump, Frame, Stacks
from agent.diagnose.step_watch import Standstill

ASLEEP = Dump("sleeps", Stacks((Frame("/home/me/train.py", 8, "load"),)), (1.0, 1.0), at=10.0)
ELSEWHERE = Dump("sleeps", Stacks((Frame("/home/me/train.py", 9, "load"),)), (1.0, 1.0), at=20.0)


@pytest.mark.parametrize(
    ("shares", "second", "stages"),
    [
        ([0.5, 1.0, 1.2, 1.5, 1.9, 2.0, 3.0], ASLEEP, ["suspicious", "still", "certain"]),
        ([0.5, 1.0, 1.2, 1.5, 1.9, 2.0, 3.0], ELSEWHERE, ["suspicious", "certain"]),
        ([0.9, 2.5, 3.0], ASLEEP, ["certain"]),
        ([0.9, 1.6, 1.7, 2.1], ASLEEP, ["suspicious", "certain"]),
        ([0.1, 0.99], ASLEEP, []),
    ],
)
def test_the_stages_of_a_standstill(shares: list[float], second: Dump, stages: list[str]) -> None:
    """Stacks are dumped at most once for each of the three shares.

    Other stacks after the first show that the rank moves.
    """
    alarm = _HangAlarm()
    told = []
    looks = 0
    for share in shares:
        standstill = Standstill(share, 1.0)
        assert not alarm.is_over(standstill)
        if alarm.is_due(standstill):
            looks += 1
            if alarm.update(standstill, [ASLEEP if looks == 1 else second]):
                told.append(alarm.stage)
    assert told == stages
    assert looks <= 3
    assert alarm.is_over(Standstill(0.2, 1.0)) == bool(stages)


def test_a_standstill_suspected_before_the_limit_is_certain_at_twice_the_limit() -> None:
    alarm = _HangAlarm()
    told = []
    for share in (0.05, 0.1, 0.5, 1.0, 1.4, 1.5, 2.0):
        standstill = Standstill(share, 1.0, suspicious_s=0.1)
        if alarm.is_due(standstill) and alarm.update(standstill, [ASLEEP]):
            told.append((share, alarm.stage))
    assert told == [(0.1, "suspicious"), (1.5, "still"), (2.0, "certain")]
    assert not alarm.is_over(Standstill(0.5, 1.0, suspicious_s=0.1))
    assert alarm.is_over(Standstill(0.5, 1.0)), "the neighbour answers again"


def test_one_rank_that_moves_is_enough() -> None:
    alarm = _HangAlarm()
    alarm.update(Standstill(1.0, 1.0), [ASLEEP, ASLEEP])
    assert not alarm.update(Standstill(1.5, 1.0), [ASLEEP, ELSEWHERE])
    assert alarm.stage == "suspicious"


def test_an_error_in_the_monitor_ends_monitoring_but_not_the_agent() -> None:
    events: queue.Queue[object] = queue.Queue()
    monitor = HangMonitor(events.put, HangConfig(floor_s=0.1, first_s=0.1))
    broken = SimpleNamespace(exited=None)  # it has no control page
    with capture_logs() as logs:
        monitor.begin(1, [broken])  # type: ignore[list-item]
        wait_for(lambda: monitor._ranks == (), "it looks no more")
    assert "hang detection has failed" in logs[0]["event"]
    assert monitor._thread.is_alive()
    monitor.close()
    wait_for(lambda: not monitor._thread.is_alive(), "its end")
    assert events.empty()
