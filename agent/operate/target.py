"""Which job a command is about, and where it is."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from agent.cli.options import DEFAULT_SERVER, DEFAULT_STORE_TIMEOUT_S, read_credentials
from agent.errors import ConfigError
from agent.local_etcd.known_jobs import FoundJob, known_jobs
from agent.store.access import (
    ANONYMOUS,
    PASSWORD_VARIABLE,
    Access,
    CredentialOptions,
    Credentials,
    parse_endpoints,
    read_access,
    read_secret,
)
from agent.store.certificates import issue

_QUICK_TIMEOUT_S = 5.0
_CALL_WITHIN_S = 1.0


@dataclass(frozen=True)
class Target:
    """As given on the command line, or found on this machine."""

    server: Access
    job_id: str | None
    """None: the only live one there."""
    timeout_s: float
    """How long to try to reach etcd."""
    left: FoundJob | None = None
    """What an agent has left here of its job; it is meant if there is none in etcd."""


def read_target(options: dict[str, Any], *, is_silent: bool = False, changes: bool = False) -> Target:
    """The job that is meant: where etcd is not named, one whose agent on this machine has brought it.

    Of several the newest is taken; a line says so, unless `is_silent`.

    Raises:
        ConfigError: what is given does not fit; or there are several, and one is to be changed.
    """
    given, job_id = read_credentials(options), options["job_id"]
    timeout_s = min(options["store_timeout"] or DEFAULT_STORE_TIMEOUT_S, _QUICK_TIMEOUT_S)
    # A certificate or a user is for an etcd that somebody runs.
    is_named = options["elastic_server"] or given.names_for_other_etcds
    here = [] if is_named else [each for each in known_jobs() if job_id in {None, each.job.job_id}]
    if not here:
        return Target(read_access(options["elastic_server"] or DEFAULT_SERVER, given), job_id, timeout_s)
    found = here[0]
    server = Access(parse_endpoints(DEFAULT_SERVER), ANONYMOUS)
    if found.is_alive or not found.job.is_private:
        server = Access(found.job.endpoints, _credentials(found, given))
    if not found.is_alive:
        return Target(server, found.job.job_id if not found.job.is_private else job_id, timeout_s, found)
    if changes and job_id is None and listens(DEFAULT_SERVER):
        raise ConfigError(
            f"job {_named(found)} has an etcd of its own, and there is another etcd at {DEFAULT_SERVER}: say which job "
            "is meant with --job_id, or give --elastic_server"
        )
    if not is_silent:
        _tell_of_others([each for each in here if each.is_alive], changes=changes)
    return Target(server, found.job.job_id, timeout_s)


def listens(endpoint: str) -> bool:
    """Whether anything listens there. Quick, where it takes seconds to be sure that there is no etcd."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CALL_WITHIN_S).close()
    except (OSError, ValueError):
        return False
    return True


def _credentials(found: FoundJob, given: CredentialOptions) -> Credentials:
    if found.job.has_secret and given.has_secret:
        return Credentials(issue(read_secret(given)))
    if found.job.has_secret and found.is_alive:
        raise ConfigError(
            f"the etcd of job {found.job.job_id!r} wants the secret that its machines share: give it in "
            f"{PASSWORD_VARIABLE} or by --etcd_password_file"
        )
    return ANONYMOUS


def _tell_of_others(alive: list[FoundJob], *, changes: bool) -> None:
    newest, *others = alive
    if others and changes:
        raise ConfigError(
            f"{len(alive)} jobs run here with an etcd of their own: {', '.join(map(_named, alive))}; say which one "
            "with --job_id"
        )
    if others:
        click.echo(
            f"elastic-agent: {len(alive)} jobs run here with an etcd of their own: this is of the newest, "
            f"{_named(newest)}; --job_id says another: {', '.join(map(_named, others))}",
            err=True,
        )


def _named(found: FoundJob) -> str:
    return f"{found.job.job_id} (in {found.job.directory})"


def tell_of_left(found: FoundJob) -> None:
    """Say whose records are shown."""
    click.echo(f"elastic-agent: job {_named(found)} does not run here any more: this is what it left", err=True)


def records_of(found: FoundJob) -> tuple[str, bytes, str, Path]:
    """What a store is made of that has what was left: the job's id, records, how it goes on, and its logs."""
    job = found.job
    again = f"the same line in {shlex.quote(job.directory)} goes on from its last checkpoint"
    if not job.is_private:
        again = "on the other machines it may go on: they do not answer from here"
    return job.job_id, found.records(), again, Path(job.log_dir)


def no_change(found: FoundJob) -> ConfigError:
    """That a job which is left cannot be changed."""
    return ConfigError(
        f"job {found.job.job_id!r}, the last that ran here with an etcd of its own, has ended: there is nothing to "
        "change; for a job elsewhere give --elastic_server"
    )
