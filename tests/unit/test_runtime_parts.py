"""What differs from rank to rank: it comes back to its rank, and after a resize there is a rule for each kind."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer_runtime as tr
from trainer_runtime.contents import Contents
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.parts import is_stateful_loader
from trainer_runtime.random_states import RandomStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# torch.compile's own import uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@pytest.fixture(autouse=True)
def _own_random_states() -> Iterator[None]:
    """Leave the other tests' randomness alone."""
    states = RandomStates({})
    before = states.read()
    yield
    states.load(before)


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),  # keeps every second number for later
    "numpy": lambda: np.random.rand(3).tolist(),  # noqa: NPY002 - the global state is what scripts use
    "numpy normal": lambda: float(np.random.randn()),  # noqa: NPY002
    "torch": lambda: torch.rand(3).tolist(),
    "dropout": lambda: nn.functional.dropout(torch.ones(64)).tolist(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_random_state_goes_on_where_it_was(draw: Callable[[], object]) -> None:
    """Also after a way through a checkpoint, and from within a pair of normal numbers."""
    states = RandomStates({})
    draw()
    saved = through_a_file(states.read())
    expected = [draw() for _ in range(3)]
    states.load(saved)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_after_a_resize_randomness_follows_from_seed_step_and_rank(draw: Callable[[], object]) -> None:
    states = RandomStates({})

    def drawn(seed: int, step: int, rank: int) -> object:
        states.derive(seed, step, rank)
        return draw()

    assert drawn(0, 10, 1) == drawn(0, 10, 1)
    all_of_them = [drawn(0, 10, 1), drawn(1, 10, 1), drawn(0, 11, 1), drawn(0, 10, 2), drawn(2**64 - 1, 10, 1)]
    assert len({str(each) for each in all_of_them}) == 5


def through_a_file(value: Any) -> Any:  # noqa: ANN401 - whatever it is
    """Save and load as a checkpoint is."""
    file = io.BytesIO()
    torch.save(HostCopier().copy(value), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def of_ranks(make: Callable[[int], Contents], world: int) -> list[dict[str, Any]]:
    """Return what a world of ranks would save."""
    return [through_a_file(make(rank).parts.read()) for rank in range(world)]


def with_norm(rank: int) -> Contents:
    """A rank whose layers have seen other samples than those of other ranks."""
    model = nn.Sequential(
        nn.Linear(1, 2), nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    )
    with torch.no_grad():
        model[1][0].running_mean.fill_(rank)
        model[1][0].num_batches_tracked.fill_(10 + rank)
    return Contents({"model": model})


def test_running_statistics_are_each_ranks_own() -> None:
    parts = of_ranks(with_norm, 2)
    mine = with_norm(7)
    mine.parts.load(parts, 1, 2, seed=0, step=0)
    layer = mine.get("model")[1][0]
    assert (layer.running_mean.tolist(), int(layer.num_batches_tracked)) == ([1, 1], 11)


def test_running_statistics_do_not_depend_on_the_wrapping() -> None:
    parts = of_ranks(with_norm, 1)
    mine = with_norm(7)
    compiled = torch.compile(mine.get("model"))
    Contents({"model": compiled}).parts.load(parts, 0, 1, seed=0, step=0)
    assert mine.get("model")[1][0].running_mean.tolist() == [0, 0]


def test_after_a_resize_running_statistics_are_those_of_the_common_part() -> None:
    parts = of_ranks(with_norm, 2)
    mine = with_norm(7)
    mine.load(with_norm(0).read(), parts[0])
    mine.parts.load(parts, 1, 3, seed=0, step=0)
    assert mine.get("model")[1][0].running_mean.tolist() == [0, 0]


class Counter:
    """An object with a state."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    ("rank", "had", "world", "at", "said"),
    [
        (1, 2, 2, 101, ""),
        (1, 2, 3, 101, ""),
        (2, 2, 3, 7, "rank 2 is new (the checkpoint has 2): its counter begins as the script made it"),
        (0, 3, 2, 100, "the checkpoint has 3 ranks, this world 2: counter of the others is left out"),
        (1, 3, 2, 101, ""),
    ],
)
def test_a_per_rank_object_comes_back_to_its_rank(
    capsys: pytest.CaptureFixture[str], rank: int, had: int, world: int, at: int, said: str
) -> None:
    def make(rank: int) -> Contents:
        return Contents({"counter": tr.PerRank(Counter(100 + rank))})

    counter = Counter(7)
    Contents({"counter": tr.PerRank(counter)}).parts.load(of_ranks(make, had), rank, world, seed=0, step=0)
    assert counter.at == at
    assert capsys.readouterr().err == (f"trainer_runtime: {said}\n" if said else "")


def test_a_process_that_is_new_in_an_older_state_begins_as_the_script_made_it() -> None:
    """It has trained as rank 1, and its group goes on from a state of one rank."""
    counter = Counter(7)
    mine = Contents({"counter": tr.PerRank(counter)})
    alone = of_ranks(lambda rank: Contents({"counter": tr.PerRank(Counter(100 + rank))}), 1)
    mine.note_given()
    mine.parts.load(alone, 1, 2, seed=0, step=0)
    assert counter.at == 7
    counter.at = 50
    mine.note_given()
    mine.parts.load(alone, 1, 2, seed=0, step=0)
    assert counter.at == 7


def test_a_generator_is_each_ranks_own_and_derived_after_a_resize() -> None:
    def make(rank: int) -> Contents:
        return Contents({"chance": torch.Generator().manual_seed(rank)})

    parts = of_ranks(make, 2)
    mine = make(9)
    mine.parts.load(parts, 1, 2, seed=0, step=0)
    assert mine.get("chance").initial_seed() == 1
    seeds = []
    for rank in range(3):
        mine.parts.load(parts, rank, 3, seed=0, step=5)
        seeds.append(mine.get("chance").initial_seed())
    assert len({*seeds, 0, 1, 9}) == 6


def test_a_per_rank_object_is_reached_by_its_name_and_not_replaced() -> None:
    counter = Counter()
    contents = Contents({"counter": tr.PerRank(counter)})
    assert contents.get("counter") is counter
    assert contents.holds(counter)
    with pytest.raises(AttributeError, match="load into it instead of replacing it"):
        contents.set("counter", Counter())


def test_only_what_has_a_state_can_be_per_rank() -> None:
    with pytest.raises(TypeError, match="PerRank wants an object with state_dict and load_state_dict, got int"):
        tr.PerRank(3)  # type: ignore[arg-type]


def test_a_per_rank_value_that_could_not_be_loaded_is_refused_by_its_key() -> None:
    counter = Counter()
    counter.at = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"State cannot save counter\['at'\]: .* got builtins.object"):
        Contents({"counter": tr.PerRank(counter)}).parts.read_checked()


def test_torchdatas_loader_is_per_rank_without_being_marked() -> None:
    """It is told by its module, for torchdata need not be there."""

    class Loader(Counter):
        pass

    Loader.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"
    loader = Loader(3)
    assert is_stateful_loader(loader)
    assert not is_stateful_loader(Counter())
    contents = Contents({"loader": loader})
    assert contents.read() == {}
    assert contents.parts.read()["objects"] == {"loader": {"at": 3}}


def test_a_state_of_other_per_rank_names_is_refused() -> None:
    saved = Contents({"a": tr.PerRank(Counter())}).parts.read()
    with pytest.raises(ValueError, match=r"holds \['a'\] for each rank, this State is made of \['b'\] for each rank"):
        Contents({"b": tr.PerRank(Counter())}).load({}, saved)


def test_a_copy_shares_storages_as_the_original_does() -> None:
    """So tied weights are copied, and written, once."""
    one = torch.arange(6.0)
    copied = HostCopier().copy({"one": one, "again": [one, one.view(2, 3).T], "tied": nn.Parameter(one)})
    again, transposed = copied["again"]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (copied["one"], again, transposed, copied["tied"])}
    assert len(addresses) == 1
    one += 1
    assert copied["one"].tolist() == [0, 1, 2, 3, 4, 5]
    assert transposed.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert isinstance(copied["tied"], nn.Parameter)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, requires_grad=True) * 2,
        torch.tensor(3),
        torch.empty(0),
    ],
    ids=["sparse", "conjugate", "not a leaf", "scalar", "empty"],
)
def test_a_copy_is_equal_and_loads_back(value: torch.Tensor) -> None:
    torch.testing.assert_close(through_a_file(value), value, rtol=0, atol=0)


def test_a_copy_of_a_container_does_not_change_with_it() -> None:
    value = {"list": [1, ("a", {"b": None})], "bytes": bytearray(b"c")}
    copied = HostCopier().copy(value)
    expected = str(value)
    value["list"][1][1]["b"] = 3  # type: ignore[index]
    value["bytes"][0] = 0  # type: ignore[index]
    assert str(copied) == expected


def test_a_modules_state_keeps_the_versions_of_its_parts() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert HostCopier().copy(state)._metadata == state._metadata  # type: ignore[attr-defined]
