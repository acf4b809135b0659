"""The commands that tell of a job's incidents in a file.

elastic-agent report [--out report.html] [--png report.png]
elastic-agent incident export [GROUP] [--out FILE]
"""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli.commands import about_a_job
from agent.operate.target import Target

_FILE = click.Path(dir_okay=False, path_type=Path)


@about_a_job(
    "report",
    click.option("--out", type=_FILE, default="report.html", show_default=True, metavar="FILE", help="The page."),
    click.option("--png", type=_FILE, metavar="FILE", help="The same as a picture.  [default: none]"),
)
def report(target: Target, *, out: Path, png: Path | None, json: bool) -> int:
    """Write what happened to a job, where the time went and what was lost, as a page that opens from its file."""
    from agent.operate.exports import report_job  # noqa: PLC0415 - loads the etcd client: only when needed

    return report_job(target, out, png, as_json=json)


@about_a_job(
    "incident",
    click.argument("action", type=click.Choice(["export"])),
    click.argument("group", type=click.IntRange(min=1), required=False),
    click.option("--out", type=_FILE, metavar="FILE", help="Where to.  [default: standard output]"),
)
def incident(target: Target, *, action: str, group: int | None, out: Path | None, json: bool) -> int:  # noqa: ARG001
    """Write what led to GROUP as a file, from which the simulation plays it again. Default: the newest."""
    from agent.operate.exports import export_incident  # noqa: PLC0415 - as above

    return export_incident(target, group, out, as_json=json)


BY_NAME = {"report": report, "incident": incident}
