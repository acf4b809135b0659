"""Comparison of the records of an undisturbed and a disturbed run: what did a restart change?

The first step at which the two runs differ shows the cause. Differences in the state with which this step *began* are
causes: an object that no State saves, the model, the script's count of epochs. Differences in the inputs and in the
global random states are reported only if no such cause explains them, and the loss alone only if nothing else differs.
All later differences are consequences.

In a world of the same size, one or two ranks compute the same numbers bit by bit. More ranks may sum in another order
after a restart, and so does a world of another size. There, only the first step after the first restart is compared
exactly, and losses are compared up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.rehearse.records import RankRecords, StepRecord
from agent.rehearse.reference import Difference, Reference, sorted_by_step

RELATIVE_TOLERANCE = 1e-4
EXACT_WORLD = 2


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing the steps of one group with the same steps of the undisturbed run."""

    first: int
    last: int
    differences: tuple[Difference, ...] = ()
    loss_from: int | None = None
    """The first step whose loss differs."""
    not_compared: str = ""
    """Why losses were not compared; empty if they were."""


def compare(
    reference: Reference, ranks: Mapping[int, RankRecords], resumed: int, *, is_first_fault: bool
) -> RunComparison:
    """Compare a group of the same world size, whose first record is of step `resumed` + 1."""
    is_exact = len(reference.ranks) <= EXACT_WORLD
    first, last = resumed + 1, resumed
    differences: list[Difference] = []
    loss_from: int | None = None
    for step, rank, record in sorted_by_step(ranks, _offset(ranks, resumed)):
        expected = reference.at(rank, step)
        if expected is None or (differences and differences[0].step < step and loss_from is not None):
            continue
        last = step
        if not differences or differences[0].step == step:
            is_exact_step = is_exact or (is_first_fault and step == first)
            found = _differences(reference, expected, record, step, is_exact_step=is_exact_step)
            differences += [each for each in found if each not in differences]
        if loss_from is None and not _same_losses(expected, record, is_exact=is_exact):
            loss_from = step
    if loss_from is not None and not differences:
        differences.append(Difference("loss", loss_from))
    return RunComparison(first, last, _causes(differences), loss_from)


def compare_resized(reference: Reference, ranks: Mapping[int, RankRecords], resumed: int) -> RunComparison:
    """Compare a group after a change of the world size: samples as sets, losses up to rounding."""
    steps: dict[int, list[StepRecord]] = {}
    for step, _, record in sorted_by_step(ranks, _offset(ranks, resumed)):
        steps.setdefault(step, []).append(record)
    pairs = {step: (reference.all_at(step), records) for step, records in steps.items() if reference.all_at(step)}
    first, last = resumed + 1, max(pairs, default=resumed)
    if not pairs:
        return RunComparison(first, last, not_compared="the undisturbed run has too few steps")
    differences = [
        each
        for each in _differences(reference, pairs[first][0][0], pairs[first][1][0], first, is_exact_step=False)
        if each.kind in {"scheduler", "scaler", "epoch"}
    ]
    not_compared = _why_not_compared(reference, pairs)
    if differences or not_compared:
        return RunComparison(first, last, tuple(differences), not_compared=not_compared)
    for step, (expected, records) in pairs.items():
        if _rows(expected) != _rows(records):
            detail = "" if step > first else _find_rows(reference, records, step)
            return RunComparison(first, last, (Difference("data position", step, detail=detail),), step)
    unequal_step = _first_unequal_loss(pairs)
    return RunComparison(
        first, last, (Difference("loss", unequal_step),) if unequal_step is not None else (), unequal_step
    )


def _offset(ranks: Mapping[int, RankRecords], resumed: int) -> int:
    return resumed + 1 - min(records[0].ordinal for records in ranks.values())


def _differences(
    reference: Reference, expected: StepRecord, record: StepRecord, step: int, *, is_exact_step: bool
) -> list[Difference]:
    found: list[Difference] = []
    if is_exact_step and expected.weights != record.weights:
        found.append(Difference("model", step))
    elif is_exact_step and expected.buffers != record.buffers and expected.buffers and record.buffers:
        found.append(
            Difference("model", step, detail="its buffers, such as running averages, differ; its weights do not")
        )
    now = record.objects_by_key()
    for key, entry in expected.objects_by_key().items():
        is_up_to_rounding = not is_exact_step and entry.kind in {"optimizer", "module", "tensor"}
        is_compared = key in now and not is_up_to_rounding and reference.is_compared(key, entry)
        if is_compared and now[key].digest != entry.digest:
            kind = "random state" if entry.kind == "generator" else entry.kind
            found.append(Difference(kind, step, now[key]))
    if None not in (expected.epoch, record.epoch) and expected.epoch != record.epoch:
        detail = (
            f"`{record.epoch_name}` is {record.epoch} at step {step}, in the undisturbed run it is {expected.epoch}"
        )
        found.append(Difference("epoch", step, detail=detail))
    drawn = sorted(name for name in reference.random_in_use() if expected.random.get(name) != record.random.get(name))
    if drawn:
        found.append(Difference("random state", step, detail=" and ".join(drawn)))
    if expected.inputs and record.inputs and expected.inputs != record.inputs:
        found.append(Difference("data position", step, detail=_find_inputs(reference, record, step)))
    elif expected.late.is_complete and record.late.is_complete and expected.late.inputs != record.late.inputs:
        found.append(Difference("data position", step))
    return found


def _causes(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the differences that are causes, without those that follow from others."""
    lost = [each for each in differences if each.object is not None and not each.object.is_in_state]
    kept = [each for each in differences if each.object is not None and each.object.is_in_state]
    rest = [each for each in differences if each.object is None]
    own_generator = any(each.kind == "random state" for each in lost)
    by_kind = {kind: [each for each in rest if each.kind == kind] for kind in ("model", "epoch", "data position")}
    causes = [*by_kind["model"], *lost, *by_kind["epoch"]]
    is_data_explained = own_generator or bool(by_kind["epoch"])
    if not is_data_explained:
        causes += by_kind["data position"][:1]
    if not causes:
        causes = [each for each in rest if each.kind in {"random state", "loss"}][:1] or kept
    return tuple(
        {(each.kind, each.object and each.object.name, each.detail): each for each in reversed(causes)}.values()
    )[::-1]


def _find_inputs(reference: Reference, record: StepRecord, step: int) -> str:
    records = [each for rank in reference.ranks.values() for each in rank if each.inputs == record.inputs]
    return f"step {step} is given the samples of step {records[0].ordinal}" if records else ""


def _find_rows(reference: Reference, records: Sequence[StepRecord], step: int) -> str:
    rows = _rows(records)
    same = (each.ordinal for each in reference.rank0 if _rows(reference.all_at(each.ordinal)) == rows)
    found = next(same, None)
    return f"step {step} is given the samples of step {found}" if found is not None else ""


def _same_losses(expected: StepRecord, record: StepRecord, *, is_exact: bool) -> bool:
    before, after = expected.losses, record.losses
    if not before or not after:
        return True
    if expected.late.is_complete and record.late.is_complete:
        before, after = before + expected.late.losses, after + record.late.losses
    if is_exact or len(before) != len(after):
        return before == after
    return all(_close(a, b, 0.0) for a, b in zip(before, after, strict=True))


def _close(a: float | None, b: float | None, scale: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b), scale)


def _rows(records: Sequence[StepRecord]) -> frozenset[str]:
    return frozenset(row for record in records for row in record.rows)


def _why_not_compared(reference: Reference, pairs: Mapping[int, tuple[list[StepRecord], list[StepRecord]]]) -> str:
    expected, records = pairs[min(pairs)]
    before, after = len(_rows(expected)), len(_rows(records))
    if before != after and before and after and expected[0].world != records[0].world:
        samples = f"{after} sample{'' if after == 1 else 's'}"
        return f"a step takes {samples} with this world size and {before} with the other"
    drawn = reference.random_sources()
    if drawn:
        return f"the script draws random numbers ({', '.join(drawn)}), which differ after a resize"
    return ""


def _first_unequal_loss(pairs: Mapping[int, tuple[list[StepRecord], list[StepRecord]]]) -> int | None:
    """Return the first step whose loss differs in each way of combining the ranks' losses; None if one way agrees.

    Scripts may take the mean over ranks of sums or of means over micro-batches, or the mean over samples.
    """
    unequal: list[int] = []
    for combine in (_mean_of_sums, _mean_of_means, _mean_over_samples):
        means = {step: (combine(expected), combine(records)) for step, (expected, records) in pairs.items()}
        largest = max((abs(a) for a, _ in means.values() if a is not None and math.isfinite(a)), default=0.0)
        unequal_step = [step for step, (a, b) in means.items() if not _close(a, b, 0.01 * largest)]
        if not unequal_step:
            return None
        unequal.append(min(unequal_step))
    return max(unequal)


def _mean_of_sums(records: Sequence[StepRecord]) -> float | None:
    return _mean([_sum(record.losses) for record in records], [1] * len(records))


def _mean_of_means(records: Sequence[StepRecord]) -> float | None:
    return _mean(
        [_sum(record.losses) for record in records], [1] * len(records), [len(record.losses) or 1 for record in records]
    )


def _mean_over_samples(records: Sequence[StepRecord]) -> float | None:
    counts = [len(record.rows) or 1 for record in records]
    return _mean([_sum(record.losses) for record in records], counts, [len(record.losses) or 1 for record in records])


def _sum(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return sum(finite) if len(finite) == len(losses) else None


def _mean(sums: Sequence[float | None], weights: Sequence[int], parts: Sequence[int] = ()) -> float | None:
    if any(each is None for each in sums):
        return None
    divided = [(each or 0.0) / part for each, part in zip(sums, parts or [1] * len(sums), strict=True)]
    return sum(each * weight for each, weight in zip(divided, weights, strict=True)) / sum(weights)
