"""Models with parameters on servers: gradients behave as users of torch expect, and invalid settings are refused."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integration.ps_cluster import PATIENCE_S, Job
from torch import nn
from waiting import wait_for

from trainer_runtime.ps.client import Client
from trainer_runtime.ps.control_messages import ControlMessages
from trainer_runtime.ps.frames import RefusedError
from trainer_runtime.ps.modules import EmbeddingBag, SparseEmbedding
from trainer_runtime.ps.optimizer import DistributedOptimizer
from trainer_runtime.ps.rules import SGD
from trainer_runtime.ps.server_process import check_server_count
from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer

IDS = torch.tensor([[1, 2], [2, 3]])


@pytest.fixture
def job() -> Iterator[Job]:
    with_servers = Job(2)
    yield with_servers
    with_servers.close()


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = SparseEmbedding(2, scale=0.5)
        self.top = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(self.rows(ids).flatten(1)).sum()
        return found


def trained(client: Client, model: nn.Module, lr: float = 0.1) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.Adam(model.parameters(), lr), model, client)


def rows_only(client: Client, lr: float = 1.0) -> tuple[SparseEmbedding, DistributedOptimizer]:
    rows = SparseEmbedding(2, initial="zeros", name="rows")
    return rows, DistributedOptimizer(SGD(lr), rows, client)


def test_gradients_are_recorded_in_any_mode_and_cleared_on_request(job: Job) -> None:
    rows, optimizer = rows_only(job.client())
    rows.eval()
    rows(IDS).sum().backward()
    optimizer.step()
    assert rows(torch.tensor([2])).tolist() == [[-2.0, -2.0]], "the id occurs in both inputs"
    rows(IDS).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    with torch.no_grad():
        rows(IDS)
    assert rows(torch.tensor([2])).tolist() == [[-2.0, -2.0]]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_of_several_passes_add_up(job: Job) -> None:
    rows, optimizer = rows_only(job.client())
    both = rows(IDS).sum() + 2 * rows(torch.tensor([3])).sum()
    both.backward()
    (rows(torch.tensor([1])).sum() ** 2).backward(create_graph=True)
    optimizer.step()
    assert rows(torch.tensor([1, 2, 3]))[:, 0].tolist() == [-1.0, -2.0, -3.0]


def test_a_step_without_a_backward_pass_changes_nothing(job: Job) -> None:
    model = Net()
    optimizer = trained(job.client(), model)
    model(IDS).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [each.detach().clone() for each in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_server_without_rows_begins_with_the_parameters_of_a_worker(job: Job) -> None:
    client, model = job.client(), Net()
    optimizer = trained(client, model)
    for number in range(2):
        before = [each.detach().clone() for each in model.parameters()]
        job.kill(number)
        job.restart(number, 2)
        optimizer.zero_grad()
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))


def test_old_rows_are_dropped_and_parameters_are_not(job: Job) -> None:
    client, model = job.client(), Net()
    optimizer = trained(client, model)
    model(IDS).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [each.detach().clone() for each in model.parameters()]
    assert client.shrink(-1000) == 3
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_parameters_with_another_layout_are_refused(job: Job) -> None:
    trained(job.client(), Net(3))
    with pytest.raises(RefusedError, match=r"dense\.0: the model's parameters there have other names or shapes"):
        trained(job.client(1), Net(4))


def test_a_rule_is_for_models_without_parameters_of_their_own(job: Job) -> None:
    with pytest.raises(ValueError, match="wanted a torch optimizer, since the model has parameters"):
        DistributedOptimizer(SGD(0.1), Net(), job.client())


@pytest.mark.parametrize("ids", [torch.tensor([1.7]), torch.tensor([1], dtype=torch.uint64)], ids=["float", "uint64"])
def test_ids_are_integers(job: Job, ids: torch.Tensor) -> None:
    rows, _ = rows_only(job.client())
    with pytest.raises(TypeError, match="ids must be integers"):
        rows(ids)


def test_gradients_of_rows_and_parameters_are_clipped_together(job: Job) -> None:
    client, model = job.client(), Net()
    optimizer = trained(client, model)
    model(IDS).backward()
    found = model.rows.merged_gradients()
    assert found is not None
    gradients = [found[1], *(each.grad for each in model.parameters() if each.grad is not None)]
    expected = torch.cat([each.flatten() for each in gradients]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), expected)
    torch.testing.assert_close(torch.cat([each.flatten() for each in gradients]).norm(), torch.tensor(0.5))


def test_padding_is_zeros_counts_nowhere_and_is_not_trained(job: Job) -> None:
    bags = EmbeddingBag(2, mode="mean", initial="uniform", scale=1.0, padding_idx=0)
    optimizer = DistributedOptimizer(SGD(1.0), bags, job.client())
    alone = nn.EmbeddingBag(4, 2, mode="mean", padding_idx=0)
    with torch.no_grad():
        alone.weight.copy_(torch.cat([torch.zeros(1, 2), bags(torch.arange(1, 4).view(-1, 1))]))
    ids = torch.tensor([[1, 0, 3], [0, 0, 2]])
    torch.testing.assert_close(bags(ids), alone(ids))
    bags(ids).sum().backward()
    alone(ids).sum().backward()
    optimizer.step()
    assert alone.weight.grad is not None
    torch.testing.assert_close(bags(torch.arange(1, 4).view(-1, 1)), (alone.weight - alone.weight.grad)[1:].detach())


def test_bags_may_be_empty_and_offsets_have_an_end(job: Job) -> None:
    bags = EmbeddingBag(2, mode="sum", include_last_offset=True, initial="zeros")
    DistributedOptimizer(SGD(1.0), bags, job.client())
    assert bags(torch.empty(3, 0, dtype=torch.int64)).tolist() == [[0.0, 0.0]] * 3
    assert bags(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).shape == (2, 2)


def test_a_copy_of_a_model_has_no_rows_on_servers(job: Job) -> None:
    model = Net()
    trained(job.client(), model)
    with pytest.raises(RuntimeError, match="has no rows on the servers yet"):
        copy.deepcopy(model)(IDS)


def test_a_table_may_be_shared_within_a_model(job: Job) -> None:
    towers = nn.ModuleList([SparseEmbedding(2, name="words", initial="zeros") for _ in range(2)])
    optimizer = DistributedOptimizer(SGD(1.0), towers, job.client())
    sum(tower(IDS).sum() for tower in towers).backward()
    optimizer.step()
    assert towers[0](torch.tensor([2])).tolist() == towers[1](torch.tensor([2])).tolist() == [[-4.0, -4.0]]


def test_invalid_settings_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="dim must be from 1"):
        SparseEmbedding(0)


def test_any_error_while_applying_a_map_is_reported() -> None:
    """A server that cannot load its rows must not serve a shard without them."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors: list[Exception] = []

    def fail(_map: ShardMap) -> None:
        raise FileNotFoundError("/typo")

    ControlMessages(there.detach(), fail, errors.append).start()
    shard_map = ShardMap(1, (ShardPlace(1, ShardServer(0, 1)),))
    here.send(json.dumps({"map": shard_map.to_json()}).encode())
    wait_for(lambda: errors, "the error", PATIENCE_S)
    here.close()
    assert isinstance(errors[0], FileNotFoundError)


def test_another_number_of_servers_does_not_start_without_the_existing_rows(tmp_path: Path) -> None:
    (tmp_path / "shard-0-of-2").mkdir()
    check_server_count(tmp_path, 2)
    with pytest.raises(RuntimeError, match="has the rows of 2 servers, and there are 3 now"):
        check_server_count(tmp_path, 3)
