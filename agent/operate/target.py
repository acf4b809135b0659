"""The job that a command addresses, and the etcd that has its records."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from agent.errors import ConfigError
from agent.local_etcd.known_jobs import FoundJob, known_jobs
from agent.store.access import (
    ANONYMOUS,
    DEFAULT_SERVER,
    DEFAULT_STORE_TIMEOUT_S,
    PASSWORD_VARIABLE,
    Access,
    CredentialOptions,
    Credentials,
    parse_endpoints,
    read_access,
    read_credentials,
    read_secret,
)
from agent.store.certificates import issue

_QUICK_TIMEOUT_S = 5.0
_CONNECT_WITHIN_S = 1.0


@dataclass(frozen=True)
class Target:
    """The job as given on the command line, or as found on this machine."""

    server: Access
    job_id: str | None
    """None: the only live job in that etcd."""
    timeout_s: float
    """How long to try to reach etcd, in seconds."""
    ended_job: FoundJob | None = None
    """A job that ended on this machine, with the records that were kept. Used if the job is not in etcd."""


def read_target(options: dict[str, Any], *, is_silent: bool = False, changes: bool = False) -> Target:
    """Determine the job: unless an etcd is named, a job on this machine whose agent runs its etcd comes first.

    Args:
        options: the command's options.
        is_silent: do not print which of several jobs was chosen (the newest).
        changes: the command changes the job, so that the choice must be unambiguous.

    Raises:
        ConfigError: the options do not fit together; or there are several jobs, and one would be changed.
    """
    given, job_id = read_credentials(options), options["job_id"]
    timeout_s = min(options["store_timeout"] or DEFAULT_STORE_TIMEOUT_S, _QUICK_TIMEOUT_S)
    # A certificate or a user is for an etcd that an operator runs.
    is_named = options["elastic_server"] or given.names_for_other_etcds
    local = [] if is_named else [each for each in known_jobs() if job_id in {None, each.job.job_id}]
    if not local:
        return Target(read_access(options["elastic_server"] or DEFAULT_SERVER, given), job_id, timeout_s)
    found = local[0]
    server = Access(parse_endpoints(DEFAULT_SERVER), ANONYMOUS)
    if found.is_alive or not found.job.is_private:
        server = Access(found.job.endpoints, _credentials(found, given))
    if not found.is_alive:
        return Target(server, found.job.job_id if not found.job.is_private else job_id, timeout_s, found)
    if changes and job_id is None and is_listening(DEFAULT_SERVER):
        raise ConfigError(
            f"job {_named(found)} has an etcd of its own, and there is another etcd at {DEFAULT_SERVER}: choose the "
            "job with --job_id, or give --elastic_server"
        )
    if not is_silent:
        _report_choice([each for each in local if each.is_alive], changes=changes)
    return Target(server, found.job.job_id, timeout_s)


def is_listening(endpoint: str) -> bool:
    """Whether anything listens at this endpoint.

    Faster than an etcd client, which needs seconds to conclude that there is no etcd.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_WITHIN_S).close()
    except (OSError, ValueError):
        return False
    return True


def _credentials(found: FoundJob, given: CredentialOptions) -> Credentials:
    if found.job.has_secret and given.has_secret:
        return Credentials(issue(read_secret(given)))
    if found.job.has_secret and found.is_alive:
        raise ConfigError(
            f"the etcd of job {found.job.job_id!r} needs the secret that its machines share: give it in "
            f"{PASSWORD_VARIABLE} or with --etcd_password_file"
        )
    return ANONYMOUS


def _report_choice(alive: list[FoundJob], *, changes: bool) -> None:
    newest, *others = alive
    if others and changes:
        raise ConfigError(
            f"{len(alive)} jobs run here with an etcd of their own: {', '.join(map(_named, alive))}; choose one "
            "with --job_id"
        )
    if others:
        click.echo(
            f"elastic-agent: {len(alive)} jobs run here with an etcd of their own: using the newest, "
            f"{_named(newest)}; choose another with --job_id: {', '.join(map(_named, others))}",
            err=True,
        )


def _named(found: FoundJob) -> str:
    return f"{found.job.job_id} (in {found.job.directory})"


def report_ended(found: FoundJob) -> None:
    """Print that the records of an ended job are shown."""
    click.echo(f"elastic-agent: job {_named(found)} no longer runs here: showing its last records", err=True)


def kept_store_arguments(found: FoundJob) -> tuple[str, bytes, str, Path]:
    """Return the arguments of a `KeptStore`: job id, records, how the job can be continued, and log directory."""
    job = found.job
    how = f"the same command line in {shlex.quote(job.directory)} continues from its last checkpoint, if there is one"
    if not job.is_private:
        how = "it may still run on the other machines, which cannot be reached from here"
    return job.job_id, found.records(), how, Path(job.log_dir)


def nothing_to_change(found: FoundJob) -> ConfigError:
    """Return the error that a job which has ended cannot be changed."""
    return ConfigError(
        f"job {found.job.job_id!r}, the last job here with an etcd of its own, has ended: there is nothing to "
        "change; for a job elsewhere give --elastic_server"
    )
