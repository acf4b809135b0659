"""Colours of the figures. Drawn with the light ones; on the page each is a variable, so that it can be dark too."""

from __future__ import annotations

from agent.core.model import Cause
from agent.observe.goodput import REDONE
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
    "load": "#4a7fb5",
    "first-step": "#4f9546",
    "redone": "#8c7464",
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
    "load": "#5f93c6",
    "first-step": "#69ab5f",
    "redone": "#a58b79",
    "fault": "#ff7280",
    "planned": "#84b8dc",
}

PHASES = {
    "detect_s": ("detect", "detect", "until the leader knew"),
    "agree_s": ("agree", "agree", "until the next group was written, waiting for nodes included"),
    "stop_s": ("stop", "stop", "until nothing of the old workers was left"),
    "start_s": ("start", "start", "until the new ones had imported what they need"),
    "join_s": ("join", "join", "until they had met in a process group"),
    "load_s": ("load", "load", "until they had loaded what they begin from"),
    "first_step_s": ("first-step", "first step", "until the first step was done"),
    REDONE: ("redone", "done again", "steps that were made before, and made again"),
}
"""Of each part of the lost time: its colour, its name, what it is."""

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
    """Whether nothing was broken."""
    return cause in _PLANNED
