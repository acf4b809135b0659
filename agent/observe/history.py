"""A job's incidents in a table, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.core.incident import Incident, Phases
from agent.core.messages import cause_of, spent
from agent.core.totals import count

_PHASES = tuple(name.removesuffix("_s").replace("_", " ") for name in Phases.__struct_fields__)
_NAMED = 4
"""So many members are named; of more, their number."""
_WIDTH = 160
"""Of what is no terminal, in characters."""


def as_data(incident: Incident) -> dict[str, Any]:
    """The record as a program reads it, with what follows from it."""
    data: dict[str, Any] = msgspec.to_builtins(incident)
    data["seconds"] = incident.phases.total_s
    data["is_complete"] = incident.phases.is_complete
    return data


def print_history(incidents: Sequence[Incident], out: TextIO, *, with_phases: bool) -> None:
    """Print incidents as a table, in their order."""
    table = Table("group", "when", "cause", "reason")
    phases = _PHASES if with_phases else ()
    for heading in (*phases, "seconds", "redone"):
        table.add_column(heading, justify="right")
    table.add_column("members")
    for incident in incidents:
        table.add_row(*_cells(incident, phases))
    console = Console(file=out, highlight=False, width=None if out.isatty() else _WIDTH)
    console.print(table)


def _cells(incident: Incident, phases: Sequence[str]) -> list[Text]:
    """As text: a reason may hold what rich would take for its own mark-up."""
    known = dict(spent(incident.phases))
    names = [place.node_id for place in incident.members]
    cells = [
        str(incident.group),
        f"{datetime.fromtimestamp(incident.at).astimezone():%m-%d %H:%M:%S}",
        incident.cause,
        cause_of(incident),
        *(f"{known[name]:.2f}" if name in known else "" for name in phases),
        f"{incident.phases.total_s:.2f}" + ("" if incident.phases.is_complete else "+") if known else "",
        str(incident.redone or ""),
        ", ".join(names) if len(names) <= _NAMED else count(len(names), "node"),
    ]
    return [Text(cell) for cell in cells]
