"""What a rehearsal found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from agent.rehearse.faults import RehearsalFault, Rehearsed
from agent.rehearse.records import SeenObject, StepRecord
from agent.rehearse.reference import Difference, Reference

_CURES = {
    "epoch": "for epoch in state.epochs(…):  # instead of range(…)",
    "data position": "for batch in state.steps(batches):  # in an order that only a seed and the epoch decide",
}
_USUAL_NAMES = {
    "optimizer": "opt",
    "scheduler": "sched",
    "scaler": "scaler",
    "generator": "generator",
    "module": "average",
    "tensor": "values",
}
_KIND_NAMES = {"generator": "random state", "tensor": "value"}


class RehearsalReport:
    """The words for what was found.

    Args:
        rehearsed: what was found.
    """

    def __init__(self, rehearsed: Rehearsed) -> None:
        self._rehearsed = rehearsed
        self._reference: Reference = rehearsed.reference

    @property
    def is_clean(self) -> bool:
        """Whether nothing is missing."""
        done = self._rehearsed
        has_begun_anew = not self._reference.has_state and any(not fault.resumed for fault in done.faults)
        is_bad = has_begun_anew or any(fault.failure for fault in done.faults) or not done.faults or self._is_torn()
        return done.unsteady is None and not done.differences and not is_bad and not self._starts_over()

    def lines(self) -> Iterator[str]:
        """All of it, in the order in which a user reads."""
        yield self._undisturbed()
        if seeded := self._reference.main[-1].seeded:
            yield f"not seeded by the script: {', '.join(seeded)}; the rehearsal seeds it, after a restart otherwise"
        for fault in self._rehearsed.faults:
            yield f"{fault.name}: {self._what_came_of(fault)}"
        if self._rehearsed.torn is not None:
            fault = self._rehearsed.torn.fault
            yield f"{fault.name}: {self._what_came_of(fault)}"
        yield ""
        yield from self._verdict()

    def _undisturbed(self) -> str:
        main = self._reference.main
        epochs = {self._reference.epoch_of(line.ordinal) for line in main} - {None}
        within = f" in {len(epochs)} epochs" if epochs else ""
        return f"undisturbed: {self._reference.last} steps{within} by {_ranks(main[0].world)}, loss {_losses(main)}"

    def _what_came_of(self, fault: RehearsalFault) -> str:
        if fault.failure:
            return "the script does not go on; its last lines:\n" + _indented(fault.failure)
        if fault.resumed is None:
            return f"{fault.step - 1} steps lost: it went on with weights that were never there before"
        begun = "it began again at step 1" if not fault.resumed else f"it went on after step {fault.resumed}"
        said = f"at step {fault.step}, {begun}, {_steps(fault.lost)} lost"
        compared = fault.comparison
        if compared is None or compared.differences:
            return said
        if compared.not_compared:
            return f"{said}; losses were not compared: {compared.not_compared}"
        return f"{said}; steps {compared.first} to {compared.last} are those of the undisturbed run"

    def _is_torn(self) -> bool:
        return self._rehearsed.torn is not None and self._rehearsed.torn.is_lost

    def _torn(self) -> Iterator[str]:
        if self._rehearsed.torn is not None and self._is_torn():
            path = self._rehearsed.torn.path
            yield (
                f"MISSING: a checkpoint while one is written: {path} is overwritten in place, and a kill in the middle "
                "of it leaves nothing to go on from"
            )
            yield f'  torch.save(…, "{path}.new"); os.replace("{path}.new", "{path}")'

    def _verdict(self) -> Iterator[str]:
        done = self._rehearsed
        yield from self._torn()
        if done.unsteady is not None:
            yield from _unsteady(done.unsteady)
        elif not done.faults:
            yield "the training was over before a fault could be tried: give it more epochs, or --steps"
        elif any(fault.failure for fault in done.faults):
            yield "MISSING: the script must be able to start again where a run of it was broken off"
        elif not self._reference.has_state:
            yield from self._of_plain_script()
        elif done.differences:
            yield from self._missing()
        elif self._starts_over():
            yield (
                "MISSING: a checkpoint. None was made before the first fault: lower State(save_every=…), or rehearse "
                "more steps (--steps)"
            )
        elif not self._is_torn():
            yield "nothing is missing: the script goes on as if nothing had happened"

    def _starts_over(self) -> bool:
        return self._reference.has_state and self._rehearsed.newest_checkpoint is None

    def _missing(self) -> Iterator[str]:
        for difference in self._rehearsed.differences:
            yield f"MISSING: {self._loss_sentence(difference)}{self._cause(difference)}"
            cure = self._cure(difference)
            if cure:
                yield f"  {cure}"
        if len(self._rehearsed.faults) < 4:
            yield "The other faults were not tried: put this right first."

    def _loss_sentence(self, difference: Difference) -> str:
        compared = next(
            fault.comparison
            for fault in self._rehearsed.faults
            if fault.comparison and difference in fault.comparison.differences
        )
        if compared.loss_from is None:
            return f"from step {difference.step} on (the loss does not show it yet), "
        return f"loss differs from step {compared.loss_from} on: "

    def _cause(self, difference: Difference) -> str:
        where = "in State" if self._reference.has_state else "in the script's own checkpoint"
        if difference.seen is not None:
            return _of_object(difference.seen, where)
        detail = f" ({difference.detail})" if difference.detail else ""
        match difference.kind:
            case "model":
                return f"the model is not {where}{detail}"
            case "epoch":
                return (
                    f"the epoch is not {where}: the script counts its epochs itself, and began to count again{detail}"
                )
            case "data position":
                again = detail or " (the samples come in another order, or are others)"
                return f"the data position is not {where}{again}"
            case "random state":
                return f"the random state of {difference.detail} is not {where}"
            case _:
                return "nothing that was looked at explains it: weights, optimizer, inputs and random states agree"

    def _cure(self, difference: Difference) -> str:
        """A line of code, or an empty string."""
        if difference.seen is not None and difference.seen.is_held:
            return "make it before State, and change it only in training"
        if difference.seen is not None:
            if "." in difference.seen.name.removeprefix("self."):
                return "make it a part of what its module saves: register_buffer(…)"
            return _state_with(_variable(difference.seen))
        if difference.kind == "model":
            return _state_with(self._reference.main[0].model or "model")
        return _CURES.get(difference.kind, "")

    def _of_plain_script(self) -> Iterator[str]:
        done = self._rehearsed
        if any(not fault.resumed for fault in done.faults) and not done.differences:
            yield "MISSING: the script saves nothing that it goes on from: each fault costs all the steps so far"
        for difference in done.differences:
            yield f"MISSING: {self._loss_sentence(difference)}{self._cause(difference)}"
        if self.is_clean:
            yield "nothing is missing, but for the steps lost; these lines would save them:"
        else:
            yield "These lines would save them:"
        yield from _indented("\n".join(_advice(self._reference.main[0]))).splitlines()


def _unsteady(difference: Difference) -> Iterator[str]:
    yield (
        f"CANNOT TELL: the script does not repeat itself. Two undisturbed runs differ from step {difference.step} on: "
        f"{difference.detail}."
    )
    yield "  the rehearsal seeds random, numpy.random and torch; seed what else is drawn: numpy.random.default_rng(…)"


def _of_object(seen: SeenObject, where: str) -> str:
    name = f" `{seen.name}`" if seen.name else ""
    kind = _KIND_NAMES.get(seen.kind, seen.kind)
    if seen.is_held:
        return f"the {kind} ({seen.type}{name}) is {where}, but went on with another state"
    return f"the {kind} ({seen.type}{name}) is not {where}"


def _state_with(name: str) -> str:
    return f"state = tr.State(…, {name.removeprefix('self.')}={name})"


def _variable(seen: SeenObject) -> str:
    return seen.name or _USUAL_NAMES[seen.kind]


def _advice(line: StepRecord) -> Iterator[str]:
    things = [line.model or "model", *line.models, *(_variable(seen) for seen in line.objects if _is_to_be_saved(seen))]
    arguments = ", ".join(f"{name.removeprefix('self.')}={name}" for name in dict.fromkeys(things))
    yield "import trainer_runtime as tr"
    yield f"state = tr.State({arguments})"
    yield "for epoch in state.epochs(…):          # instead of range(…)"
    yield "    for batch in state.steps(batches): # instead of the batches themselves"
    yield "        …"
    yield "        state.commit()                 # after each optimizer step"


def _is_to_be_saved(seen: SeenObject) -> bool:
    """Whether a variable is known to hold something that training needs."""
    return seen.kind not in {"module", "tensor"} or (seen.kind == "module" and bool(seen.name))


def _losses(lines: list[StepRecord]) -> str:
    first, last = (next((loss for line in order for loss in line.losses), None) for order in (lines, lines[::-1]))
    if first is None or last is None:
        return "unknown"
    return f"{first:.4g} -> {last:.4g}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
