"""The recovery figures as a picture: a row for each scenario and launcher, medians as bars, samples as dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from benchmarks.launchers import LAUNCHERS
from benchmarks.scenarios import PLANNED, SCENARIOS
from benchmarks.tables import Summary
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agent.observe.report.palette import LIGHT

_COLOURS = {
    "ours": LIGHT["training"],
    "ours-run": LIGHT["first-step"],
    "ours-hot": LIGHT["load"],
    "ours-plain": LIGHT["join"],
    "torchrun-best": LIGHT["recovering"],
    "torchrun": LIGHT["stopped"],
    "ft_launcher": LIGHT["waiting"],
}
_WIDTH_IN, _ROW_IN, _EDGES_IN = 8.0, 0.19, 1.0
_DPI = 120
_LEAST_S = 0.05
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["faint"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": LIGHT["faint"],
    "ytick.labelcolor": LIGHT["ink"],
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def draw(summaries: Sequence[Summary], patience_s: float, path: Path) -> None:
    """Write the picture. A planned change is drawn by its pause: meanwhile the old world trains."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, _EDGES_IN + _ROW_IN * (len(summaries) + len(_named(summaries)))))
        axes = figure.add_subplot()
        ticks = _draw_rows(axes, summaries, patience_s)
        axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
        axes.set_xscale("log")
        axes.set_xlim(_LEAST_S, patience_s * 2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.invert_yaxis()
        axes.set_xlabel("seconds without training, from the fault or the change to the first finished step (log)")
        axes.grid(visible=True, axis="x", color=LIGHT["line"], linewidth=0.5)
        axes.set_axisbelow(True)
        used = [name for name in LAUNCHERS if any(each.launcher == name for each in summaries)]
        marks = [mpl.patches.Patch(color=_COLOURS[name], label=LAUNCHERS[name].title) for name in used]
        figure.legend(handles=marks, loc="upper center", ncols=len(marks))
        figure.savefig(path, dpi=_DPI, bbox_inches="tight", facecolor=LIGHT["paper"])


def _named(summaries: Sequence[Summary]) -> list[str]:
    return [name for name in SCENARIOS if any(each.scenario == name for each in summaries)]


def _draw_rows(axes: Axes, summaries: Sequence[Summary], patience_s: float) -> list[tuple[float, str]]:
    """Return where each scenario's name goes."""
    ticks, y = [], 0.0
    for name in _named(summaries):
        rows = [each for each in summaries if each.scenario == name]
        ticks.append((y + (len(rows) - 1) / 2, SCENARIOS[name].title))
        for row in rows:
            _draw_row(axes, y, row, patience_s)
            y += 1
        y += 1
    return ticks


def _draw_row(axes: Axes, y: float, row: Summary, patience_s: float) -> None:
    colour, is_never = _COLOURS[row.launcher], math.isinf(row.compared_s)
    shown_s = patience_s if is_never else row.compared_s
    axes.barh(y, shown_s - _LEAST_S, left=_LEAST_S, height=0.8, color=colour, alpha=0.35 if is_never else 1.0)
    samples = row.pauses if row.scenario in PLANNED else row.seconds
    finite = [each for each in samples if math.isfinite(each)]
    axes.plot(finite, [y] * len(finite), ".", color=LIGHT["ink"], markersize=2, alpha=0.5)
    missing = row.n - row.recovered
    label = f"{shown_s:.2f} s" if not is_never else f"> {patience_s:g} s"
    beside = max([shown_s, *finite]) * 1.08
    axes.text(beside, y, label + (f", {missing} of {row.n} never" if missing else ""), va="center", fontsize=6.5)
