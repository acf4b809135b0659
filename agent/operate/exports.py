"""Commands that write files: a job's report, and an incident for the simulator."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from agent.errors import ConfigError
from agent.observe.incident_export import exported_incident
from agent.observe.quantities import count, percent
from agent.observe.report.run_history import RunHistory
from agent.operate.jobs import open_job, read_incidents, read_view
from agent.operate.prompts import print_result
from agent.operate.target import Target


def report_job(target: Target, out: Path, png: Path | None, *, as_json: bool) -> int:
    """Write the report of a job's current run. Raises `ConfigError` if there is no such job, or it cannot be drawn."""
    try:
        from agent.observe.report import figures, page  # noqa: PLC0415 - matplotlib is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the report is drawn with matplotlib, and {error.name} is not installed: pip install matplotlib"
        ) from None
    history = _read_run_history(target)
    drawn = figures.draw(history)
    _write(out, page.page(history, drawn).encode())
    if png is not None:
        parts = (figures.headline(page.headlines(history)), drawn.timeline, drawn.downtime)
        _write(png, figures.png([part for part in parts if part is not None]))
    statistics = history.statistics
    what = f"{count(statistics.incidents, 'incident')}, goodput {percent(statistics.goodput)}"
    files = {"out": str(out), "png": str(png) if png is not None else None}
    where = " and ".join(name for name in files.values() if name is not None)
    message = f"{what}; see {where}"
    return print_result(history.job_id, "report", message, as_json=as_json, **files, statistics=statistics)


def _read_run_history(target: Target) -> RunHistory:
    with open_job(target, only_live=False) as (store, keys):
        view, incidents = read_view(store, keys), read_incidents(store, keys)
    return RunHistory.of(keys.job_id, view, incidents, time.time())


def export_incident(target: Target, group: int | None, out: Path | None, *, as_json: bool) -> int:
    """Write the incident that led to a group, in the form that `scripts/simulate --replay` reads.

    Args:
        target: the job.
        group: number of the group. None: the newest.
        out: the file. None: standard output.
        as_json: print the result as JSON; the file is JSON in any case.

    Raises:
        ConfigError: there is no record of the group, or the file cannot be written.
    """
    with open_job(target, only_live=False) as (store, keys):
        view, incidents = read_view(store, keys), {each.group: each for each in read_incidents(store, keys)}
    assert view.spec is not None  # noqa: S101 - callers find jobs by their spec
    number = max(incidents, default=0) if group is None else group
    if number not in incidents:
        recorded = ", ".join(map(str, incidents)) or "none"
        raise ConfigError(f"job {keys.job_id!r} has no record of group {number or 1}; recorded groups: {recorded}")
    exported = exported_incident(keys.job_id, view.spec.value, incidents[number], incidents.get(number - 1))
    content = msgspec.json.format(msgspec.json.encode(exported)) + b"\n"
    if out is None:
        click.echo(content, nl=False)
        return 0
    _write(out, content)
    message = f"group {number} ({exported.incident.cause}) is in {out}; scripts/simulate --replay {out} replays it"
    return print_result(keys.job_id, "incident export", message, as_json=as_json, group=number, out=str(out))


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
