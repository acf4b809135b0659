"""The sentences of a rehearsal's report."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from agent.rehearse.comparison import RunComparison
from agent.rehearse.faults import RehearsalFault, Rehearsed, TornFile, first_target, is_telling
from agent.rehearse.records import SeenObject, StepRecord
from agent.rehearse.reference import Difference, Reference
from agent.rehearse.report import RehearsalReport

OPT = SeenObject("optimizer", "Adam", "self.opt", is_held=False, mark="")


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
) -> Rehearsed:
    compared = RunComparison(11, 20, differences, loss_from if differences else None)
    return Rehearsed(reference, (RehearsalFault("worker killed", 15, resumed, compared),), None, 10)


def text_of(found: Rehearsed) -> str:
    return "\n".join(RehearsalReport(found).lines())


def test_nothing_missing() -> None:
    report = RehearsalReport(rehearsed())
    assert report.is_clean
    assert list(report.lines()) == [
        "undisturbed: 30 steps in 3 epochs by 2 ranks, loss 1 -> 0.03333",
        (
            "worker killed: at step 15, it went on after step 10, 4 steps lost; "
            "steps 11 to 20 are those of the undisturbed run"
        ),
        "",
        "nothing is missing: the script goes on as if nothing had happened",
    ]


@pytest.mark.parametrize(
    ("difference", "sentence", "cure"),
    [
        (
            Difference("optimizer", 11, OPT),
            "loss differs from step 12 on: the optimizer (Adam `self.opt`) is not in State",
            "state = tr.State(…, opt=self.opt)",
        ),
        (
            Difference("scheduler", 11, SeenObject("scheduler", "StepLR", "", is_held=False, mark="")),
            "the scheduler (StepLR) is not in State",
            "state = tr.State(…, sched=sched)",
        ),
        (
            Difference("optimizer", 11, SeenObject("optimizer", "Adam", "opt", is_held=True, mark="")),
            "the optimizer (Adam `opt`) is in State, but went on with another state",
            "make it before State",
        ),
        (
            Difference("module", 11, SeenObject("module", "AveragedModel", "ema", is_held=False, mark="")),
            "the module (AveragedModel `ema`) is not in State",
            "state = tr.State(…, ema=ema)",
        ),
        (
            Difference("tensor", 11, SeenObject("tensor", "Tensor", "net.queue", is_held=False, mark="")),
            "the value (Tensor `net.queue`) is not in State",
            "register_buffer(…)",
        ),
        (Difference("model", 11), "the model is not in State", "state = tr.State(…, net=net)"),
        (Difference("random state", 11, detail="torch"), "the random state of torch is not in State", ""),
        (Difference("loss", 11), "nothing that was looked at explains it", ""),
    ],
)
def test_each_difference_has_a_sentence_and_a_cure(difference: Difference, sentence: str, cure: str) -> None:
    found = rehearsed(difference)
    assert not RehearsalReport(found).is_clean
    assert f"MISSING: {sentence}" in text_of(found) or f"on: {sentence}" in text_of(found)
    assert cure in text_of(found)


def test_a_difference_without_consequence_so_far_is_told_as_such() -> None:
    text = text_of(rehearsed(Difference("optimizer", 11, OPT), loss_from=None))
    assert "from step 11 on (the loss does not show it yet), the optimizer" in text


def test_a_script_without_state_that_begins_anew_is_told_so() -> None:
    found = rehearsed(reference=PLAIN, resumed=0)
    assert not RehearsalReport(found).is_clean
    assert "it began again at step 1, 14 steps lost" in text_of(found)
    assert "state = tr.State(net=net, opt=self.opt)" in text_of(found)
    several = [msgspec.structs.replace(each, models=["net", "judge"]) for each in PLAIN.main]
    assert "state = tr.State(net=net, judge=judge, opt=self.opt)" in text_of(
        rehearsed(reference=Reference({0: several}), resumed=0)
    )


def test_a_script_with_a_checkpoint_of_its_own_misses_nothing_but_steps() -> None:
    found = rehearsed(reference=PLAIN)
    assert RehearsalReport(found).is_clean
    assert "nothing is missing, but for the steps lost" in text_of(found)


def test_a_checkpoint_of_its_own_that_lacks_something_is_told() -> None:
    found = rehearsed(Difference("optimizer", 11, OPT), reference=PLAIN)
    assert not RehearsalReport(found).is_clean
    assert "the optimizer (Adam `self.opt`) is not in the script's own checkpoint" in text_of(found)


def test_a_script_that_fails_when_it_starts_again_is_quoted() -> None:
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
def test_a_checkpoint_that_is_overwritten_in_place_is_told(fault: RehearsalFault, is_lost: bool) -> None:  # noqa: FBT001 - a table
    """If there is no other that the script goes on from."""
    found = replace(rehearsed(reference=PLAIN), torn=TornFile("own.pt", fault))
    assert RehearsalReport(found).is_clean is not is_lost
    assert ("MISSING" in text_of(found)) is is_lost
    assert ('os.replace("own.pt.new", "own.pt")' in text_of(found)) is is_lost


def test_what_the_rehearsal_seeds_is_told() -> None:
    reference = Reference({0: [msgspec.structs.replace(each, seeded=["torch"]) for each in STATEFUL.main]})
    assert "not seeded by the script: torch; the rehearsal seeds it" in text_of(rehearsed(reference=reference))


def test_a_state_that_never_saved_is_told() -> None:
    found = replace(rehearsed(resumed=0), newest_checkpoint=None)
    assert not RehearsalReport(found).is_clean
    assert "lower State(save_every=…)" in text_of(found)


def test_the_first_fault_comes_within_the_second_epoch() -> None:
    """Where there are no epochs, before the middle."""
    assert first_target(STATEFUL) == 14
    assert first_target(PLAIN) == 12


@pytest.mark.parametrize(("saved", "tells"), [(5, False), (10, False), (12, True), (20, False), (25, True)])
def test_a_checkpoint_tells_within_a_later_epoch_only(saved: int, tells: bool) -> None:  # noqa: FBT001 - a table
    assert is_telling(STATEFUL, saved) == tells
