"""The comparison of the records of two runs."""

from __future__ import annotations

from typing import Any

import pytest

from agent.rehearse.comparison import RunComparison, compare, compare_resized
from agent.rehearse.records import LatePart, ObjectRecord, StepRecord
from agent.rehearse.reference import Difference, Reference, find_ignored, find_nondeterminism

LOST = {
    "opt": ObjectRecord("optimizer", "Adam", "opt", is_in_state=False, digest=""),
    "sched": ObjectRecord("scheduler", "StepLR", "sched", is_in_state=False, digest=""),
    "scaler": ObjectRecord("scaler", "GradScaler", "scaler", is_in_state=False, digest=""),
    "noise": ObjectRecord("generator", "Generator", "noise", is_in_state=False, digest=""),
}


def seen(name: str, mark: str, *, is_in_state: bool = False) -> ObjectRecord:
    before = LOST[name]
    return ObjectRecord(before.kind, before.type, before.name, is_in_state, mark)


def line(number: int, rank: int = 0, count: int | None = None, **changes: Any) -> StepRecord:  # noqa: ANN401 - of any field
    """A step of an undisturbed script with epochs of ten steps."""
    usual: dict[str, Any] = {
        "count": count or number,
        "step": number,
        "state_epoch": (number - 1) // 10,
        "epoch": (number - 1) // 10,
        "epoch_name": "epoch",
        "world": 2,
        "losses": [1.0 / number + 0.1 * rank],
        "inputs": [f"inputs {number} {rank}"],
        "rows": [f"row {number} {rank} {place}" for place in range(4)],
        "weights": f"weights {number}",
        "buffers": f"buffers {number} {rank}",
        "random": {"torch": f"torch {number}", "Python": "unused"},
        "objects": [seen(name, f"{name} {number}") for name in LOST],
        "model": "model",
    }
    return StepRecord(**usual | changes)


REFERENCE = Reference({rank: [line(step, rank) for step in range(1, 41)] for rank in (0, 1)})


def after_restart(first: int = 21, last: int = 30, **changes: Any) -> dict[int, list[StepRecord]]:  # noqa: ANN401 - same
    """The records of a restarted group, all of them with the same `changes`."""
    return {
        rank: [line(step, rank, count=step - first + 1, **changes) for step in range(first, last + 1)]
        for rank in (0, 1)
    }


def compared(ranks: dict[int, list[StepRecord]], resumed: int = 20) -> RunComparison:
    return compare(REFERENCE, ranks, resumed, is_first_fault=True)


def kinds(found: RunComparison) -> list[str]:
    return [difference.kind for difference in found.differences]


def test_equal_records_show_no_difference() -> None:
    assert compared(after_restart()) == RunComparison(21, 30)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("opt", "optimizer"), ("sched", "scheduler"), ("scaler", "scaler"), ("noise", "random state")],
)
def test_an_object_that_begins_with_another_state_is_the_only_cause(name: str, kind: str) -> None:
    """Weights, losses and inputs that differ later are consequences."""
    ranks = after_restart(weights="other", losses=[9.0], inputs=["other"])
    for lines in ranks.values():
        lines[0] = line(21, objects=[seen(each, f"{each} 21" if each != name else "new") for each in LOST])
    ranks[1][0] = ranks[0][0]
    found = compare(REFERENCE, {0: ranks[0]}, 20, is_first_fault=True)
    assert kinds(found) == [kind]
    assert found.differences[0].step == 21
    assert found.differences[0].object == seen(name, "new")
    assert found.loss_from == 22


def kept(kind: str, mark: str, *, is_persistent: bool = True) -> ObjectRecord:
    return ObjectRecord(kind, "AveragedModel", "ema", is_in_state=False, digest=mark, is_persistent=is_persistent)


@pytest.mark.parametrize(
    ("kind", "changes", "is_persistent", "is_named"),
    [
        ("module", True, True, True),
        ("module", False, True, True),
        ("tensor", True, True, True),
        ("tensor", False, True, False),
        ("tensor", True, False, False),
    ],
)
def test_tensor_owners_are_compared(kind: str, changes: bool, is_persistent: bool, is_named: bool) -> None:  # noqa: FBT001 - a table
    """A module always, a variable only if its tensors change in place in the undisturbed run."""
    steps = range(1, 31)
    marks = {step: str(step if changes else 0) for step in steps}
    reference = Reference(
        {0: [line(step, objects=[kept(kind, marks[step], is_persistent=is_persistent)]) for step in steps]}
    )
    found = compare(reference, {0: [line(21, objects=[kept(kind, "new")])]}, 20, is_first_fault=True)
    assert kinds(found) == ([kind] if is_named else [])


def test_modules_that_differ_between_undisturbed_runs_are_not_compared() -> None:
    """Such as a module that counts seconds."""
    ranks = {0: [line(step, objects=[kept("module", f"{step}")]) for step in range(1, 31)]}
    again = {0: [line(1, objects=[kept("module", "other")])]}
    reference = Reference(ranks)
    reference.ignored = find_ignored(reference, again)
    found = compare(reference, {0: [line(21, objects=[kept("module", "new")])]}, 20, is_first_fault=True)
    assert found.differences == ()


@pytest.mark.parametrize("is_complete", [True, False])
def test_inputs_for_a_second_optimizer_are_compared_once_the_step_is_complete(is_complete: bool) -> None:  # noqa: FBT001 - a table
    reference = Reference(
        {0: [line(step, late=LatePart([1.0], ["its own"], is_complete=True)) for step in range(1, 31)]}
    )
    other = line(21, late=LatePart([2.0], ["others"], is_complete=is_complete))
    found = compare(reference, {0: [other]}, 20, is_first_fault=True)
    assert (kinds(found), found.loss_from) == ((["data position"], 21) if is_complete else ([], None))


def test_objects_in_state_are_not_reported_if_another_cause_explains_the_difference() -> None:
    objects = [seen("opt", "new"), seen("sched", "new", is_in_state=True)]
    assert kinds(compared(after_restart(objects=objects))) == ["optimizer"]


def test_objects_in_state_are_reported_if_no_other_cause_explains_the_difference() -> None:
    assert kinds(compared(after_restart(objects=[seen("sched", "new", is_in_state=True)]))) == ["scheduler"]


def test_samples_of_another_step_are_a_lost_data_position() -> None:
    """The step to which the samples belong is reported."""
    ranks = {0: [line(21, inputs=["inputs 11 0"], losses=[3.0], random={"torch": "others"})]}
    found = compared(ranks)
    assert found.differences == (Difference("data position", 21, detail="step 21 is given the samples of step 11"),)
    assert found.loss_from == 21


def test_an_epoch_count_that_starts_again_explains_the_data() -> None:
    found = compared(after_restart(epoch=0, inputs=["others"]))
    assert kinds(found) == ["epoch"]
    assert "`epoch` is 0 at step 21, in the undisturbed run it is 2" in found.differences[0].detail


def test_other_random_numbers_alone_are_a_lost_random_state() -> None:
    found = compared(after_restart(random={"torch": "others", "Python": "other, but nobody draws from it"}))
    assert found.differences[0] == Difference("random state", 21, detail="torch")


def test_other_weights_mean_that_the_model_was_not_saved() -> None:
    assert kinds(compared(after_restart(weights="new"))) == ["model"]


def test_running_averages_of_one_rank_belong_to_the_model() -> None:
    ranks = {0: [line(21)], 1: [line(21, 1, buffers="those of rank 0")]}
    found = compared(ranks)
    assert kinds(found) == ["model"]
    assert "running averages" in found.differences[0].detail


def test_a_loss_that_no_state_explains() -> None:
    ranks = {0: [line(21), line(22, losses=[5.0])]}
    assert compared(ranks) == RunComparison(21, 22, (Difference("loss", 22),), 22)


def test_more_than_two_ranks_are_exact_only_at_the_first_step() -> None:
    """Sums may be made in another order from then on."""
    reference = Reference({rank: [line(step, rank, world=3) for step in range(1, 31)] for rank in range(3)})
    rounded = line(22, weights="rounded", losses=[1.0 / 22 * (1 + 1e-6)], objects=[seen("opt", "rounded")])
    assert compare(reference, {0: [line(21), rounded]}, 20, is_first_fault=True).differences == ()
    unlike = compare(reference, {0: [line(21, weights="unlike")]}, 20, is_first_fault=True)
    assert [each.kind for each in unlike.differences] == ["model"]


@pytest.mark.parametrize(("changed", "what"), [("inputs", "the inputs of the model"), ("losses", "the loss")])
def test_two_undisturbed_runs_that_differ(changed: str, what: str) -> None:
    value: list[Any] = ["other"] if changed == "inputs" else [7.0]
    again = {0: [line(1), line(2, **{changed: value})]}
    assert find_nondeterminism(REFERENCE, again) == Difference("not deterministic", 2, detail=what)
    assert find_nondeterminism(REFERENCE, {0: [line(1), line(2)]}) is None


STEADY = Reference({rank: [line(step, rank, random={}, objects=[]) for step in range(1, 41)] for rank in (0, 1)})


def alone(step: int, **changes: Any) -> StepRecord:  # noqa: ANN401 - of any field
    """A step that one rank does with the samples of both."""
    rows = [f"row {step} {rank} {number}" for rank in (0, 1) for number in range(4)]
    usual = {"world": 1, "rows": rows, "losses": [1.0 / step + 0.05], "random": {}, "objects": []}
    return line(step, **usual | changes)


def test_after_a_resize_samples_are_compared_as_sets_and_losses_as_means() -> None:
    assert compare_resized(STEADY, {0: [alone(21), alone(22)]}, 20) == RunComparison(21, 22)


def test_the_losses_of_micro_batches_may_be_sums_or_means() -> None:
    halves = [(1.0 / 21 + 0.05) / 2] * 2
    assert compare_resized(STEADY, {0: [alone(21, losses=halves)]}, 20).differences == ()
    assert compare_resized(STEADY, {0: [alone(21, losses=[1.0 / 21 + 0.05] * 2)]}, 20).differences == ()
    assert compare_resized(STEADY, {0: [alone(21, losses=[0.9])]}, 20) == RunComparison(
        21, 21, (Difference("loss", 21),), 21
    )


def test_a_loss_may_be_a_mean_over_samples_that_ranks_share_unevenly() -> None:
    rows = [f"row {place}" for place in range(4)]
    uneven = Reference(
        {
            0: [line(21, rows=rows[:3], losses=[0.2], random={}, objects=[])],
            1: [line(21, 1, rows=rows[3:], losses=[0.6], random={}, objects=[])],
        }
    )
    assert compare_resized(uneven, {0: [alone(21, rows=rows, losses=[0.3])]}, 20).differences == ()
    assert kinds(compare_resized(uneven, {0: [alone(21, rows=rows, losses=[0.5])]}, 20)) == ["loss"]


def test_samples_of_another_step_after_a_resize_are_a_lost_data_position() -> None:
    found = compare_resized(STEADY, {0: [alone(21, rows=alone(11).rows)]}, 20)
    assert found.differences == (Difference("data position", 21, detail="step 21 is given the samples of step 11"),)


def test_a_scheduler_must_survive_a_resize() -> None:
    reference = Reference({0: [line(step, objects=[seen("sched", f"{step}")]) for step in range(1, 31)]})
    found = compare_resized(reference, {0: [alone(21, objects=[seen("sched", "0")])]}, 20)
    assert kinds(found) == ["scheduler"]


def test_a_batch_that_grows_with_the_world_is_not_compared_after_a_resize() -> None:
    found = compare_resized(STEADY, {0: [alone(21, rows=["one row"])]}, 20)
    assert found.differences == ()
    assert found.not_compared == "a step takes 1 sample with this world size and 8 with the other"


def test_random_numbers_are_not_compared_after_a_resize() -> None:
    found = compare_resized(REFERENCE, {0: [alone(21, losses=[5.0])]}, 20)
    assert found.differences == ()
    assert "draws random numbers (noise, torch)" in found.not_compared


def test_a_script_without_state_resumed_where_its_weights_are_known() -> None:
    plain = Reference({0: [line(step, step=None, epoch=None) for step in range(1, 41)]})
    first = line(1, step=None, weights="weights 31")
    assert plain.find_resumed_step(first, {}) == 30
    assert plain.find_resumed_step(line(1, step=None, weights="weights 1"), {}) == 0
    assert plain.find_resumed_step(line(1, step=None, weights="rounded"), {"rounded": 12}) == 12
    assert plain.find_resumed_step(line(1, step=None, weights="unheard of"), {}) is None
