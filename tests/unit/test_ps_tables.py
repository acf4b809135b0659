"""Tables: rows are found by id, initialized equally everywhere, updated as by torch's optimizers, and dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer_runtime.ps.arena import Arena
from trainer_runtime.ps.hashing import SLOTS, slots_of
from trainer_runtime.ps.index import ABSENT, Index
from trainer_runtime.ps.rules import SGD, Adagrad, Adam, RowWiseAdagrad, Rule, Sum, rule_of
from trainer_runtime.ps.table import Table, TablePart, TableSpec, spec_of

IDS = st.integers(-(1 << 63) + 1, (1 << 63) - 1)
NOW_S = 1_800_000_000
RULES: list[Rule] = [Sum(), SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1)]


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@settings(deadline=None)
@given(st.lists(st.sets(IDS | st.integers(0, 300), max_size=200), max_size=5))
def test_an_index_answers_as_a_dictionary(batches: list[set[int]]) -> None:
    index, known = Index(), dict[int, int]()
    for batch in batches:
        ids = ids_of(*sorted(batch))
        assert index.find(ids).tolist() == [known.get(each, ABSENT) for each in ids.tolist()]
        new = [each for each in ids.tolist() if each not in known]
        begin = len(known)
        known |= {each: begin + number for number, each in enumerate(new)}
        index.add(ids_of(*new), torch.arange(begin, len(known)))
    ids, values = index.items()
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == known
    assert index.size == len(known)


def test_an_index_grows_to_many_ids_that_share_buckets() -> None:
    index = Index()
    ids = torch.arange(100_000) * SLOTS
    for at in range(0, len(ids), 9_000):
        index.add(ids[at : at + 9_000], torch.arange(len(ids))[at : at + 9_000])
    assert torch.equal(index.find(ids), torch.arange(len(ids)))
    assert (index.find(ids + 1) == ABSENT).all()


def test_consecutive_ids_are_spread_over_the_slots() -> None:
    counts = torch.bincount(slots_of(torch.arange(100 * SLOTS)), minlength=SLOTS)
    assert len(counts) == SLOTS
    assert 50 < counts.min() <= counts.max() < 150


def test_slabs_grow_and_rows_in_several_are_read_and_written_at_once() -> None:
    slabs = Arena(3, slab_rows=4)
    slabs.reserve(11)
    rows = ids_of(10, 0, 3, 4, 7)
    slabs.write(rows, torch.arange(15.0).view(5, 3))
    assert torch.equal(slabs.read(rows), torch.arange(15.0).view(5, 3))
    slabs.write(rows, torch.zeros(5, 1))
    assert slabs.read(rows, 2)[:, 0].tolist() == [0.0] * 5
    assert slabs.read(rows, 2)[:, 1].tolist() == [1.0, 4.0, 7.0, 10.0, 13.0]


@pytest.mark.parametrize("count", [63, 64, 65, 200])
def test_any_number_of_wide_rows_is_changed_at_once(count: int) -> None:
    table = Table(TableSpec("t", 1024, SGD(0.5)))
    ids = torch.arange(count)
    before, gradients = table.pull(ids), torch.randn(count, 1024)
    table.apply(ids, gradients, NOW_S)
    torch.testing.assert_close(table.pull(ids), before - 0.5 * gradients)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_table_and_its_rule_round_trip_through_json(rule: Rule) -> None:
    spec = TableSpec("t", 4, rule, initial="normal", scale=0.5, seed=3, admit_after=2, max_rows=100)
    assert spec_of(spec.to_json()) == spec


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"name": "t", "dim": 4, "rule": {"kind": "none"}},
        {"name": "t", "dim": 0, "rule": {"kind": "sgd", "lr": 1}},
        {"name": "t", "dim": 4, "rule": {"kind": "sgd", "speed": 1}},
        {"name": "t", "dim": 4, "rule": {"kind": "sgd", "lr": 1}, "initial": "large"},
    ],
)
def test_an_invalid_description_of_a_table_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        spec_of(record)


@pytest.mark.parametrize("initial", ["zeros", "uniform", "normal"])
def test_initial_rows_depend_only_on_seed_table_and_id(initial: str) -> None:
    spec = TableSpec("t", 8, SGD(0.1), initial=initial, scale=0.5)
    ids = torch.arange(10_000)
    rows = spec.initial_rows(ids)
    assert torch.equal(spec.initial_rows(ids[7:9]), rows[7:9])
    if initial == "zeros":
        assert not rows.any()
        return
    assert abs(rows.mean()) < 0.01
    assert abs(rows.std() - (0.5 if initial == "normal" else 0.5 / 3**0.5)) < 0.01
    for other in (TableSpec("u", 8, SGD(0.1), initial, 0.5), TableSpec("t", 8, SGD(0.1), initial, 0.5, seed=1)):
        assert not torch.isclose(other.initial_rows(ids), rows).all(1).any()


Make = Callable[[nn.Parameter], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD([p], 0.1)),
        (Adagrad(0.1), lambda p: torch.optim.Adagrad([p], 0.1)),
        (Adagrad(0.1, initial_accumulator_value=0.3), lambda p: torch.optim.Adagrad([p], 0.1, 0, 0, 0.3)),
        (Adam(0.1), lambda p: torch.optim.Adam([p], 0.1)),
    ],
)
def test_rules_do_what_torch_does(rule: Rule, make: Make) -> None:
    table = Table(TableSpec("t", 5, rule))
    ids = ids_of(-3, 7, 1 << 60)
    parameter = nn.Parameter(table.pull(ids))
    optimizer = make(parameter)
    for step in range(20):
        torch.manual_seed(step)
        parameter.grad = torch.randn(3, 5)
        optimizer.step()
        table.apply(ids, parameter.grad, NOW_S)
    torch.testing.assert_close(table.pull(ids), parameter.detach())


def test_rowwise_adagrad_remembers_one_number_of_a_row() -> None:
    table = Table(TableSpec("t", 2, RowWiseAdagrad(1.0), initial="zeros"))
    table.apply(ids_of(1), torch.tensor([[3.0, 4.0]]), NOW_S)
    deviation = (12.5) ** 0.5
    torch.testing.assert_close(table.pull(ids_of(1)), torch.tensor([[-3.0, -4.0]]) / deviation)


def test_reading_stores_nothing_and_ids_may_repeat() -> None:
    table = Table(TableSpec("t", 4, SGD(1.0)))
    ids = ids_of(5, 6, 5)
    rows = table.pull(ids)
    assert len(table) == 0
    assert torch.equal(rows[0], rows[2])
    table.apply(ids_of(6), torch.ones(1, 4), NOW_S)
    assert len(table) == 1
    torch.testing.assert_close(table.pull(ids), rows - torch.tensor([[0.0], [1.0], [0.0]]))


def test_an_id_has_no_row_until_it_was_pushed_often_enough() -> None:
    table = Table(TableSpec("t", 4, SGD(1.0), admit_after=3))
    often, once = ids_of(1), ids_of(1, 2)
    assert table.admit(often).tolist() == [False]
    assert table.admit(once).tolist() == [False, False]
    assert table.admit(once).tolist() == [True, False]
    table.apply(often, torch.ones(1, 4), NOW_S)
    assert table.admit(once).tolist() == [True, True]
    assert len(table) == 1


def test_old_rows_are_dropped_and_their_memory_is_used_again() -> None:
    table = Table(TableSpec("t", 4, SGD(1.0)))
    old, new = torch.arange(100), torch.arange(100, 150)
    table.apply(old, torch.ones(100, 4), NOW_S)
    table.apply(new, torch.ones(50, 4), NOW_S + 10)
    kept = table.pull(new)
    assert table.shrink(NOW_S + 10) == 100
    assert len(table) == 50
    assert torch.equal(table.pull(new), kept)
    assert torch.equal(table.pull(old), table.spec.initial_rows(old))
    table.apply(old, torch.ones(100, 4), NOW_S + 20)
    assert torch.equal(table.pull(new), kept)
    torch.testing.assert_close(table.pull(old), table.spec.initial_rows(old) - 1)


def test_a_full_table_drops_the_rows_that_were_not_touched_for_longest() -> None:
    table = Table(TableSpec("t", 4, SGD(1.0), max_rows=10))
    for number in range(10):
        table.apply(ids_of(number), torch.ones(1, 4), NOW_S)
    table.apply(ids_of(0), torch.ones(1, 4), NOW_S)
    table.apply(ids_of(10), torch.ones(1, 4), NOW_S)
    assert len(table) == 9
    ids, *_ = table.changed_since(0)
    assert sorted(ids.tolist()) == [0, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_copied_table_trains_equally(rule: Rule) -> None:
    """All rows are copied first, then the rows that changed since."""
    torch.manual_seed(0)
    one, other = Table(TableSpec("t", 4, rule)), Table(TableSpec("t", 4, rule))
    version = 0
    for number in range(6):
        ids = torch.randint(0, 50, (20,)).unique()
        one.apply(ids, torch.randn(len(ids), 4), NOW_S + number)
        if number % 2:
            part = one.changed_since(version)
            assert isinstance(part, TablePart)
            other.put(part)
            version = one.version
    everything = torch.arange(50)
    assert torch.equal(one.pull(everything), other.pull(everything))
    for table in (one, other):
        table.apply(everything, torch.ones(50, 4), NOW_S)
    assert torch.equal(one.pull(everything), other.pull(everything))


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="no rule 'adam2'; there are sum, sgd"):
        rule_of({"kind": "adam2", "lr": 1})
