"""Which incidents are over, each told once: for what counts, writes and sends them."""

from __future__ import annotations

from agent.core.incident import Incident
from agent.web.hub import KnownJobState


class FinishedIncidents:
    """Looks at the records as they change.

    Args:
        since: what was over before is nobody's news: seconds since 1970.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._run = ""
        self._told: set[int] = set()
        """Groups whose incidents are over."""

    def of(self, known: KnownJobState) -> list[Incident]:
        """Those that are over by now, and were not before. The first start of a run is one of them."""
        run = known.incidents[-1].run if known.incidents else self._run
        if run != self._run:
            self._run, self._told = run, set()
        over = [each for each in known.incidents if _is_over(each, known.last_group) and each.group not in self._told]
        self._told.update(each.group for each in over)
        return [each for each in over if each.at + each.phases.after_s >= self._since]


def _is_over(incident: Incident, last_group: int) -> bool:
    """Whether nothing will be added: its group has made a step, or was followed by another."""
    return incident.phases.is_complete or incident.group < last_group
