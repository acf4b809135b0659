"""What is made of a peer's answers that name its time."""

from __future__ import annotations

import random

import pytest

from agent.links.clocks import ClockComparison, ClockOffset

HEARTBEAT_S = 0.5
DAY_S = 86400.0


class Peer:
    """A peer whose clock is ahead, behind a network with a latency per direction."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s
        self.now = 0.0
        self.comparison = ClockComparison()

    def beat(self, there_s: float, back_s: float) -> ClockOffset | None:
        """Simulate one heartbeat; return the report."""
        self.now += HEARTBEAT_S
        asked, answered = self.now, self.now + there_s + back_s
        # Our own wall clock is our monotonic one here, a day on.
        theirs = DAY_S + asked + there_s + self.ahead_s
        return self.comparison.take(asked, answered, mine=DAY_S + answered, theirs=theirs)


def test_the_first_answer_is_reported_with_a_margin_for_the_round_trip() -> None:
    told = Peer(ahead_s=3600.0).beat(0.001, 0.001)
    assert told is not None
    assert abs(told.ahead_s - 3600.0) < 1e-6
    assert 0.001 <= told.error_s < 0.0021


@pytest.mark.parametrize(("there_s", "back_s"), [(0.3, 0.0), (0.0, 0.3)])
def test_a_one_sided_network_is_within_half_of_the_round_trip(there_s: float, back_s: float) -> None:
    told = Peer(ahead_s=-5.0).beat(there_s, back_s)
    assert told is not None
    assert 0.149 < abs(told.ahead_s + 5.0) < 0.151
    assert 0.299 < told.error_s < 0.301


def test_an_hour_of_equal_answers_is_reported_once() -> None:
    peer, chance = Peer(), random.Random(1)
    told = [peer.beat(chance.uniform(0.001, 0.0011), chance.uniform(0.001, 0.0011)) for _ in range(7200)]
    assert [each for each in told if each is not None] == told[:1]


def test_a_much_better_answer_is_reported_and_kept_over_worse_ones() -> None:
    peer = Peer()
    peer.beat(0.1, 0.1)
    better = peer.beat(0.001, 0.001)
    assert better is not None
    assert better.error_s < 0.003
    assert [peer.beat(0.1, 0.05) for _ in range(15)] == [None] * 15


def test_a_clock_that_jumps_is_reported_at_once_in_both_directions() -> None:
    peer = Peer()
    peer.beat(0.001, 0.001)
    for jumped_to in (10.0, -10.0, -10.02):
        peer.ahead_s = jumped_to
        told = peer.beat(0.002, 0.002)
        assert told is not None
        assert abs(told.ahead_s - jumped_to) <= told.error_s < 0.005


def test_clocks_that_drift_apart_are_reported_again_before_the_last_report_is_wrong() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        peer, told, times = Peer(), None, 0
        for _ in range(1000):
            peer.ahead_s += 50e-6 * HEARTBEAT_S
            news = peer.beat(chance.expovariate(1000.0), chance.expovariate(1000.0))
            told, times = news or told, times + (news is not None)
            assert told is not None
            assert abs(told.ahead_s - peer.ahead_s) <= told.error_s, f"seed {seed}"
        assert times < 100, f"seed {seed}"


def test_one_lucky_answer_does_not_count_for_ever() -> None:
    peer = Peer()
    told = peer.beat(0.0, 0.0)
    for _ in range(1000):
        peer.ahead_s += 50e-6 * HEARTBEAT_S
        told = peer.beat(0.02, 0.0) or told
        assert told is not None
        assert abs(told.ahead_s - peer.ahead_s) <= told.error_s


@pytest.mark.parametrize("seed", range(20))
def test_reports_are_true_whatever_the_network_does(seed: int) -> None:
    chance = random.Random(seed)
    peer, told = Peer(chance.uniform(-DAY_S, DAY_S)), None
    for _ in range(200):
        told = peer.beat(chance.expovariate(100.0), chance.expovariate(100.0)) or told
        assert told is not None
        assert abs(told.ahead_s - peer.ahead_s) <= told.error_s
