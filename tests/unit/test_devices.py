"""Which GPUs a node's ranks use, and how many ranks are started for them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.workers.devices import choose, count_ranks, gpus_of_rank

FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """An environment in which a driver lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aaaa, 00000000:3B:00.0'\necho '1, GPU-bbbb, 00000000:5E:00.0'\n")
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


NOBODY = {"PATH": "/nowhere"}


@pytest.mark.parametrize(
    ("asked", "visible", "chosen"),
    [
        (None, "0,1,2,3", ("0", "1", "2", "3")),
        ("0", "0,1,2,3", ("0",)),
        ("3,1", "0,1,2,3", ("3", "1")),
        ("1, 3", "0,1,2,3", ("1", "3")),
        ("7", "5,7", ("7",)),
        ("GPU-x", "GPU-x,GPU-y", ("GPU-x",)),
        (None, "", ()),
        (None, "-1", ()),
        (None, "0,-1,2", ("0",)),
    ],
)
def test_gpus_are_chosen_among_the_visible_ones(asked: str | None, visible: str, chosen: tuple[str, ...]) -> None:
    assert choose(asked, {"CUDA_VISIBLE_DEVICES": visible}) == chosen


@pytest.mark.parametrize(
    ("asked", "visible", "words"),
    [
        ("4", "0,1", "there is no GPU '4'; CUDA_VISIBLE_DEVICES has 0,1"),
        ("0", "", "there is no GPU '0'; CUDA_VISIBLE_DEVICES has none"),
        ("0,0", "0,1", "one is named twice"),
        ("0,", "0,1", "there is no GPU ''"),
    ],
)
def test_a_missing_gpu_is_refused_and_the_existing_ones_are_listed(asked: str, visible: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(asked, {"CUDA_VISIBLE_DEVICES": visible})
    assert f"--gpus={asked}: {words}" in str(refused.value)


def test_without_the_variable_the_driver_lists_the_gpus(driver: dict[str, str]) -> None:
    assert choose("1", driver) == ("1",)
    assert choose("GPU-bbbb,0", driver) == ("GPU-bbbb", "0")
    assert choose(None, driver) == (), "all that are found need not be named"
    with pytest.raises(ConfigError, match=r"no GPU '2'; the driver lists 0,GPU-aaaa,1,GPU-bbbb"):
        choose("2", driver)
    with pytest.raises(ConfigError, match=r"no GPU '0'; the driver lists none"):
        choose("0", NOBODY)


def test_there_is_a_rank_for_each_gpu_and_one_without(driver: dict[str, str]) -> None:
    assert count_ranks(None, ("0", "1", "2", "3"), FOUR) == 4
    assert count_ranks(None, (), driver) == 2
    assert count_ranks(None, (), {**driver, "CUDA_VISIBLE_DEVICES": ""}) == 1
    assert count_ranks(None, (), NOBODY) == 1


def test_torchruns_words_for_the_number_of_ranks(driver: dict[str, str]) -> None:
    assert count_ranks("gpu", ("0",), FOUR) == 1
    assert count_ranks("gpu", (), driver) == count_ranks("auto", (), driver) == 2
    assert count_ranks("cpu", (), driver) == count_ranks("auto", (), NOBODY) == os.cpu_count()
    with pytest.raises(ConfigError, match=r"nproc_per_node=gpu: there is no GPU"):
        count_ranks("gpu", (), NOBODY)


@pytest.mark.parametrize("asked", ["1", "2", "4"])
def test_gpus_are_divided_evenly(asked: str) -> None:
    assert count_ranks(asked, ("0", "1", "2", "3"), FOUR) == int(asked)


@pytest.mark.parametrize("asked", ["3", "5", "8"])
def test_a_number_that_does_not_divide_the_gpus_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=rf"={asked} does not divide the GPUs 0,1,2,3 evenly: give 1, 2, 4, or"):
        count_ranks(asked, ("0", "1", "2", "3"), FOUR)


def test_without_selected_gpus_any_number_is_accepted(driver: dict[str, str]) -> None:
    """Also if there are GPUs that were not selected: torchrun's user starts three ranks on a machine with eight."""
    assert count_ranks("3", (), NOBODY) == count_ranks("3", (), driver) == 3


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "+2", "10001", "\u0662"])
def test_an_invalid_number_is_refused(asked: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"at least 1 and at most 10000, or gpu, cpu or auto, not {re.escape(asked)}"
    ):
        count_ranks(asked, (), NOBODY)


def test_a_rank_gets_the_indices_of_its_own_gpus() -> None:
    seen = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [gpus_of_rank(seen, 4, local) for local in range(4)] == ["0", "1", "2", "3"]
    assert [gpus_of_rank(seen, 2, local) for local in range(2)] == ["0,1", "2,3"]
    assert gpus_of_rank({}, 2, 0) == gpus_of_rank({"CUDA_VISIBLE_DEVICES": ""}, 2, 0) == ""
