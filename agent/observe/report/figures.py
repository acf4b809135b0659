"""The report's figures. Each is drawn once, and saved both as SVG for the page and as pixels for the picture."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from agent.observe.quantities import duration
from agent.observe.report.palette import LIGHT, MARKERS, PHASES, STATES, is_planned
from agent.observe.report.run_history import RunHistory
from agent.observe.report.timeline import State

_WIDTH_IN = 10.0
_DPI = 120
_FONT_PT = 8.0
_LABEL_MAX = 30
_LANE = -1.1
"""Vertical position of the incident marks, above the first row."""
_LEGEND_IN, _BOTTOM_IN = 0.22, 0.45
"""Height of a legend line; space for the axis below."""
_LABEL_DISTANCE = 1 / 40
"""Least distance of two group numbers, as a share of the width; a nearer one is left out."""
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": _FONT_PT,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["faint"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": LIGHT["faint"],
    "ytick.color": LIGHT["line"],
    "ytick.labelcolor": LIGHT["ink"],
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Figures:
    """The report's figures. None: there is nothing to draw yet."""

    timeline: Figure | None
    downtime: Figure | None


def draw(history: RunHistory) -> Figures:
    """Draw all figures."""
    return Figures(
        timeline=timeline(history) if history.outages else None,
        downtime=downtime(history) if history.counted_outages else None,
    )


def timeline(history: RunHistory) -> Figure:
    """Draw a row per node over time, and every incident with its cause."""
    with mpl.rc_context(_STYLE):
        row_in = _row_in(len(history.rows))
        figure, (axes,) = _figure(history.rows, [row_in * (len(history.rows) + 1.6)], legend_lines=2, right=0.985)
        whole_s = max(history.end - history.begin, 0.1)
        _draw_spans(axes, history, row_in)
        _draw_incidents(axes, history, whole_s)
        axes.set(xlim=(0, whole_s), ylim=(len(history.rows) - 0.5, _LANE - 1.0))
        axes.set_xticks(at := ticks(whole_s), [tick_label(each, whole_s) for each in at])
        axes.set_xlabel(
            f"{axis_unit(whole_s)} since {'the oldest incident shown' if history.is_truncated else 'the first group'}"
        )
        axes.set_yticks(range(len(history.rows)), [_short(name) for name in history.rows], fontsize=_font_pt(row_in))
        seen = {span.state for span in history.spans}
        _legend(figure, [_key(state, label) for state, label in STATES.items() if state in seen], line=0)
        _legend(figure, list(_cause_keys(history)), line=1)
    return figure


def _draw_spans(axes: Axes, history: RunHistory, row_in: float) -> None:
    """Draw the spans; equal spans of adjacent rows become one rectangle, since a large job has 100,000 spans."""
    row_of = {name: index for index, name in enumerate(history.rows)}
    equal: dict[tuple[State, float, float], list[int]] = {}
    for span in history.spans:
        equal.setdefault((span.state, span.began_at, span.ended_at), []).append(row_of[span.node_id])
    boxes: dict[State, list[Rectangle]] = {}
    for (state, began_at, ended_at), rows in equal.items():
        for first, last in _runs(sorted(rows)):
            corner = (began_at - history.begin, first - 0.5)
            boxes.setdefault(state, []).append(Rectangle(corner, ended_at - began_at, last - first + 1))
    for state in sorted(boxes, key=list(STATES).index):
        found = boxes[state]
        thin = 0.0 if state == "training" else 0.7  # keeps spans shorter than a pixel visible
        axes.add_collection(PatchCollection(found, facecolor=LIGHT[state], edgecolor=LIGHT[state], linewidth=thin))
    gap_pt = row_in * 72 * 0.22
    edges = [index - 0.5 for index in range(len(history.rows) + 1)]
    axes.hlines(edges, 0, 1, transform=axes.get_yaxis_transform(), color=LIGHT["paper"], linewidth=gap_pt)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the first and last row of each run of adjacent rows in a sorted sequence."""
    for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        found = [row for _, row in run]
        yield found[0], found[-1]


def _draw_incidents(axes: Axes, history: RunHistory, whole_s: float) -> None:
    labelled_at = -whole_s
    for outage in history.outages:
        cause, at_s = outage.incident.cause, outage.began_at - history.begin
        colour = LIGHT["planned" if is_planned(cause) else "fault"]
        axes.vlines(at_s, _LANE, len(history.rows) - 0.5, color=colour, linewidth=0.5, alpha=0.55)
        (mark,) = axes.plot(at_s, _LANE, MARKERS[cause], color=colour, markersize=5, markeredgewidth=0, clip_on=False)
        mark.set_url(f"#incident-{outage.incident.group}")
        if at_s - labelled_at >= whole_s * _LABEL_DISTANCE:
            labelled_at = at_s
            number = str(outage.incident.group)
            axes.text(at_s, _LANE - 0.5, number, ha="center", va="bottom", color=LIGHT["faint"], fontsize=7)
    row_of = {name: index for index, name in enumerate(history.rows)}
    for fault in history.fault_marks:
        if fault.node_id in row_of:
            at_s = fault.at - history.begin
            axes.plot(at_s, row_of[fault.node_id], "x", color=LIGHT["ink"], markersize=5, markeredgewidth=1.4)


def _cause_keys(history: RunHistory) -> Iterator[Line2D]:
    seen = {each.incident.cause for each in history.outages}
    for cause, marker in MARKERS.items():
        if cause in seen:
            colour = LIGHT["planned" if is_planned(cause) else "fault"]
            yield Line2D([], [], color=colour, marker=marker, markeredgewidth=0, linewidth=0, markersize=5, label=cause)
    if history.fault_marks:
        yield Line2D([], [], color=LIGHT["ink"], marker="x", linewidth=0, markersize=5, label="the node of the fault")


def downtime(history: RunHistory) -> Figure:
    """Draw the downtime by phase: of all incidents together, and of each."""
    names = [f"group {each.incident.group}: {each.incident.cause}" for each in history.counted_outages]
    with mpl.rc_context(_STYLE):
        row_in = _row_in(len(names))
        figure, (above, below) = _figure(
            ["all incidents", *names], [0.4, row_in * (len(names) + 0.4)], legend_lines=1, right=0.91
        )
        _stack(above, [history.statistics.downtime_by_phase], ["all incidents"], _FONT_PT)
        _stack(below, [each.downtime_by_phase for each in history.counted_outages], names, _font_pt(row_in))
        for label, outage in zip(below.get_yticklabels(), history.counted_outages, strict=True):
            label.set_url(f"#incident-{outage.incident.group}")
        below.set_xlabel("seconds")
        _legend(figure, [_key(key, label) for key, label, _ in PHASES.values()], line=0)
    return figure


def _stack(axes: Axes, rows: Sequence[Mapping[str, float]], names: Sequence[str], font_pt: float) -> None:
    """Draw a stacked bar per row with its sum beside it. A bar far longer than the others is cut off."""
    sums = [sum(row.values()) for row in rows]
    limit = _limit(sums)
    begun = np.zeros(len(rows))
    for part, (key, _, _) in PHASES.items():
        lengths = np.array([row[part] for row in rows])
        axes.barh(range(len(rows)), lengths, left=begun, height=0.76, color=LIGHT[key], linewidth=0)
        begun += lengths
    for index, sum_s in enumerate(sums):
        label = duration(sum_s) if sum_s <= limit else f"» {duration(sum_s)}"
        axes.text(min(sum_s, limit) + limit * 0.006, index, label, va="center", fontsize=font_pt, color=LIGHT["ink"])
    axes.set(xlim=(0, limit), ylim=(len(rows) - 0.45, -0.55))
    axes.set_yticks(range(len(rows)), names, fontsize=font_pt)


def _limit(sums_s: Sequence[float]) -> float:
    """Return the end of the axis: the longest bar, unless a few bars are so long that all others would be flat."""
    ordered = sorted(sums_s)
    longest_s = ordered[-1]
    usual_s = ordered[(len(ordered) - 1) * 9 // 10] if len(ordered) > 3 else longest_s
    return max(longest_s if longest_s <= 6 * usual_s else 2 * usual_s, 0.01)


def headline(lines: Sequence[str]) -> Figure:
    """Draw the picture's heading, which the page has as text."""
    with mpl.rc_context(_STYLE):
        height_in = 0.25 + 0.22 * len(lines)
        figure = Figure(figsize=(_WIDTH_IN, height_in))
        for index, line in enumerate(lines):
            is_title = index == 0
            at = 1 - (0.3 + 0.22 * index) / height_in
            size, weight = (_FONT_PT + 5, "bold") if is_title else (_FONT_PT + 1, "normal")
            figure.text(0.02, at, line, fontsize=size, weight=weight)
    return figure


def svg(figure: Figure, salt: str) -> str:
    """Return a figure as SVG whose colours are CSS variables of the page. Equal figures give equal text.

    Args:
        figure: drawn by this module.
        salt: makes element ids unique; different for each figure of a page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(' target="_blank"', "")  # links stay within the page
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def png(figures: Iterable[Figure]) -> bytes:
    """Return the figures, one below the other, as the content of a PNG file."""
    buffer = io.BytesIO()
    imsave(buffer, np.vstack([_pixels(figure) for figure in figures]), format="png", dpi=_DPI)
    return buffer.getvalue()


def _pixels(figure: Figure) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format="rgba", facecolor=LIGHT["paper"], dpi=_DPI)
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(-1, int(_WIDTH_IN * _DPI), 4)


# Time axes

_TICK_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 604800),
)


def ticks(until_s: float, most: int = 9) -> list[float]:
    """Return at most `most` round times from 0 to `until_s`."""
    longest = _TICK_STEPS_S[-1]
    step = next((each for each in _TICK_STEPS_S if until_s / each < most), longest * (1 + until_s // longest // most))
    return [index * step for index in range(int(until_s / step) + 1)]


def tick_label(at_s: float, until_s: float) -> str:
    """Return the label of a time on an axis that ends at `until_s`, in the unit that `axis_unit` names."""
    if until_s < 120:
        return f"{at_s:g}"
    if until_s < 7200:
        return f"{int(at_s) // 60}:{int(at_s) % 60:02d}"
    if until_s < 4 * 86400:
        return f"{int(at_s) // 3600}:{int(at_s) // 60 % 60:02d}"
    return f"{at_s / 86400:g}"


def axis_unit(until_s: float) -> str:
    """Return the unit of the labels on an axis that ends at `until_s`."""
    if until_s < 120:
        return "seconds"
    if until_s < 7200:
        return "minutes:seconds"
    return "hours:minutes" if until_s < 4 * 86400 else "days"


# Layout


def _figure(
    labels: Sequence[str], heights_in: Sequence[float], *, legend_lines: int, right: float
) -> tuple[Figure, list[Axes]]:
    """Create axes of these heights, one below the other, with space for labels on the left and the legend above."""
    gap_in, above_in = 0.4, 0.14 + _LEGEND_IN * legend_lines
    height_in = above_in + sum(heights_in) + gap_in * (len(heights_in) - 1) + _BOTTOM_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    longest = max((len(_short(label)) for label in labels), default=0)
    left, top_in, all_axes = 0.02 + longest * 0.0068, height_in - above_in, []
    for each_in in heights_in:
        box = (left, (top_in - each_in) / height_in, right - left, each_in / height_in)
        all_axes.append(figure.add_axes(box))
        top_in -= each_in + gap_in
    return figure, all_axes


def _key(colour: str, label: str) -> Patch:
    return Patch(color=LIGHT[colour], label=label)


def _legend(figure: Figure, keys: Sequence[Patch | Line2D], *, line: int) -> None:
    top = 1 - (0.04 + _LEGEND_IN * line) / figure.get_figheight()
    figure.legend(
        handles=list(keys), loc="upper left", bbox_to_anchor=(0.01, top), ncols=9, columnspacing=1.3, borderpad=0.1
    )


def _row_in(rows: int) -> float:
    """Return the height of a row in inches: smaller with more rows, but readable."""
    return max(0.115, min(0.26, 8.0 / max(rows, 1)))


def _font_pt(row_in: float) -> float:
    return min(_FONT_PT, row_in * 72 * 0.82)


def _short(label: str) -> str:
    """Shorten a long label to its beginning and its end."""
    return label if len(label) <= _LABEL_MAX else f"{label[: _LABEL_MAX // 2 - 1]}…{label[-_LABEL_MAX // 2 :]}"
