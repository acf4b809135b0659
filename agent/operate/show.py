"""Commands that show a job and change nothing."""

from __future__ import annotations

import sys

from agent.observe.status import job_status, print_status
from agent.operate.answers import print_json
from agent.operate.jobs import opened, read_view
from agent.operate.target import Target


def show_status(target: Target, *, as_json: bool) -> int:
    """Print a job's state. Raises `ConfigError` if there is no such job."""
    with opened(target, only_live=False) as (store, keys):
        status = job_status(keys.job_id, read_view(store, keys))
    if as_json:
        print_json(status)
    else:
        print_status(status, sys.stdout)
    return 0
