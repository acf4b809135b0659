"""The package as the agent and a training script see it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import trainer_runtime as tr
from trainer_runtime import dist

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_reading_the_contract_does_not_import_torch() -> None:
    """The agent reads it and must stay small."""
    check = "import sys, trainer_runtime.contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in tr.__all__:
        assert getattr(tr, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sate'"):
        tr.sate  # noqa: B018


def test_rank_without_a_group_says_what_to_do() -> None:
    check = "import trainer_runtime as tr; tr.rank()"
    done = subprocess.run([sys.executable, "-c", check], check=False, capture_output=True, text=True)
    assert "call trainer_runtime.init() first" in done.stderr


@pytest.mark.parametrize(
    ("devices", "environment", "backend"),
    [
        (0, {"LOCAL_WORLD_SIZE": "4"}, "gloo"),
        (4, {"LOCAL_WORLD_SIZE": "4"}, "nccl"),
        (1, {}, "nccl"),
        (1, {"LOCAL_WORLD_SIZE": "2"}, "gloo"),  # NCCL refuses two ranks on one GPU
    ],
)
def test_backend_by_devices(
    monkeypatch: pytest.MonkeyPatch, devices: int, environment: Mapping[str, str], backend: str
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert dist._own_backend() == backend


@pytest.mark.parametrize(
    ("choices", "agreed", "said"),
    [
        ("nccl:a nccl:b nccl:c", "nccl", ""),
        ("gloo:a gloo:a gloo:c", "gloo", ""),
        ("nccl:a gloo:b gloo:c", "gloo", "2 of 3 have no GPU of their own, rank 1 for one"),
        ("gloo:a nccl:b nccl:c", "gloo", "1 of 3 have no GPU of their own, rank 0 for one"),
        ("nccl:a nccl:b nccl:b", "gloo", "ranks 1 and 2 share the GPU b, which NCCL refuses"),
    ],
)
def test_all_ranks_agree_on_the_backend_and_one_reports_what_was_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], choices: str, agreed: str, said: str
) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # as in trainer_runtime.dist
    monkeypatch.setenv(dist.contract.RANKS_KEY, "key")
    own = [choice.split(":") for choice in choices.split()]
    for rank, (backend, gpu) in enumerate(own):
        store.set(f"trainer_runtime/backend/{rank}", f"{backend} {gpu}")
    for rank, (backend, gpu) in enumerate(own):
        monkeypatch.setattr(dist, "_own_backend", lambda backend=backend: backend)
        monkeypatch.setattr(dist, "_own_gpu", lambda gpu=gpu if backend == "nccl" else "": gpu)
        assert dist._agree_on_backend(store, rank, 3) == agreed
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_ranks_that_each_see_another_gpu_use_nccl_and_others_are_told_why_they_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script sets CUDA_VISIBLE_DEVICES for each rank. Only under an agent the names of the GPUs are exchanged."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def agree(*gpus: str) -> list[str]:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # as in trainer_runtime.dist
        for rank in (0, 1):  # each waits for both
            store.set(f"trainer_runtime/backend/{rank}", f"nccl {gpus[rank]}" if gpus else f"gloo {dist._few_gpus()}")
        agreed = []
        for rank in (1, 0):
            properties = SimpleNamespace(uuid=gpus[rank]) if gpus else SimpleNamespace()
            monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device, found=properties: found)
            agreed.append(dist._agree_on_backend(store, rank, 2))
        return agreed

    monkeypatch.setenv(dist.contract.RANKS_KEY, "key")
    assert agree("GPU-a", "GPU-b") == ["nccl", "nccl"]
    assert agree("GPU-a", "GPU-a") == ["gloo", "gloo"]
    assert "all ranks use gloo: ranks 0 and 1 share the GPU GPU-a" in capsys.readouterr().err
    monkeypatch.delenv(dist.contract.RANKS_KEY)
    assert agree() == ["gloo", "gloo"]
    assert "all ranks use gloo: the 2 ranks of a node see 1 GPU; let each see all" in capsys.readouterr().err


@pytest.mark.parametrize(("local_rank", "index"), [("0", 0), ("1", 1), ("2", 0), ("5", 1)])
def test_devices_are_shared_when_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, index: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(tr.device()) == f"cuda:{index}"


@pytest.mark.parametrize(("nproc", "index"), [("2", 4), ("4", 2), ("3", 1), ("8", 1)])
def test_devices_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch, nproc: str, index: int) -> None:
    """The second rank's first one, of eight."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", nproc)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert str(tr.device()) == f"cuda:{index}"
