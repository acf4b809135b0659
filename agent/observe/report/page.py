"""The report as a page: one file, without a script or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from agent.core.totals import count, duration, percent
from agent.observe.report.figures import Figures, svg
from agent.observe.report.html import Html, tag
from agent.observe.report.incidents import incident_list
from agent.observe.report.palette import DARK, LIGHT, PHASES, is_planned
from agent.observe.report.story import Story, moment

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Were there ever markup in a record's text, it could load and run nothing."""


def page(story: Story, drawn: Figures) -> str:
    """The whole file."""
    title = f"elastic-agent: job {story.job_id}"
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(_style())),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *_body(story, drawn)), lang='en')}\n"


def _style() -> str:
    light, dark = (" ".join(f"--{name}: {colour};" for name, colour in each.items()) for each in (LIGHT, DARK))
    themes = (
        f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ @media not print {{ :root {{ {dark} }} }} }}\n"
    )
    return themes + resources.files("agent.observe.report").joinpath("page.css").read_text(encoding="utf-8")


def _body(story: Story, drawn: Figures) -> Iterator[Html]:
    yield _header(story)
    yield _numbers(story)
    if drawn.timeline is not None:
        label = "What each node did over time, and the incidents"
        yield tag("h2", "What happened")
        yield tag("figure", Html(svg(drawn.timeline, "timeline")), role="img", aria_label=label)
    if drawn.lost_time is not None:
        label = "Seconds lost by phase, of all incidents together and of each"
        yield tag("h2", "Where the lost time went")
        yield tag("figure", Html(svg(drawn.lost_time, "lost-time")), role="img", aria_label=label)
        by_cause = tag("section", tag("h2", "By cause"), _by_cause(story))
        yield tag("div", tag("section", tag("h2", "By phase"), _parts(story)), by_cause, class_="beside")
    yield tag("h2", "Incidents")
    yield incident_list(story)
    yield tag("footer", tag("p", f"Made of the job's records as they were at {moment(story.now)}."))


def _header(story: Story) -> Html:
    title = tag("h1", f"Job {story.job_id} ", tag("span", story.state, class_=f"state {story.state}"))
    size = f"np {story.spec.np} · run {story.spec.run}"
    when = f"{moment(story.begin)} to {moment(story.end)}, {duration(max(0.0, story.end - story.begin))}"
    lines = [tag("p", f"{size} · {when}", class_="faint")]
    if story.result is not None:
        lines.append(tag("p", f"It has {story.state}: {story.result.reason}."))
        lines += [tag("p", f"{story.result.summary}.")] * bool(story.result.summary)
    elif story.group is not None:
        lines.append(tag("p", f"Group {story.group.number}, because of {story.group.cause}: {story.group.reason}."))
    if story.is_cut:
        kept = "Only the newest 200 incidents are kept: the figures begin with the oldest of these, the sums do not."
        lines.append(tag("p", kept, class_="faint"))
    return tag("header", title, *lines)


def _numbers(story: Story) -> Html:
    found = story.numbers
    tiles = (
        ("goodput", percent(found.goodput)),
        ("lost in all", duration(found.totals.lost_s)),
        ("incidents", str(found.totals.incidents)),
        ("steps done again", str(found.totals.redone)),
    )
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles), class_="numbers")


def _parts(story: Story) -> Html:
    whole_s = sum(story.numbers.parts.values()) or 1.0
    rows = [
        tag(
            "tr",
            tag("td", tag("span", class_="swatch", style=f"background: var(--{colour})"), name),
            tag("td", duration(story.numbers.parts[part]), class_="number"),
            tag("td", f"{story.numbers.parts[part] / whole_s:.0%}", class_="number"),
            tag("td", meaning, class_="faint"),
        )
        for part, (colour, name, meaning) in PHASES.items()
    ]
    return tag("table", tag("tbody", *rows), class_="small")


def _by_cause(story: Story) -> Html:
    names = (("cause", ""), ("incidents", "number"), ("lost", "number"), ("steps done again", "number"))
    head = tag("tr", *(tag("th", name, class_=kind) for name, kind in names))
    rows = [
        tag(
            "tr",
            tag("td", each.cause, class_="cause" if is_planned(each.cause) else "cause fault"),
            tag("td", str(each.incidents), class_="number"),
            tag("td", duration(each.lost_s), class_="number"),
            tag("td", str(each.redone), class_="number"),
        )
        for each in story.numbers.by_cause
    ]
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="small")


def headlines(story: Story) -> list[str]:
    """The page's first lines, for the picture."""
    found = story.numbers
    cost = f"goodput {percent(found.goodput)}   lost {duration(found.totals.lost_s)}   "
    cost += f"{count(found.totals.incidents, 'incident')}   {count(found.totals.redone, 'step')} done again"
    when = f"{moment(story.begin)} to {moment(story.end)}   np {story.spec.np}   run {story.spec.run}"
    causes = [f"{each.cause} {each.incidents} ({duration(each.lost_s)})" for each in story.numbers.by_cause]
    return [f"Job {story.job_id}: {story.state}", cost, when, *(["by cause: " + ", ".join(causes)] if causes else [])]
