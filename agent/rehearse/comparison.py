"""What a restart changed, by the records of an undisturbed and a disturbed run.

At the first step at which the two differ in anything, what differs in the state that the step *began* with is a
cause: an object that no State saves, the model, the script's count of epochs. Inputs and the global random states are
blamed only if no such cause explains them, and the loss alone if nothing else differs. All later differences are
consequences.

Where the world is as before, two ranks give the same numbers bit by bit. More ranks may sum in another order after a
restart, and so does another world: there only the first step after the first restart is compared exactly, and losses
are up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.rehearse.records import Rank, StepRecord
from agent.rehearse.reference import Difference, Reference, in_order

RELATIVE_TOLERANCE = 1e-4
EXACT_WORLD = 2


@dataclass(frozen=True)
class RunComparison:
    """Steps of one group against the same steps of the undisturbed run."""

    first: int
    last: int
    differences: tuple[Difference, ...] = ()
    loss_from: int | None = None
    """The first step whose loss differs."""
    not_compared: str = ""
    """Why losses were left out; empty if they were not."""


def compare(reference: Reference, ranks: Mapping[int, Rank], resumed: int, *, is_first_fault: bool) -> RunComparison:
    """Compare a group of the same world, whose first line is of step `resumed` + 1."""
    is_exact = len(reference.ranks) <= EXACT_WORLD
    first, last = resumed + 1, resumed
    differences: list[Difference] = []
    loss_from: int | None = None
    for step, rank, line in in_order(ranks, _offset(ranks, resumed)):
        known = reference.at(rank, step)
        if known is None or (differences and differences[0].step < step and loss_from is not None):
            continue
        last = step
        if not differences or differences[0].step == step:
            looks_at_all = is_exact or (is_first_fault and step == first)
            found = _differences(reference, known, line, step, looks_at_all=looks_at_all)
            differences += [each for each in found if each not in differences]
        if loss_from is None and not _same_losses(known, line, is_exact=is_exact):
            loss_from = step
    if loss_from is not None and not differences:
        differences.append(Difference("loss", loss_from))
    return RunComparison(first, last, _causes(differences), loss_from)


def compare_resized(reference: Reference, ranks: Mapping[int, Rank], resumed: int) -> RunComparison:
    """Compare a group of another world, or after one: samples as sets, losses up to rounding."""
    steps: dict[int, list[StepRecord]] = {}
    for step, _, line in in_order(ranks, _offset(ranks, resumed)):
        steps.setdefault(step, []).append(line)
    both = {step: (reference.all_at(step), lines) for step, lines in steps.items() if reference.all_at(step)}
    first, last = resumed + 1, max(both, default=resumed)
    if not both:
        return RunComparison(first, last, not_compared="the undisturbed run did not come so far")
    differences = [
        each
        for each in _differences(reference, both[first][0][0], both[first][1][0], first, looks_at_all=False)
        if each.kind in {"scheduler", "scaler", "epoch"}
    ]
    not_compared = _why_not_compared(reference, both)
    if differences or not_compared:
        return RunComparison(first, last, tuple(differences), not_compared=not_compared)
    for step, (known, lines) in both.items():
        if _rows(known) != _rows(lines):
            detail = "" if step > first else _whose_rows(reference, lines, step)
            return RunComparison(first, last, (Difference("data position", step, detail=detail),), step)
    off = _first_unequal_loss(both)
    return RunComparison(first, last, (Difference("loss", off),) if off is not None else (), off)


def _offset(ranks: Mapping[int, Rank], resumed: int) -> int:
    return resumed + 1 - min(lines[0].ordinal for lines in ranks.values())


def _differences(
    reference: Reference, known: StepRecord, line: StepRecord, step: int, *, looks_at_all: bool
) -> list[Difference]:
    found: list[Difference] = []
    if looks_at_all and known.weights != line.weights:
        found.append(Difference("model", step))
    elif looks_at_all and known.buffers != line.buffers and known.buffers and line.buffers:
        found.append(Difference("model", step, detail="its buffers (running averages) differ, its weights do not"))
    now = line.keyed()
    for key, seen in known.keyed().items():
        is_up_to_rounding = not looks_at_all and seen.kind in {"optimizer", "module", "tensor"}
        is_compared = key in now and not is_up_to_rounding and reference.is_watched(key, seen)
        if is_compared and now[key].mark != seen.mark:
            kind = "random state" if seen.kind == "generator" else seen.kind
            found.append(Difference(kind, step, now[key]))
    if None not in (known.epoch, line.epoch) and known.epoch != line.epoch:
        detail = f"`{line.epoch_name}` is {line.epoch} at step {step}, in the undisturbed run it is {known.epoch}"
        found.append(Difference("epoch", step, detail=detail))
    drawn = sorted(name for name in reference.random_in_use() if known.random.get(name) != line.random.get(name))
    if drawn:
        found.append(Difference("random state", step, detail=" and ".join(drawn)))
    if known.inputs and line.inputs and known.inputs != line.inputs:
        found.append(Difference("data position", step, detail=_whose_inputs(reference, line, step)))
    elif known.late.is_end and line.late.is_end and known.late.inputs != line.late.inputs:
        found.append(Difference("data position", step))
    return found


def _causes(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Leave out what follows from the others."""
    lost = [each for each in differences if each.seen is not None and not each.seen.is_held]
    kept = [each for each in differences if each.seen is not None and each.seen.is_held]
    rest = [each for each in differences if each.seen is None]
    own_generator = any(each.kind == "random state" for each in lost)
    by_kind = {kind: [each for each in rest if each.kind == kind] for kind in ("model", "epoch", "data position")}
    causes = [*by_kind["model"], *lost, *by_kind["epoch"]]
    is_data_explained = own_generator or bool(by_kind["epoch"])
    if not is_data_explained:
        causes += by_kind["data position"][:1]
    if not causes:
        causes = [each for each in rest if each.kind in {"random state", "loss"}][:1] or kept
    return tuple({(each.kind, each.seen and each.seen.name, each.detail): each for each in reversed(causes)}.values())[
        ::-1
    ]


def _whose_inputs(reference: Reference, line: StepRecord, step: int) -> str:
    lines = [each for rank in reference.ranks.values() for each in rank if each.inputs == line.inputs]
    return f"step {step} is given the samples of step {lines[0].ordinal}" if lines else ""


def _whose_rows(reference: Reference, lines: Sequence[StepRecord], step: int) -> str:
    rows = _rows(lines)
    same = (each.ordinal for each in reference.main if _rows(reference.all_at(each.ordinal)) == rows)
    found = next(same, None)
    return f"step {step} is given the samples of step {found}" if found is not None else ""


def _same_losses(known: StepRecord, line: StepRecord, *, is_exact: bool) -> bool:
    before, after = known.losses, line.losses
    if not before or not after:
        return True
    if known.late.is_end and line.late.is_end:
        before, after = before + known.late.losses, after + line.late.losses
    if is_exact or len(before) != len(after):
        return before == after
    return all(_close(a, b, 0.0) for a, b in zip(before, after, strict=True))


def _close(a: float | None, b: float | None, scale: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b), scale)


def _rows(lines: Sequence[StepRecord]) -> frozenset[str]:
    return frozenset(row for line in lines for row in line.rows)


def _why_not_compared(reference: Reference, both: Mapping[int, tuple[list[StepRecord], list[StepRecord]]]) -> str:
    known, lines = both[min(both)]
    before, after = len(_rows(known)), len(_rows(lines))
    if before != after and before and after and known[0].world != lines[0].world:
        return f"a step takes {after} samples in this world, {before} in the other"
    drawn = reference.what_is_drawn()
    if drawn:
        return f"the script draws random numbers ({', '.join(drawn)}), and after a resize they are others"
    return ""


def _first_unequal_loss(both: Mapping[int, tuple[list[StepRecord], list[StepRecord]]]) -> int | None:
    """The first step whose loss differs in each way of putting the ranks' losses together.

    Scripts differ in it: a mean over ranks of sums or of means of micro-batches, or a mean over samples.
    """
    unequal: list[int] = []
    for way in (_mean_of_sums, _mean_of_means, _mean_over_samples):
        pairs = {step: (way(known), way(lines)) for step, (known, lines) in both.items()}
        largest = max((abs(a) for a, _ in pairs.values() if a is not None and math.isfinite(a)), default=0.0)
        off = [step for step, (a, b) in pairs.items() if not _close(a, b, 0.01 * largest)]
        if not off:
            return None
        unequal.append(min(off))
    return max(unequal)


def _mean_of_sums(lines: Sequence[StepRecord]) -> float | None:
    return _mean([_sum(line.losses) for line in lines], [1] * len(lines))


def _mean_of_means(lines: Sequence[StepRecord]) -> float | None:
    return _mean([_sum(line.losses) for line in lines], [1] * len(lines), [len(line.losses) or 1 for line in lines])


def _mean_over_samples(lines: Sequence[StepRecord]) -> float | None:
    counts = [len(line.rows) or 1 for line in lines]
    return _mean([_sum(line.losses) for line in lines], counts, [len(line.losses) or 1 for line in lines])


def _sum(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) if len(known) == len(losses) else None


def _mean(sums: Sequence[float | None], weights: Sequence[int], parts: Sequence[int] = ()) -> float | None:
    if any(each is None for each in sums):
        return None
    divided = [(each or 0.0) / part for each, part in zip(sums, parts or [1] * len(sums), strict=True)]
    return sum(each * weight for each, weight in zip(divided, weights, strict=True)) / sum(weights)
