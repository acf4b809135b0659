"""The result of training with parameter servers, compared with one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import some
from integration import ps_bags
from integration.conftest import PATIENCE_S, ROOT
from integration.test_ps_job import running

from trainer_runtime.ps.rules import Sum
from trainer_runtime.ps.table import TableSpec

CTR = ROOT / "examples" / "train_ctr.py"


@pytest.mark.parametrize("workers", some([4], of=[1, 4]))
def test_common_steps_end_with_what_one_process_ends_with(tmp_path: Path, workers: int) -> None:
    """Up to the order of floating-point sums."""
    line = ("--server_num=2", f"--worker_num={workers}", ps_bags.__file__, tmp_path)
    with running(tmp_path, *line) as node:
        assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
    rows = TableSpec(dim=ps_bags.DIM, rule=Sum(), **ps_bags.SETTINGS).initial_rows(torch.arange(ps_bags.IDS))
    expected = ps_bags.trained(rows)
    assert not torch.allclose(expected[0], rows, atol=0.1), "training has changed the rows"
    for found, wanted in zip(torch.load(tmp_path / "found.pt"), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_all_modes_come_to_the_same_quality(tmp_path: Path) -> None:
    found = {}
    for mode in ("sync", "async", "bounded", "geo"):
        directory = tmp_path / mode
        directory.mkdir()
        with running(directory, "--server_num=2", "--worker_num=2", CTR, f"--mode={mode}") as node:
            assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
            match = re.search(r"^AUC (0\.\d+)$", node.output_of("workerlog.0"), re.MULTILINE)
        assert match, node.output.read_text()
        found[mode] = float(match[1])
    assert max(found.values()) - min(found.values()) < 0.005, found
    assert min(found.values()) > 0.835, found
