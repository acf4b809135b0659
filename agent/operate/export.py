"""An incident in a file, from which it can be played again."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from agent.errors import ConfigError
from agent.observe.incident_export import situation
from agent.operate.jobs import opened, read_incidents, read_view
from agent.operate.prompts import tell
from agent.operate.target import Target


def export_incident(target: Target, group: int | None, out: Path | None, *, as_json: bool) -> int:
    """Write what led to a group, the newest if none is named; to standard output if no file is.

    Raises:
        ConfigError: nothing is known of it, or the file cannot be written.
    """
    with opened(target, only_live=False) as (store, keys):
        view, incidents = read_view(store, keys), {each.group: each for each in read_incidents(store, keys)}
    assert view.spec is not None  # noqa: S101 - a job without one is not found in the first place
    number = max(incidents, default=0) if group is None else group
    if number not in incidents:
        there = ", ".join(map(str, incidents)) or "none"
        raise ConfigError(f"job {keys.job_id!r} has no record of a group {number or 1}: there are {there}")
    found = situation(keys.job_id, view.spec.value, incidents[number], incidents.get(number - 1))
    content = msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    if out is None:
        click.echo(content, nl=False)
        return 0
    try:
        out.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    what = f"group {number} ({found.incident.cause}) is in {out}; scripts/simulate --replay {out} plays it"
    return tell(keys.job_id, "incident export", what, as_json=as_json, group=number, out=str(out))
