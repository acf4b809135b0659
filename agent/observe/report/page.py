"""The report as a page: a single file without scripts and without references to other files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from itertools import accumulate

from agent.core.incident import Incident, WorkerEnd
from agent.observe.goodput import DOWNTIME_PHASES, Outage
from agent.observe.messages import REPLAY_NOT_KNOWN, cause_of, consequences, describe, how_it_ended, how_near, rivals
from agent.observe.quantities import bounds, count, duration, percent, replayed
from agent.observe.report.figures import Figures, svg
from agent.observe.report.palette import DARK, LIGHT, PHASES, is_planned
from agent.observe.report.run_history import RunHistory, moment
from agent.observe.report.timeline import joined, left

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Second line of defence: markup from a record's text, if any got through, could neither load nor run anything."""


# HTML whose text cannot become markup: only what these functions make is taken as it is, everything else is escaped.


class Html(str):
    """Markup."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str) -> Html:
    """Return an element. Text in its content and in its attributes is escaped.

    Args:
        name: the element's name.
        content: elements and text.
        attributes: by name; a trailing underscore is dropped (`class_`), other underscores become hyphens.
    """
    text = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{text}>{join(*content)}</{name}>")


def join(*content: str) -> Html:
    """Concatenate elements and text."""
    return Html("".join(each if isinstance(each, Html) else escape(each) for each in content))


# The page


def page(history: RunHistory, figures: Figures) -> str:
    """Return the content of the file."""
    title = f"elastic-agent: job {history.job_id}"
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(_style())),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *_body(history, figures)), lang='en')}\n"


def _style() -> str:
    light, dark = (" ".join(f"--{name}: {colour};" for name, colour in each.items()) for each in (LIGHT, DARK))
    themes = (
        f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ @media not print {{ :root {{ {dark} }} }} }}\n"
    )
    return themes + resources.files("agent.observe.report").joinpath("page.css").read_text(encoding="utf-8")


def _body(history: RunHistory, figures: Figures) -> Iterator[Html]:
    yield _header(history)
    yield _statistics(history)
    if figures.timeline is not None:
        label = "What each node did over time, and the incidents"
        yield tag("h2", "What happened")
        yield tag("figure", Html(svg(figures.timeline, "timeline")), role="img", aria_label=label)
    if figures.downtime is not None:
        label = "Downtime in seconds by phase, of all incidents together and of each"
        yield tag("h2", "Downtime")
        yield tag("figure", Html(svg(figures.downtime, "downtime")), role="img", aria_label=label)
        by_cause = tag("section", tag("h2", "By cause"), _by_cause(history))
        yield tag("div", tag("section", tag("h2", "By phase"), _by_phase(history)), by_cause, class_="beside")
    yield tag("h2", "Incidents")
    yield _incident_list(history)
    yield tag("footer", tag("p", f"From the job's records as of {moment(history.now)}."))


def _header(history: RunHistory) -> Html:
    title = tag("h1", f"Job {history.job_id} ", tag("span", history.state, class_=f"state {history.state}"))
    size = f"np {history.spec.np} · run {history.spec.run}"
    length = duration(max(0.0, history.end - history.begin))
    when = f"{moment(history.begin)} to {moment(history.end)}, {length}"
    lines = [tag("p", f"{size} · {when}", class_="faint")]
    if history.result is not None:
        lines.append(tag("p", f"The job has {history.state}: {describe(history.result.reason)}."))
        lines += [tag("p", f"{history.result.summary}.")] * bool(history.result.summary)
    elif history.group is not None:
        lines.append(
            tag("p", f"Group {history.group.number}, cause {history.group.cause}: {describe(history.group.reason)}.")
        )
    if history.is_truncated:
        kept = "Only the newest 200 incidents are kept. The figures show these; the sums are those of the whole run."
        lines.append(tag("p", kept, class_="faint"))
    return tag("header", title, *lines)


def _statistics(history: RunHistory) -> Html:
    statistics = history.statistics
    at_most, at_least = bounds(is_at_least=statistics.is_at_least)
    tiles = (
        ("goodput", at_most(percent(statistics.goodput))),
        ("downtime", at_least(duration(statistics.downtime_s))),
        ("incidents", str(statistics.incidents)),
        ("replayed steps", at_least(str(statistics.replayed_steps))),
    )
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles), class_="numbers")


def _by_phase(history: RunHistory) -> Html:
    by_phase = history.statistics.downtime_by_phase
    whole_s = sum(by_phase.values()) or 1.0
    rows = [
        tag(
            "tr",
            tag("td", tag("span", class_="swatch", style=f"background: var(--{colour})"), name),
            tag("td", duration(by_phase[phase]), class_="number"),
            tag("td", f"{by_phase[phase] / whole_s:.0%}", class_="number"),
            tag("td", meaning, class_="faint"),
        )
        for phase, (colour, name, meaning) in PHASES.items()
    ]
    return tag("table", tag("tbody", *rows), class_="small")


def _by_cause(history: RunHistory) -> Html:
    names = (("cause", ""), ("incidents", "number"), ("downtime", "number"), ("replayed steps", "number"))
    head = tag("tr", *(tag("th", name, class_=kind) for name, kind in names))
    rows = [
        tag(
            "tr",
            tag("td", each.cause, class_="cause" if is_planned(each.cause) else "cause fault"),
            tag("td", str(each.incidents), class_="number"),
            tag("td", duration(each.downtime_s), class_="number"),
            tag("td", str(each.replayed_steps), class_="number"),
        )
        for each in history.statistics.by_cause
    ]
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="small")


def headlines(history: RunHistory) -> list[str]:
    """Return the page's first lines, for the picture."""
    statistics = history.statistics
    at_most, at_least = bounds(is_at_least=statistics.is_at_least)
    cost = f"goodput {at_most(percent(statistics.goodput))}   downtime {at_least(duration(statistics.downtime_s))}   "
    cost += f"{count(statistics.incidents, 'incident')}   {at_least(replayed(statistics.replayed_steps))}"
    when = f"{moment(history.begin)} to {moment(history.end)}   np {history.spec.np}   run {history.spec.run}"
    causes = [f"{each.cause} {each.incidents} ({duration(each.downtime_s)})" for each in statistics.by_cause]
    by_cause = ["by cause: " + ", ".join(causes)] if causes else []
    return [f"Job {history.job_id}: {history.state}", cost, when, *by_cause]


# The list of incidents; each unfolds


def _incident_list(history: RunHistory) -> Html:
    if not history.outages:
        return tag("p", "None yet: no group was formed.", class_="faint")
    names = (("", ""), ("group", "number"), ("after", "number"), ("cause", ""), ("", ""))
    cost = (("downtime", "number"), ("replayed", "number"))
    heading = tag("div", *(tag("span", name, class_=kind) for name, kind in (*names, *cost)), class_="heading")
    before: list[Outage | None] = [None, *history.outages]
    rows = [_incident(each, last, history.begin) for each, last in zip(history.outages, before, strict=False)]
    return tag("div", heading, *rows, class_="incidents")


def _incident(outage: Outage, before: Outage | None, begin: float) -> Html:
    incident = outage.incident
    downtime = "" if incident.is_first_start else duration(outage.downtime_s)
    steps = count(incident.replayed_steps, "step") if incident.replayed_steps else ""
    summary = tag(
        "summary",
        tag("span", str(incident.group), class_="number of-group"),
        tag("span", duration(max(0.0, outage.began_at - begin)), class_="number when"),
        tag("span", incident.cause, class_="cause" if is_planned(incident.cause) else "cause fault"),
        tag("span", cause_of(incident), class_="reason"),
        tag("span", downtime, class_="number downtime"),
        tag("span", "not known" if incident.is_at_least else steps, class_="number replayed"),
    )
    # The id is inside the element that unfolds, so that a link to it unfolds the element.
    body = tag("div", *_incident_body(outage, before), class_="body", id=f"incident-{incident.group}")
    return tag("details", summary, body, class_="incident")


def _incident_body(outage: Outage, before: Outage | None) -> Iterator[Html]:
    incident = outage.incident
    reason = describe(incident.reason)
    reason = "" if reason == cause_of(incident) else f": {reason}"
    yield tag("p", f"{moment(incident.at)}{reason}.", class_="faint")
    if incident.ended:
        yield tag("h3", "First cause")
        yield _worker_end(incident.ended[0], "")
        for each in rivals(incident.ended):
            yield _worker_end(each, f", {how_near([each])} of the first; either may be the cause")
        yield from _consequences(consequences(incident.ended))
    yield tag("h3", "Phases" if outage.ended_at is not None else "Phases so far")
    yield _phases(outage)
    yield tag("h3", "Members")
    yield tag("p", *_members(incident, before.incident if before is not None else None))
    if incident.phases.is_complete:
        yield tag("h3", "Resumed")
        yield tag("p", _where_it_resumed(incident))


def _worker_end(ended: WorkerEnd, rest: str) -> Html:
    output = ended.failure.traceback or ended.failure.tail
    quoted = tag("pre", output.strip("\n")) if output.strip() else Html()
    return join(tag("p", f"{how_it_ended(ended.node_id, ended.failure)}{rest}."), quoted)


def _consequences(failed: Sequence[WorkerEnd]) -> Iterator[Html]:
    if failed:
        yield tag("h3", "Failed as a result")
        yield tag("ul", *(tag("li", _worker_end(each, f", {_delay(each)}")) for each in failed))


def _delay(ended: WorkerEnd) -> str:
    delay = f"{duration(max(0.0, ended.after_s))} later"
    return delay if ended.error_s is not None else f"{delay} by clocks that were never compared"


def _phases(outage: Outage) -> Html:
    known = [phase for phase in DOWNTIME_PHASES if outage.downtime_by_phase[phase]]
    if not known:
        return tag("p", "Not known.")
    items = []
    for phase in known:
        colour, name, _ = PHASES[phase]
        swatch = tag("span", class_="swatch", style=f"background: var(--{colour})")
        items.append(tag("li", swatch, f"{name} {duration(outage.downtime_by_phase[phase])}"))
    return tag("ul", *items, class_="parts")


def _members(incident: Incident, before: Incident | None) -> Iterator[str]:
    ends = accumulate(member.nproc for member in incident.members)
    named = (
        f"{member.node_id} (rank {end - 1})"
        if member.nproc == 1
        else f"{member.node_id} (ranks {end - member.nproc}-{end - 1})"
        for member, end in zip(incident.members, ends, strict=True)
    )
    yield ", ".join(named) or "No members: the job waits for nodes"
    if before is not None:
        changes = ((left(before, incident), "left"), (joined(before, incident), "joined"))
        yield "".join(f"; {', '.join(names)} {verb}" for names, verb in changes if names)
    yield "."


def _where_it_resumed(incident: Incident) -> str:
    resumed = f"after step {incident.step}" if incident.step else "at the start"
    if incident.is_at_least:
        return f"{resumed}; {REPLAY_NOT_KNOWN}."
    if not incident.replayed_steps:
        return f"{resumed}; no step was replayed." if incident.reached is not None else f"{resumed}."
    work = f" ({duration(incident.replayed_steps * incident.step_s)} of work)" if incident.step_s else ""
    return f"{resumed}; {replayed(incident.replayed_steps)}{work}."
