"""A training on three nodes, with three members of etcd, is broken in its middle; what counts is its result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.checks import Reference, finish
from chaos.cluster import Cluster
from chaos.faults import FAULTS
from chaos.play import play

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

SOME = ("cut-off", "etcd-leader-killed", "checkpoint-flipped")
"""The others run with `scripts/chaos --all`. Of these, `test_recovery.py` and `test_checkpoint_faults.py` in
`tests/integration` kill ranks and fill a disk, and `test_compose.py` replaces a node."""


@pytest.fixture
def cluster(image: None, tmp_path: Path) -> Iterator[Cluster]:  # noqa: ARG001 - has to be there first
    with Cluster(tmp_path / "ledger") as cluster:
        yield cluster


def test_faults_one_after_the_other_change_no_bit_of_the_result(cluster: Cluster, tmp_path: Path) -> None:
    reference = Reference(tmp_path / "reference")
    for name in SOME:
        outcome = play(cluster, FAULTS[name], 0, reference)
        print(f"{name}: {outcome.pauses_s} s without a step, {outcome.lost} lost")
        assert outcome.is_right, f"{outcome}\n{cluster.log_text()[-6000:]}"
    assert finish(cluster, reference) == [], cluster.log_text()[-6000:]
