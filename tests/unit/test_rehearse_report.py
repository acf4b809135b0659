"""The report of a rehearsal."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from agent.rehearse.comparison import RunComparison
from agent.rehearse.faults import (
    OverwriteKill,
    RehearsalFault,
    RehearsalResult,
    first_fault_step,
    reveals_lost_position,
)
from agent.rehearse.records import ObjectRecord, StepRecord
from agent.rehearse.reference import Difference, Reference
from agent.rehearse.report import RehearsalReport

OPT = ObjectRecord("optimizer", "Adam", "self.opt", is_in_state=False, digest="")


def line(number: int, *, step: int | None, epoch: int | None = None) -> StepRecord:
    return StepRecord(
        count=number,
        step=step,
        state_epoch=None,
        epoch=epoch,
        epoch_name="epoch",
        world=2,
        losses=[1.0 / number],
        inputs=[],
        rows=[],
        weights="",
        buffers="",
        random={},
        objects=[OPT],
        model="net",
    )


STATEFUL = Reference({0: [line(number, step=number, epoch=(number - 1) // 10) for number in range(1, 31)]})
PLAIN = Reference({0: [line(number, step=None) for number in range(1, 31)]})


def rehearsed(
    *differences: Difference, reference: Reference = STATEFUL, resumed: int | None = 10, loss_from: int | None = 12
) -> RehearsalResult:
    compared = RunComparison(11, 20, differences, loss_from if differences else None)
    return RehearsalResult(reference, (RehearsalFault("worker killed", 15, resumed, compared),), None, 10)


def text_of(found: RehearsalResult) -> str:
    return "\n".join(RehearsalReport(found).lines())


def test_nothing_missing() -> None:
    report = RehearsalReport(rehearsed())
    assert report.is_clean
    assert list(report.lines()) == [
        "undisturbed: 30 steps in 3 epochs by 2 ranks, loss 1 -> 0.03333",
        (
            "worker killed: at step 15, it resumed after step 10, 4 steps replayed; "
            "steps 11 to 20 equal those of the undisturbed run"
        ),
        "",
        "nothing is missing: the script continues as if it had not been interrupted",
    ]


@pytest.mark.parametrize(
    ("difference", "sentence", "fix"),
    [
        (
            Difference("optimizer", 11, OPT),
            "loss differs from step 12 on: the optimizer (Adam `self.opt`) is not in State",
            "state = tr.State(…, opt=self.opt)",
        ),
        (
            Difference("scheduler", 11, ObjectRecord("scheduler", "StepLR", "", is_in_state=False, digest="")),
            "the scheduler (StepLR) is not in State",
            "state = tr.State(…, sched=sched)",
        ),
        (
            Difference("optimizer", 11, ObjectRecord("optimizer", "Adam", "opt", is_in_state=True, digest="")),
            "the optimizer (Adam `opt`) is in State, but resumed with another state",
            "create it before State",
        ),
        (
            Difference("module", 11, ObjectRecord("module", "AveragedModel", "ema", is_in_state=False, digest="")),
            "the module (AveragedModel `ema`) is not in State",
            "state = tr.State(…, ema=ema)",
        ),
        (
            Difference("tensor", 11, ObjectRecord("tensor", "Tensor", "net.queue", is_in_state=False, digest="")),
            "the value (Tensor `net.queue`) is not in State",
            "register_buffer(…)",
        ),
        (Difference("model", 11), "the model is not in State", "state = tr.State(…, net=net)"),
        (Difference("random state", 11, detail="torch"), "the random state of torch is not in State", ""),
        (Difference("loss", 11), "no recorded state explains it", ""),
    ],
)
def test_each_difference_is_reported_with_a_fix(difference: Difference, sentence: str, fix: str) -> None:
    found = rehearsed(difference)
    assert not RehearsalReport(found).is_clean
    assert f"MISSING: {sentence}" in text_of(found) or f"on: {sentence}" in text_of(found)
    assert fix in text_of(found)


def test_a_difference_that_the_loss_does_not_show_yet() -> None:
    text = text_of(rehearsed(Difference("optimizer", 11, OPT), loss_from=None))
    assert "from step 11 on (the loss does not show it yet), the optimizer" in text


def test_a_script_without_state_that_starts_again() -> None:
    found = rehearsed(reference=PLAIN, resumed=0)
    assert not RehearsalReport(found).is_clean
    assert "it started again at step 1, 14 steps replayed" in text_of(found)
    assert "state = tr.State(net=net, opt=self.opt)" in text_of(found)
    several = [msgspec.structs.replace(each, models=["net", "judge"]) for each in PLAIN.rank0]
    assert "state = tr.State(net=net, judge=judge, opt=self.opt)" in text_of(
        rehearsed(reference=Reference({0: several}), resumed=0)
    )


def test_a_script_with_its_own_checkpoint_only_replays_steps() -> None:
    found = rehearsed(reference=PLAIN)
    assert RehearsalReport(found).is_clean
    assert "nothing is missing, but steps are replayed" in text_of(found)


def test_an_own_checkpoint_that_lacks_the_optimizer() -> None:
    found = rehearsed(Difference("optimizer", 11, OPT), reference=PLAIN)
    assert not RehearsalReport(found).is_clean
    assert "the optimizer (Adam `self.opt`) is not in the script's own checkpoint" in text_of(found)


def test_the_output_of_a_script_that_fails_at_a_restart_is_shown() -> None:
    found = replace(rehearsed(), faults=(RehearsalFault("worker killed", 15, failure="FileExistsError: out"),))
    assert not RehearsalReport(found).is_clean
    assert "    FileExistsError: out" in text_of(found)
    assert "must be able to start again" in text_of(found)


@pytest.mark.parametrize(
    ("fault", "is_lost"),
    [
        (RehearsalFault("worker killed as it overwrites own.pt", 15, failure="EOFError"), True),
        (RehearsalFault("worker killed as it overwrites own.pt", 15, resumed=0), True),
        (RehearsalFault("worker killed as it overwrites own.pt", 15, resumed=5), False),
    ],
)
def test_a_checkpoint_that_is_overwritten_in_place(fault: RehearsalFault, is_lost: bool) -> None:  # noqa: FBT001 - a table
    """It is reported if the script has no other one to resume from."""
    found = replace(rehearsed(reference=PLAIN), overwrite_kill=OverwriteKill("own.pt", fault))
    assert RehearsalReport(found).is_clean is not is_lost
    assert ("MISSING" in text_of(found)) is is_lost
    assert ('os.replace("own.pt.new", "own.pt")' in text_of(found)) is is_lost


def test_random_states_that_the_rehearsal_seeds_are_reported() -> None:
    reference = Reference({0: [msgspec.structs.replace(each, seeded=["torch"]) for each in STATEFUL.rank0]})
    assert "not seeded by the script: torch; the rehearsal seeds it" in text_of(rehearsed(reference=reference))


def test_a_state_that_never_saved_is_reported() -> None:
    found = replace(rehearsed(resumed=0), newest_checkpoint=None)
    assert not RehearsalReport(found).is_clean
    assert "lower State(save_every=…)" in text_of(found)


def test_the_first_fault_is_in_the_second_epoch() -> None:
    """Without epochs, it is before the middle."""
    assert first_fault_step(STATEFUL) == 14
    assert first_fault_step(PLAIN) == 12


@pytest.mark.parametrize(("saved", "reveals"), [(5, False), (10, False), (12, True), (20, False), (25, True)])
def test_only_a_checkpoint_within_a_later_epoch_reveals_a_lost_position(saved: int, reveals: bool) -> None:  # noqa: FBT001 - a table
    assert reveals_lost_position(STATEFUL, saved) == reveals
