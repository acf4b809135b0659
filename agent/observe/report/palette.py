"""Colours, names and markers of the figures.

Figures are drawn with the light colours. On a page each colour is a CSS variable, so that a dark theme can replace it.
"""

from __future__ import annotations

from agent.core.model import Cause
from agent.observe.goodput import REPLAY
from agent.observe.report.timeline import State

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1d2430",
    "faint": "#5c6675",
    "line": "#d9dee6",
    "training": "#4f8fc4",
    "recovering": "#c97f10",
    "stopped": "#d1495b",
    "waiting": "#8f8ba6",
    "detect": "#9a6fb0",
    "agree": "#d1615d",
    "stop": "#d5721c",
    "start": "#a98c10",
    "join": "#3f968d",
    "set-up": "#7d8f3a",
    "load": "#4a7fb5",
    "first-step": "#4f9546",
    "replay": "#8c7464",
    "fault": "#b3202f",
    "planned": "#33607f",
}
DARK = {
    "paper": "#14181f",
    "ink": "#e8ebf0",
    "faint": "#a3adbb",
    "line": "#39424f",
    "training": "#4a86b8",
    "recovering": "#e39a30",
    "stopped": "#d9596a",
    "waiting": "#8683a0",
    "detect": "#ab84c0",
    "agree": "#d9706c",
    "stop": "#e08a40",
    "start": "#dcbd4f",
    "join": "#68b0a8",
    "set-up": "#a9b95c",
    "load": "#5f93c6",
    "first-step": "#69ab5f",
    "replay": "#a58b79",
    "fault": "#ff7280",
    "planned": "#84b8dc",
}

PHASES = {
    "detect_s": ("detect", "detect", "until the leader detected it"),
    "agree_s": ("agree", "agree", "until the next group was written, including the wait for nodes"),
    "stop_s": ("stop", "stop", "until all processes of the old workers were gone"),
    "start_s": ("start", "start", "until the new workers had imported their modules"),
    "join_s": ("join", "join", "until they had joined a process group"),
    "set_up_s": ("set-up", "set-up", "until the script had set up and asked for the restore point"),
    "load_s": ("load", "load", "until they had loaded the restore point"),
    "first_step_s": ("first-step", "first step", "until the first step was done"),
    REPLAY: ("replay", "replayed steps", "steps made before the incident and again after it"),
}
"""Colour, name and meaning of each phase of the downtime."""

STATES: dict[State, str] = {
    "training": "training",
    "stopped": "stopped: until the old workers are gone",
    "recovering": "recovering: until the first step",
    "waiting": "waiting for nodes",
}

MARKERS: dict[Cause, str] = {
    "start": ">",
    "lost": "v",
    "failed": "X",
    "join": "^",
    "scale": "D",
    "drain": "<",
    "restart": "o",
    "port": "s",
    "wait": "P",
}
_PLANNED: frozenset[Cause] = frozenset({"start", "join", "scale", "drain", "restart"})


def is_planned(cause: Cause) -> bool:
    """Return whether the cause is a planned change rather than a fault."""
    return cause in _PLANNED
