"""Constraints of the configuration: which values are refused, and with which message."""

from __future__ import annotations

import pytest

from agent.config import HangConfig, SnapshotConfig, TimingConfig, TimingOverrides, parse_bytes, parse_np
from agent.errors import ConfigError
from agent.store.keys import check_id


@pytest.mark.parametrize(("text", "wanted"), [("2", (2, 2)), ("1:3", (1, 3)), (" 4 ", (4, 4)), ("2:2", (2, 2))])
def test_np_is_n_or_min_max(text: str, wanted: tuple[int, int]) -> None:
    assert parse_np(text) == wanted


@pytest.mark.parametrize(
    "text", ["0", "-1", "3:1", "0:2", "", "x", "1:", ":2", "1:2:3", "1.5", "+2", "1_0", "\u0662", "100001"]
)
def test_a_bad_np_is_refused_in_one_line_that_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"N or MIN:MAX with 1 <= MIN <= MAX") as caught:
        parse_np(text)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


def test_an_np_of_400_digits_is_not_shown_whole() -> None:
    with pytest.raises(ConfigError, match=f"not '{'9' * 40}'$"):
        parse_np("9" * 400)


@pytest.mark.parametrize("value", ["", "a/b", "a b", "x" * 129, "..", "ü"])
def test_a_bad_id_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        check_id("--job_id", value)


def test_the_lease_ends_within_the_time_promised() -> None:
    for detect_within_s in (2.5, 3.0, 5.0, 7.5, 60.0):
        timing = TimingConfig(detect_within_s=detect_within_s)
        assert 2.0 <= timing.lease_ttl_s <= detect_within_s - 0.5
        assert timing.settle_s < timing.lease_ttl_s


@pytest.mark.parametrize("value", [2.4, 0.0, -1.0, float("nan"), float("inf")])
def test_a_detection_time_below_etcds_shortest_lease_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="--detect_within"):
        TimingConfig(detect_within_s=value)


def test_each_duration_can_be_chosen_alone() -> None:
    chosen = TimingConfig(
        detect_within_s=10.0, overrides=TimingOverrides(lease_ttl_s=6.0, link_heartbeat_s=0.25, settle_s=0.0)
    )
    shown = chosen.effective
    assert (shown.lease_ttl_s, shown.link_heartbeat_s, shown.settle_s) == (6.0, 0.25, 0.0)
    assert TimingConfig(detect_within_s=10.0, overrides=TimingOverrides(lease_ttl_s=6.0)).settle_s == 2.0


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (TimingOverrides(lease_ttl_s=1.0), "--lease"),
        (TimingOverrides(lease_ttl_s=3.5), "--lease"),
        (TimingOverrides(lease_ttl_s=5.0), "--lease must be at most --detect_within"),
        (TimingOverrides(link_heartbeat_s=0.0), "--link_heartbeat"),
        (TimingOverrides(link_heartbeat_s=1.5), "--link_heartbeat"),
        (TimingOverrides(settle_s=-1.0), "--settle"),
        (TimingOverrides(settle_s=float("nan")), "--settle"),
    ],
)
def test_durations_that_break_a_law_are_refused(overrides: TimingOverrides, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TimingConfig(overrides=overrides)


def test_hangs_are_watched_for_by_what_is_usual_unless_a_time_is_given() -> None:
    assert HangConfig() == HangConfig(timeout_s=None, floor_s=60.0, factor=50.0, first_s=3600.0)
    assert HangConfig(timeout_s=0.0).timeout_s == 0.0


@pytest.mark.parametrize(
    ("laws", "named"),
    [
        ({"timeout_s": -1.0}, "--hang_timeout"),
        ({"timeout_s": float("nan")}, "--hang_timeout"),
        ({"timeout_s": float("inf")}, "--hang_timeout"),
        ({"floor_s": 0.0}, "--hang_floor"),
        ({"factor": 0.9}, "--hang_factor"),
        ({"first_s": 59.0}, "--hang_first must be at least --hang_floor"),
    ],
)
def test_what_could_be_no_limit_is_refused(laws: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HangConfig(**laws)


def test_snapshots_may_take_a_hundredth_of_the_time_unless_a_share_is_given() -> None:
    assert SnapshotConfig() == SnapshotConfig(overhead_percent=1.0, memory_bytes=None)
    assert SnapshotConfig().is_enabled
    assert not SnapshotConfig(0.0).is_enabled


@pytest.mark.parametrize("percent", [-0.1, 100.1, float("nan"), float("inf")])
def test_what_is_no_share_is_refused(percent: float) -> None:
    with pytest.raises(ConfigError, match="--snapshot_overhead must be from 0"):
        SnapshotConfig(percent)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("500M", 500 << 20), ("8g", 8 << 30), ("1.5 GiB", 3 << 29), ("2kB", 2048), (None, None)],
)
def test_sizes_are_given_with_units(text: str | None, size: int | None) -> None:
    assert parse_bytes("--snapshot_memory", text) == size


@pytest.mark.parametrize("text", ["", "8X", "G", "-1G", "0", "half", "1e9", "8 GB free"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--snapshot_memory must be a number of bytes, for example 500M or 8G, not"):
        parse_bytes("--snapshot_memory", text)
