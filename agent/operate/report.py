"""A job's report: its incidents as a page, and as a picture."""

from __future__ import annotations

import time
from pathlib import Path

from agent.core.totals import count, percent
from agent.errors import ConfigError
from agent.observe.report.story import Story
from agent.operate.jobs import opened, read_incidents, read_view
from agent.operate.prompts import tell
from agent.operate.target import Target


def report_job(target: Target, out: Path, png: Path | None, *, as_json: bool) -> int:
    """Write the report of a job's current run. Raises `ConfigError` if there is no such job, or it cannot be drawn."""
    try:
        from agent.observe.report import figures, page  # noqa: PLC0415 - matplotlib is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the report is drawn with matplotlib, and {error.name} is not installed: "
            "pip install 'elastic-agent[report]'"
        ) from None
    story = read_story(target)
    drawn = figures.draw(story)
    _write(out, page.page(story, drawn).encode())
    if png is not None:
        parts = (figures.headline(page.headlines(story)), drawn.timeline, drawn.lost_time)
        _write(png, figures.png([part for part in parts if part is not None]))
    numbers = story.numbers
    what = f"{count(numbers.totals.incidents, 'incident')}, goodput {percent(numbers.goodput)}"
    files = {"out": str(out), "png": str(png) if png is not None else None}
    where = " and ".join(name for name in files.values() if name is not None)
    return tell(story.job_id, "report", f"{what}; see {where}", as_json=as_json, **files, numbers=numbers)


def read_story(target: Target) -> Story:
    """All that is told of a job's current run."""
    with opened(target, only_live=False) as (store, keys):
        view, incidents = read_view(store, keys), read_incidents(store, keys)
    return Story.of(keys.job_id, view, incidents, time.time())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
