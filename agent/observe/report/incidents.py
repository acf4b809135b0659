"""The page's list of incidents, each of which unfolds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from agent.core.incident import Incident, WorkerEnd
from agent.core.messages import cause_of, consequences, how_it_ended, how_near, rivals
from agent.core.totals import count, duration
from agent.observe.goodput import PARTS, Outage
from agent.observe.report.html import Html, join, tag
from agent.observe.report.palette import PHASES, is_planned
from agent.observe.report.story import Story, moment
from agent.observe.report.timeline import joined, left


def incident_list(story: Story) -> Html:
    """All that are kept, in the order of their groups."""
    if not story.outages:
        return tag("p", "None yet: no group was formed.", class_="faint")
    names = (("", ""), ("group", "number"), ("after", "number"), ("cause", ""), ("", ""))
    cost = (("lost", "number"), ("done again", "number"))
    heading = tag("div", *(tag("span", name, class_=kind) for name, kind in (*names, *cost)), class_="heading")
    before: list[Outage | None] = [None, *story.outages]
    rows = [_incident(each, then, story.begin) for each, then in zip(story.outages, before, strict=False)]
    return tag("div", heading, *rows, class_="incidents")


def _incident(outage: Outage, before: Outage | None, begin: float) -> Html:
    incident = outage.incident
    lost = "" if incident.is_first_start else duration(outage.cost_s)
    summary = tag(
        "summary",
        tag("span", str(incident.group), class_="number of-group"),
        tag("span", duration(max(0.0, outage.began_at - begin)), class_="number when"),
        tag("span", incident.cause, class_="cause" if is_planned(incident.cause) else "cause fault"),
        tag("span", cause_of(incident), class_="reason"),
        tag("span", lost, class_="number lost"),
        tag("span", count(incident.redone, "step") if incident.redone else "", class_="number redone"),
    )
    # A link to what is inside unfolds it.
    body = tag("div", *_body(outage, before), class_="body", id=f"incident-{incident.group}")
    return tag("details", summary, body, class_="incident")


def _body(outage: Outage, before: Outage | None) -> Iterator[Html]:
    incident = outage.incident
    reason = "" if incident.reason == cause_of(incident) else f": {incident.reason}"
    yield tag("p", f"{moment(incident.at)}{reason}.", class_="faint")
    if incident.ended:
        yield tag("h3", "First cause")
        yield _told(incident.ended[0], "")
        for each in rivals(incident.ended):
            yield _told(each, f", {how_near([each])} of that: either may be the first")
        yield from _consequences(consequences(incident.ended))
    yield tag("h3", "Time" if outage.ended_at is not None else "Time, up to now")
    yield _parts(outage)
    yield tag("h3", "Members")
    yield tag("p", *_members(incident, before.incident if before is not None else None))
    if incident.members:
        yield tag("h3", "Goes on")
        yield tag("p", _where(incident))


def _told(ended: WorkerEnd, rest: str) -> Html:
    words = ended.failure.traceback or ended.failure.tail
    quoted = tag("pre", words.strip("\n")) if words.strip() else Html()
    return join(tag("p", f"{how_it_ended(ended.node_id, ended.failure)}{rest}."), quoted)


def _consequences(died: Sequence[WorkerEnd]) -> Iterator[Html]:
    if died:
        yield tag("h3", "Died of it")
        yield tag("ul", *(tag("li", _told(each, f", {_later(each)}")) for each in died))


def _later(ended: WorkerEnd) -> str:
    said = f"{duration(max(0.0, ended.after_s))} later"
    return said if ended.error_s is not None else f"{said} by clocks that were never compared"


def _parts(outage: Outage) -> Html:
    known = [part for part in PARTS if outage.parts[part]]
    if not known:
        return tag("p", "Not known.")
    items = []
    for part in known:
        colour, name, _ = PHASES[part]
        swatch = tag("span", class_="swatch", style=f"background: var(--{colour})")
        items.append(tag("li", swatch, f"{name} {duration(outage.parts[part])}"))
    return tag("ul", *items, class_="parts")


def _members(incident: Incident, before: Incident | None) -> Iterator[str]:
    ends = accumulate(place.nproc for place in incident.members)
    named = (
        f"{place.node_id} (rank {end - 1})"
        if place.nproc == 1
        else f"{place.node_id} (ranks {end - place.nproc}-{end - 1})"
        for place, end in zip(incident.members, ends, strict=True)
    )
    yield ", ".join(named) or "Nobody: the job waits for nodes"
    if before is not None:
        changes = ((left(before, incident), "left"), (joined(before, incident), "joined"))
        yield "".join(f"; {', '.join(names)} {verb}" for names, verb in changes if names)
    yield "."


def _where(incident: Incident) -> str:
    begun = f"after step {incident.step}" if incident.step else "at the start"
    if not incident.redone:
        return f"{begun}; no step is done again." if incident.step else f"{begun}."
    work = f" ({duration(incident.redone * incident.step_s)} of work)" if incident.step_s else ""
    return f"{begun}; {count(incident.redone, 'step')} done again{work}."
