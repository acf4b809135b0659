"""An incident in sentences: what came first, who died of it, where the time went, and from where training went on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate

from agent.core.incident import Incident, IncidentMember, WorkerEnd
from agent.core.messages import SHOWN_S, consequences, how_it_ended, how_near, listed, rivals, spent
from agent.core.totals import count, duration

_DOING = {
    "detect": "to notice it",
    "agree": "to agree on the group",
    "stop": "to stop the workers",
    "start": "to start them",
    "join": "for all ranks to meet",
    "load": "to load what they begin from",
    "first step": "for the first step",
}
_CAUSES = {
    "start": "enough nodes were there",
    "lost": "a node was lost",
    "failed": "a worker failed",
    "join": "nodes joined",
    "scale": "np was changed",
    "drain": "nodes were to leave",
    "restart": "an operator asked for a restart",
    "port": "the master's port was taken",
    "wait": "too few nodes were left",
}


def explain(incident: Incident, before: Incident | None) -> list[str]:
    """The incident in sentences, each with what it quotes.

    Args:
        incident: the one in question.
        before: that of the group before, if it is known: says who left and who joined.
    """
    when = datetime.fromtimestamp(incident.at).astimezone()
    head = f"Group {incident.group} was formed at {when:%Y-%m-%d %H:%M:%S %Z}, because {_CAUSES[incident.cause]}."
    parts = [head, *_what_happened(incident), *_who_trains(incident, before)]
    if incident.members:
        parts += [_where_the_time_went(incident), _where_it_began(incident)]
    return [*parts, *_totals(incident)]


def _what_happened(incident: Incident) -> list[str]:
    ended = incident.ended
    if incident.cause != "failed" or not ended:
        others = [_also(each) for each in ended if not each.failure.is_peer_lost]
        return [f"The reason: {incident.reason}.", *_peers(ended), *others]
    first, later = ended[0], consequences(ended)
    said = [f"What came first: {how_it_ended(first.node_id, first.failure)}.{_last_words(first)}"]
    said += [_rival(each) for each in rivals(ended)]
    return [*said, *_peers(later), *(_later(each) for each in later if not each.failure.is_peer_lost)]


def _peers(ended: Sequence[WorkerEnd]) -> list[str]:
    """Those that died because the connection to another broke."""
    died = [
        f"rank {each.failure.rank} on {each.node_id} ({duration(each.after_s)} later: its connection broke)"
        for each in ended
        if each.failure.is_peer_lost
    ]
    return [f"Of that died {listed(died)}."] if died else []


def _also(ended: WorkerEnd) -> str:
    """Beside what was no worker's end: which of the two came first is not known."""
    return f"{_upper(how_it_ended(ended.node_id, ended.failure))} too.{_last_words(ended)}"


def _rival(ended: WorkerEnd) -> str:
    what = _upper(how_it_ended(ended.node_id, ended.failure))
    if ended.error_s is None:
        return f"{what} too; the clocks were never compared: either may be the cause.{_last_words(ended)}"
    return f"{what}, {how_near([ended])} of that: either may be the cause.{_last_words(ended)}"


def _later(ended: WorkerEnd) -> str:
    what = _upper(how_it_ended(ended.node_id, ended.failure))
    return f"{what}, {duration(ended.after_s)} later.{_last_words(ended)}"


def _last_words(ended: WorkerEnd) -> str:
    """The traceback, or the last lines, as a block of their own."""
    words = ended.failure.traceback or ended.failure.tail
    return f"\n{textwrap.indent(words.rstrip(), '    ')}" if words.strip() else ""


def _who_trains(incident: Incident, before: Incident | None) -> list[str]:
    now = [place.node_id for place in incident.members]
    then = [place.node_id for place in before.members] if before is not None and before.run == incident.run else []
    left, joined = [each for each in then if each not in now], [each for each in now if then and each not in then]
    moved = [f"{listed(names)} {verb}." for names, verb in ((left, "left"), (joined, "joined")) if names]
    if not now:
        return [*moved, "It has no members: the job waits for nodes."]
    world = count(sum(place.nproc for place in incident.members), "rank")
    return [*moved, f"It has {world} on {count(len(now), 'node')}: {listed(_with_ranks(incident.members))}."]


def _with_ranks(members: tuple[IncidentMember, ...]) -> list[str]:
    """`node-a (0-1)`."""
    ends = accumulate(place.nproc for place in members)
    return [f"{each.node_id} ({_range(end - each.nproc, end - 1)})" for each, end in zip(members, ends, strict=True)]


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _where_the_time_went(incident: Incident) -> str:
    phases = incident.phases
    if not spent(phases):
        return "How long that took is not known."
    parts = [f"{duration(each_s)} {_DOING[name]}" for name, each_s in spent(phases) if each_s >= SHOWN_S]
    known = f"{duration(phases.total_s)} {{}}{': ' if parts else ''}{listed(parts) if parts else ''}."
    if phases.is_complete:
        return "It took " + known.format("until every rank had made a step")
    return "That every rank made a step was not seen (yet); " + known.format("are known")


def _where_it_began(incident: Incident) -> str:
    if not incident.step:
        return "It began at the start, or its script commits no steps."
    began = f"It began after step {incident.step}"
    if incident.is_first_start or not incident.phases.is_complete:  # what is done again shows once all have begun
        return f"{began}."
    if not incident.redone:
        return f"{began}; no step was lost."
    work = f", {duration(incident.redone * incident.step_s)} of work" if incident.step_s else ""
    return f"{began}; {count(incident.redone, 'step')} had to be done again{work}."


def _totals(incident: Incident) -> list[str]:
    if incident.is_first_start:
        return []
    totals = incident.totals
    cost = f"{count(totals.incidents, 'incident')} had cost {duration(totals.lost_s)}"
    again = f", and {count(totals.redone, 'step')} done again" if totals.redone else ""
    return [f"Up to here {cost}{again}."]


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
