"""The report's figures. Each is drawn once, and then taken both as SVG for the page and as pixels for the picture."""

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

from agent.core.totals import duration
from agent.observe.report.axes import ticks, unit, written
from agent.observe.report.palette import LIGHT, MARKERS, PHASES, STATES, is_planned
from agent.observe.report.story import Story
from agent.observe.report.timeline import State

_WIDTH_IN = 10.0
_DPI = 120
_FONT_PT = 8.0
_LABEL_MAX = 30
_LANE = -1.1
"""Where incidents are marked, above the first row."""
_LEGEND_IN, _BOTTOM_IN = 0.22, 0.45
"""A line of the legend; what the axis below needs."""
_LABELS_APART = 1 / 40
"""Of the width: numbers of groups that are nearer to each other than that are left out."""
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
    """A report's figures. None: there is nothing to draw yet."""

    timeline: Figure | None
    lost_time: Figure | None


def draw(story: Story) -> Figures:
    """Draw all of them."""
    return Figures(
        timeline=timeline(story) if story.outages else None,
        lost_time=lost_time(story) if story.costly else None,
    )


def timeline(story: Story) -> Figure:
    """A row per node over time, and every incident with its cause."""
    with mpl.rc_context(_STYLE):
        row_in = _row_in(len(story.rows))
        figure, (axes,) = _figure(story.rows, [row_in * (len(story.rows) + 1.6)], legend_lines=2, right=0.985)
        whole_s = max(story.end - story.begin, 0.1)
        _draw_spans(axes, story, row_in)
        _draw_incidents(axes, story, whole_s)
        axes.set(xlim=(0, whole_s), ylim=(len(story.rows) - 0.5, _LANE - 1.0))
        axes.set_xticks(at := ticks(whole_s), [written(each, whole_s) for each in at])
        axes.set_xlabel(f"{unit(whole_s)} since {'the oldest incident here' if story.is_cut else 'the first group'}")
        axes.set_yticks(range(len(story.rows)), [_short(name) for name in story.rows], fontsize=_font_pt(row_in))
        seen = {span.state for span in story.spans}
        _legend(figure, [_key(state, label) for state, label in STATES.items() if state in seen], line=0)
        _legend(figure, list(_cause_keys(story)), line=1)
    return figure


def _draw_spans(axes: Axes, story: Story, row_in: float) -> None:
    """Equal spans of neighbouring rows are one rectangle: a large job has a hundred thousand of them."""
    row_of = {name: index for index, name in enumerate(story.rows)}
    alike: dict[tuple[State, float, float], list[int]] = {}
    for span in story.spans:
        alike.setdefault((span.state, span.began_at, span.ended_at), []).append(row_of[span.node_id])
    boxes: dict[State, list[Rectangle]] = {}
    for (state, began_at, ended_at), rows in alike.items():
        for first, last in _runs(sorted(rows)):
            corner = (began_at - story.begin, first - 0.5)
            boxes.setdefault(state, []).append(Rectangle(corner, ended_at - began_at, last - first + 1))
    for state in sorted(boxes, key=list(STATES).index):
        found = boxes[state]
        thin = 0.0 if state == "training" else 0.7  # what is shorter than a pixel is still seen
        axes.add_collection(PatchCollection(found, facecolor=LIGHT[state], edgecolor=LIGHT[state], linewidth=thin))
    gap_pt = row_in * 72 * 0.22
    edges = [index - 0.5 for index in range(len(story.rows) + 1)]
    axes.hlines(edges, 0, 1, transform=axes.get_yaxis_transform(), color=LIGHT["paper"], linewidth=gap_pt)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours in a sorted sequence."""
    for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        found = [row for _, row in run]
        yield found[0], found[-1]


def _draw_incidents(axes: Axes, story: Story, whole_s: float) -> None:
    labelled_at = -whole_s
    for outage in story.outages:
        cause, at_s = outage.incident.cause, outage.began_at - story.begin
        colour = LIGHT["planned" if is_planned(cause) else "fault"]
        axes.vlines(at_s, _LANE, len(story.rows) - 0.5, color=colour, linewidth=0.5, alpha=0.55)
        (mark,) = axes.plot(at_s, _LANE, MARKERS[cause], color=colour, markersize=5, markeredgewidth=0, clip_on=False)
        mark.set_url(f"#incident-{outage.incident.group}")
        if at_s - labelled_at >= whole_s * _LABELS_APART:
            labelled_at = at_s
            number = str(outage.incident.group)
            axes.text(at_s, _LANE - 0.5, number, ha="center", va="bottom", color=LIGHT["faint"], fontsize=7)
    row_of = {name: index for index, name in enumerate(story.rows)}
    for fault in story.marks:
        if fault.node_id in row_of:
            at_s = fault.at - story.begin
            axes.plot(at_s, row_of[fault.node_id], "x", color=LIGHT["ink"], markersize=5, markeredgewidth=1.4)


def _cause_keys(story: Story) -> Iterator[Line2D]:
    seen = {each.incident.cause for each in story.outages}
    for cause, marker in MARKERS.items():
        if cause in seen:
            colour = LIGHT["planned" if is_planned(cause) else "fault"]
            yield Line2D([], [], color=colour, marker=marker, markeredgewidth=0, linewidth=0, markersize=5, label=cause)
    if story.marks:
        yield Line2D([], [], color=LIGHT["ink"], marker="x", linewidth=0, markersize=5, label="the node where it began")


def lost_time(story: Story) -> Figure:
    """Where the time went: of all incidents together, and of each."""
    names = [f"group {each.incident.group}: {each.incident.cause}" for each in story.costly]
    with mpl.rc_context(_STYLE):
        row_in = _row_in(len(names))
        figure, (above, below) = _figure(
            ["all together", *names], [0.4, row_in * (len(names) + 0.4)], legend_lines=1, right=0.91
        )
        _stack(above, [story.numbers.parts], ["all together"], _FONT_PT)
        _stack(below, [each.parts for each in story.costly], names, _font_pt(row_in))
        for label, outage in zip(below.get_yticklabels(), story.costly, strict=True):
            label.set_url(f"#incident-{outage.incident.group}")
        below.set_xlabel("seconds")
        _legend(figure, [_key(key, label) for key, label, _ in PHASES.values()], line=0)
    return figure


def _stack(axes: Axes, rows: Sequence[Mapping[str, float]], names: Sequence[str], font_pt: float) -> None:
    """A stacked bar per row, its sum beside it; one that is far longer than the others is cut."""
    sums = [sum(row.values()) for row in rows]
    limit = _limit(sums)
    begun = np.zeros(len(rows))
    for part, (key, _, _) in PHASES.items():
        lengths = np.array([row[part] for row in rows])
        axes.barh(range(len(rows)), lengths, left=begun, height=0.76, color=LIGHT[key], linewidth=0)
        begun += lengths
    for index, sum_s in enumerate(sums):
        said = duration(sum_s) if sum_s <= limit else f"» {duration(sum_s)}"
        axes.text(min(sum_s, limit) + limit * 0.006, index, said, va="center", fontsize=font_pt, color=LIGHT["ink"])
    axes.set(xlim=(0, limit), ylim=(len(rows) - 0.45, -0.55))
    axes.set_yticks(range(len(rows)), names, fontsize=font_pt)


def _limit(sums_s: Sequence[float]) -> float:
    """How far the axis goes: to the longest, unless it is one of few that would flatten all others."""
    ordered = sorted(sums_s)
    longest_s = ordered[-1]
    usual_s = ordered[(len(ordered) - 1) * 9 // 10] if len(ordered) > 3 else longest_s
    return max(longest_s if longest_s <= 6 * usual_s else 2 * usual_s, 0.01)


def headline(lines: Sequence[str]) -> Figure:
    """The picture's head: what the page says in its own letters."""
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
    """The figure for a page: its colours are the page's variables. Equal figures give equal text.

    Args:
        figure: drawn here.
        salt: another for each figure of one page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(' target="_blank"', "")  # links lead to other places of the same page
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def png(figures: Iterable[Figure]) -> bytes:
    """The figures, one below the other, as a PNG file's content."""
    buffer = io.BytesIO()
    imsave(buffer, np.vstack([_pixels(figure) for figure in figures]), format="png", dpi=_DPI)
    return buffer.getvalue()


def _pixels(figure: Figure) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format="rgba", facecolor=LIGHT["paper"], dpi=_DPI)
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(-1, int(_WIDTH_IN * _DPI), 4)


def _figure(
    labels: Sequence[str], heights_in: Sequence[float], *, legend_lines: int, right: float
) -> tuple[Figure, list[Axes]]:
    """Axes of these heights, one below the other, with space for the labels on the left and the legend above."""
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
    """Height of a row, in inches: smaller where there are many, and still to be read."""
    return max(0.115, min(0.26, 8.0 / max(rows, 1)))


def _font_pt(row_in: float) -> float:
    return min(_FONT_PT, row_in * 72 * 0.82)


def _short(label: str) -> str:
    """A label that fits: a long one keeps its beginning and its end."""
    return label if len(label) <= _LABEL_MAX else f"{label[: _LABEL_MAX // 2 - 1]}…{label[-_LABEL_MAX // 2 :]}"
