"""What was measured, in tables for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.launchers import LAUNCHERS, OURS
from benchmarks.recovery import Sample
from benchmarks.scenarios import PLANNED, SCENARIOS
from rich.table import Table

HEADINGS = ("what happens", "launcher", "n", "median s", "worst s", "recovered", "pause s", "steps lost", "ratio")


@dataclass(frozen=True)
class Summary:
    """The samples of one scenario and launcher. What did not recover took for ever."""

    scenario: str
    launcher: str
    seconds: tuple[float, ...]
    pauses: tuple[float, ...]
    lost: tuple[int, ...]
    """Of those that recovered."""

    @property
    def n(self) -> int:
        """Samples."""
        return len(self.seconds)

    @property
    def recovered(self) -> int:
        """Of them."""
        return len(self.lost)

    @property
    def median_s(self) -> float:
        """To the first finished step."""
        return statistics.median(self.seconds)

    @property
    def median_pause_s(self) -> float:
        """Without any step."""
        return statistics.median(self.pauses)

    @property
    def compared_s(self) -> float:
        """What the launchers are compared by: a planned change by its pause, a fault by its whole time."""
        return self.median_pause_s if self.scenario in PLANNED else self.median_s


def summarize(samples: Iterable[Sample]) -> list[Summary]:
    """By scenario, then by launcher, in the order in which those are listed."""
    usable = [sample for sample in samples if sample.has_started]
    summaries = []
    for scenario in SCENARIOS:
        for launcher in LAUNCHERS:
            chosen = [each for each in usable if (each.scenario, each.launcher) == (scenario, launcher)]
            if chosen:
                summaries.append(_summary(scenario, launcher, chosen))
    return summaries


def _summary(scenario: str, launcher: str, samples: Sequence[Sample]) -> Summary:
    return Summary(
        scenario,
        launcher,
        tuple(math.inf if sample.seconds is None else sample.seconds for sample in samples),
        tuple(math.inf if sample.pause_s is None else sample.pause_s for sample in samples),
        tuple(sample.steps_lost for sample in samples if sample.steps_lost is not None),
    )


def ratio(summary: Summary, summaries: Sequence[Summary]) -> float | None:
    """How many times as long as ours it takes; None: there is nothing to compare, or it is ours."""
    ours = next((each for each in summaries if (each.scenario, each.launcher) == (summary.scenario, OURS.name)), None)
    if ours is None or summary is ours or math.isinf(ours.compared_s):
        return None
    return summary.compared_s / ours.compared_s


def rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    return [
        (
            SCENARIOS[each.scenario].title,
            LAUNCHERS[each.launcher].title,
            str(each.n),
            _seconds(each.median_s),
            _seconds(max(each.seconds)),
            f"{each.recovered} of {each.n}",
            _seconds(each.median_pause_s),
            f"{statistics.median(each.lost):g} (≤ {max(each.lost)})" if each.lost else "",
            _ratio(ratio(each, summaries)),
        )
        for each in summaries
    ]


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return "∞" if math.isinf(value) else f"{value:.1f}"


def text(headings: Sequence[str], cells: Iterable[Sequence[str]], title: str) -> Table:
    """For a terminal."""
    table = Table(*headings, title=title)
    for row in cells:
        table.add_row(*row)
    return table


def markdown(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """For a document."""
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
