"""The report of a rehearsal: its findings in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from agent.rehearse.faults import RehearsalFault, RehearsalResult
from agent.rehearse.records import ObjectRecord, StepRecord
from agent.rehearse.reference import Difference, Reference

_FIXES = {
    "epoch": "for epoch in state.epochs(…):  # instead of range(…)",
    "data position": "for batch in state.steps(batches):  # in an order that only a seed and the epoch decide",
}
_DEFAULT_NAMES = {
    "optimizer": "opt",
    "scheduler": "sched",
    "scaler": "scaler",
    "generator": "generator",
    "module": "average",
    "tensor": "values",
}
_KIND_NAMES = {"generator": "random state", "tensor": "value"}


class RehearsalReport:
    """The report of a rehearsal.

    Args:
        result: the findings.
    """

    def __init__(self, result: RehearsalResult) -> None:
        self._result = result
        self._reference: Reference = result.reference

    @property
    def is_clean(self) -> bool:
        """Whether nothing is missing."""
        result = self._result
        has_started_over = not self._reference.has_state and any(not fault.resumed for fault in result.faults)
        is_bad = (
            has_started_over
            or any(fault.failure for fault in result.faults)
            or not result.faults
            or self._lost_checkpoint()
        )
        return result.nondeterminism is None and not result.differences and not is_bad and not self._never_saved()

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield self._reference_line()
        if seeded := self._reference.rank0[-1].seeded:
            names = ", ".join(seeded)
            yield f"not seeded by the script: {names}; the rehearsal seeds it, with another seed after a restart"
        for fault in self._result.faults:
            yield f"{fault.name}: {self._outcome(fault)}"
        if self._result.overwrite_kill is not None:
            fault = self._result.overwrite_kill.fault
            yield f"{fault.name}: {self._outcome(fault)}"
        yield ""
        yield from self._conclusion()

    def _reference_line(self) -> str:
        rank0 = self._reference.rank0
        epochs = {self._reference.epoch_of(record.ordinal) for record in rank0} - {None}
        within = f" in {len(epochs)} epochs" if epochs else ""
        return f"undisturbed: {self._reference.last} steps{within} by {_ranks(rank0[0].world)}, loss {_losses(rank0)}"

    def _outcome(self, fault: RehearsalFault) -> str:
        if fault.failure:
            return "the script could not continue; its last lines:\n" + _indented(fault.failure)
        if fault.resumed is None:
            return f"{_steps(fault.step - 1)} replayed: it resumed with weights that no earlier step had"
        start = f"it resumed after step {fault.resumed}" if fault.resumed else "it started again at step 1"
        sentence = f"at step {fault.step}, {start}, {_steps(fault.replayed_steps)} replayed"
        compared = fault.comparison
        if compared is None or compared.differences:
            return sentence
        if compared.not_compared:
            return f"{sentence}; losses were not compared: {compared.not_compared}"
        return f"{sentence}; steps {compared.first} to {compared.last} equal those of the undisturbed run"

    def _lost_checkpoint(self) -> bool:
        return self._result.overwrite_kill is not None and self._result.overwrite_kill.is_lost

    def _overwrite_lines(self) -> Iterator[str]:
        if self._result.overwrite_kill is not None and self._lost_checkpoint():
            path = self._result.overwrite_kill.path
            yield (
                f"MISSING: a checkpoint while the next one is written: {path} is overwritten in place, and a kill in "
                "the middle of a write leaves nothing to resume from"
            )
            yield f'  torch.save(…, "{path}.new"); os.replace("{path}.new", "{path}")'

    def _conclusion(self) -> Iterator[str]:
        result = self._result
        yield from self._overwrite_lines()
        if result.nondeterminism is not None:
            yield from _nondeterminism_lines(result.nondeterminism)
        elif not result.faults:
            yield "the training ended before a fault could be tried: give the script more epochs, or set --steps"
        elif any(fault.failure for fault in result.faults):
            yield "MISSING: a restart. The script must be able to start again after it was interrupted"
        elif not self._reference.has_state:
            yield from self._plain_script_lines()
        elif result.differences:
            yield from self._missing_lines()
        elif self._never_saved():
            yield (
                "MISSING: a checkpoint. None was made before the first fault: lower State(save_every=…), or rehearse "
                "more steps (--steps)"
            )
        elif not self._lost_checkpoint():
            yield "nothing is missing: the script continues as if it had not been interrupted"

    def _never_saved(self) -> bool:
        return self._reference.has_state and self._result.newest_checkpoint is None

    def _missing_lines(self) -> Iterator[str]:
        for difference in self._result.differences:
            yield f"MISSING: {self._loss_sentence(difference)}{self._cause(difference)}"
            fix = self._fix(difference)
            if fix:
                yield f"  {fix}"
        if len(self._result.faults) < 4:
            yield "The other faults were not tried: fix this first."

    def _loss_sentence(self, difference: Difference) -> str:
        compared = next(
            fault.comparison
            for fault in self._result.faults
            if fault.comparison and difference in fault.comparison.differences
        )
        if compared.loss_from is None:
            return f"from step {difference.step} on (the loss does not show it yet), "
        return f"loss differs from step {compared.loss_from} on: "

    def _cause(self, difference: Difference) -> str:
        where = "in State" if self._reference.has_state else "in the script's own checkpoint"
        if difference.object is not None:
            return _object_sentence(difference.object, where)
        detail = f" ({difference.detail})" if difference.detail else ""
        match difference.kind:
            case "model":
                return f"the model is not {where}{detail}"
            case "epoch":
                return f"the epoch is not {where}: the script counts epochs itself, and the count started again{detail}"
            case "data position":
                return f"the data position is not {where}{detail or ' (other samples, or another order)'}"
            case "random state":
                return f"the random state of {difference.detail} is not {where}"
            case _:
                return "no recorded state explains it: weights, optimizer, inputs and random states are equal"

    def _fix(self, difference: Difference) -> str:
        """Return a line of code or advice; may be empty."""
        if difference.object is not None and difference.object.is_in_state:
            return "create it before State, and change it only in training"
        if difference.object is not None:
            if "." in difference.object.name.removeprefix("self."):
                return "make it part of what its module saves: register_buffer(…)"
            return _state_with(_variable_of(difference.object))
        if difference.kind == "model":
            return _state_with(self._reference.rank0[0].model or "model")
        return _FIXES.get(difference.kind, "")

    def _plain_script_lines(self) -> Iterator[str]:
        result = self._result
        if any(not fault.resumed for fault in result.faults) and not result.differences:
            yield "MISSING: a checkpoint. The script saves nothing to resume from: each fault costs all steps so far"
        for difference in result.differences:
            yield f"MISSING: {self._loss_sentence(difference)}{self._cause(difference)}"
        if self.is_clean:
            yield "nothing is missing, but steps are replayed; these lines would avoid that:"
        else:
            yield "These lines would avoid that:"
        yield from _indented("\n".join(_advice(self._reference.rank0[0]))).splitlines()


def _nondeterminism_lines(difference: Difference) -> Iterator[str]:
    yield (
        f"CANNOT TELL: the script is not deterministic. Two undisturbed runs differ from step {difference.step} on: "
        f"{difference.detail}."
    )
    yield "  the rehearsal seeds random, numpy.random and torch; seed other generators: numpy.random.default_rng(…)"


def _object_sentence(entry: ObjectRecord, where: str) -> str:
    name = f" `{entry.name}`" if entry.name else ""
    kind = _KIND_NAMES.get(entry.kind, entry.kind)
    if entry.is_in_state:
        return f"the {kind} ({entry.type}{name}) is {where}, but resumed with another state"
    return f"the {kind} ({entry.type}{name}) is not {where}"


def _state_with(name: str) -> str:
    return f"state = tr.State(…, {name.removeprefix('self.')}={name})"


def _variable_of(entry: ObjectRecord) -> str:
    return entry.name or _DEFAULT_NAMES[entry.kind]


def _advice(record: StepRecord) -> Iterator[str]:
    objects = [_variable_of(entry) for entry in record.objects if _is_needed(entry)]
    names = [record.model or "model", *record.models, *objects]
    arguments = ", ".join(f"{name.removeprefix('self.')}={name}" for name in dict.fromkeys(names))
    yield "import trainer_runtime as tr"
    yield f"state = tr.State({arguments})"
    yield "for epoch in state.epochs(…):          # instead of range(…)"
    yield "    for batch in state.steps(batches): # instead of the batches themselves"
    yield "        …"
    yield "        state.commit()                 # after each optimizer step"


def _is_needed(entry: ObjectRecord) -> bool:
    """Return whether the object certainly belongs in State; not every tensor in a variable does."""
    return entry.kind not in {"module", "tensor"} or (entry.kind == "module" and bool(entry.name))


def _losses(records: list[StepRecord]) -> str:
    first, last = (
        next((loss for record in order for loss in record.losses), None) for order in (records, records[::-1])
    )
    if first is None or last is None:
        return "unknown"
    return f"{first:.4g} -> {last:.4g}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
