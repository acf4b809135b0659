"""Parameter-server jobs under faults: nothing that was answered is lost, and the job goes on and ends."""

from __future__ import annotations

import os

import pytest
from simulation.roles import play

_JOBS = int(os.environ.get("SIMULATE_ROLE_JOBS", "200"))
_CHUNK = 50


@pytest.mark.parametrize("first", range(0, _JOBS, _CHUNK))
def test_whatever_happens_nothing_that_was_answered_is_lost(first: int) -> None:
    """Faults for 400 events; once they end, all servers and their copies are there, and the job ends."""
    for seed in range(first, first + _CHUNK):
        play(seed)


@pytest.mark.parametrize("first", range(0, _JOBS, _CHUNK))
def test_what_etcd_has_lost_is_written_again(first: int) -> None:
    for seed in range(first, first + _CHUNK):
        play(seed, wipes=True)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(27, id="a-record-that-lands-late"),
        pytest.param(39, id="a-map-that-names-who-has-no-record"),
        pytest.param(14, id="an-own-worker-that-nobody-waits-for"),
        pytest.param(219, id="an-outage-that-ends-all-leases"),
        pytest.param(410, id="an-agent-that-begins-after-an-outage"),
        pytest.param(537, id="a-registration-that-lands-late"),
        pytest.param(1072, id="an-old-map-takes-a-new-copy"),
        pytest.param(1592, id="an-old-map-takes-another-copy"),
    ],
)
def test_what_was_found_stays_mended(seed: int) -> None:
    play(seed)
    play(seed, events=300)


def test_a_seed_gives_the_same_job_again() -> None:
    assert play(7).digest() == play(7).digest() != play(8).digest()
