"""Where the agents of a job meet, by the command line.

In an etcd that is there (`--elastic_server`); in one that they bring themselves, where all machines are named
(`--ips`, as with fleetrun); or, where nothing is said of other machines, in a private one of this agent's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.cli.options import DEFAULT_CTRL_PORT, DEFAULT_SERVER, read_credentials
from agent.cli.slurm import Allocation, read_allocation
from agent.cli.standalone import claim
from agent.config import JobConfig, parse_np
from agent.errors import EXIT_TIMEOUT, ConfigError
from agent.local_etcd.ensemble import Ensemble, node_id_of
from agent.runtime import node_facts
from agent.store.access import ANONYMOUS, Access, CredentialOptions, Credentials, read_access, read_secret
from agent.store.certificates import issue

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """How this agent finds the others."""

    job: JobConfig
    access: Access
    """Without endpoints: a private etcd, which it starts itself."""
    address: str
    """Where the others reach this node."""
    node_id: str
    is_node_id_chosen: bool
    ensemble: Ensemble | None = None
    """The etcd that the job's agents bring, and what of it is here. None: they bring none."""
    preempted_code: int = 0
    """With which a node that a signal asks to leave does so: Slurm's user requeues the job then."""


def read_meeting(options: dict[str, Any], environ: Mapping[str, str]) -> Meeting:
    """By what was given, and in a task of Slurm's by what it was allotted. Raises `ConfigError`."""
    given = read_credentials(options)
    is_said = given.names_for_other_etcds or any(
        options[name] for name in ("job_id", "elastic_server", "ips", "standalone")
    )
    allocation = None if is_said else read_allocation(environ)
    if allocation is not None:
        return _allotted(options, given, allocation)
    if options["ips"]:
        return _brought(options, given)
    np_max = parse_np(options["np"] or "1")[1]
    is_alone = options["standalone"] or (not is_said and np_max == 1)
    return _private(options, given) if is_alone else _given(options, given)


def _given(options: dict[str, Any], given: CredentialOptions) -> Meeting:
    if options["job_id"] is None:
        raise ConfigError("--job_id is missing: name the job, the same on all of its nodes (or use --standalone)")
    access = read_access(options["elastic_server"] or DEFAULT_SERVER, given)
    address = options["address"] or node_facts.address_towards(access.endpoints[0])
    return _meeting(options, options["job_id"], options["np"], access, address)


def _private(options: dict[str, Any], given: CredentialOptions) -> Meeting:
    _refuse_etcd("a job on one machine runs", options, given.given())
    if parse_np(options["np"] or "1")[1] != 1:
        raise ConfigError(f"--standalone is one node: --np must be 1, not {options['np']}; see --nproc_per_node")
    job_id = options["job_id"] or claim(options["command"], Path(options["log_dir"]))
    return _meeting(options, job_id, options["np"], Access((), ANONYMOUS), options["address"] or _LOOPBACK)


def _brought(options: dict[str, Any], given: CredentialOptions) -> Meeting:
    if options["standalone"]:
        raise ConfigError("--standalone is one machine, and --ips names all of several: leave out one of them")
    machines = tuple(part.strip() for part in options["ips"].split(",") if part.strip())
    if len({*machines}) < len(machines):
        raise ConfigError(f"--ips={options['ips']} names a machine twice")
    own = node_facts.own_of(machines, options["address"])
    return _among(machines, own, options, given)


def _allotted(options: dict[str, Any], given: CredentialOptions, allocation: Allocation) -> Meeting:
    told = {**options, "job_id": allocation.job_id, "ctrl_port": options["ctrl_port"] or allocation.port}
    return replace(_among(allocation.machines, allocation.own, told, given), preempted_code=EXIT_TIMEOUT)


def _among(machines: tuple[str, ...], own: str, options: dict[str, Any], given: CredentialOptions) -> Meeting:
    """With these machines, and no etcd but the one that they bring."""
    _refuse_etcd("--ips brings", options, given.names_for_other_etcds)
    address = options["address"] or own
    if len(machines) == 1:  # nobody else needs the secret
        return _private({**options, "address": address}, CredentialOptions())
    if node_facts.is_loopback(node_facts.resolve(own)) and not all(
        node_facts.is_loopback(node_facts.resolve_if_there(each)) for each in machines
    ):
        raise ConfigError(
            f"--ips: {own} leads to a loopback address on this machine, where the others do not reach it (see "
            "/etc/hosts); give all machines by IP address"
        )
    if options["job_id"] is None and options["command"][0] == "-":
        raise ConfigError("--job_id is missing: a script from standard input has no name that could stand for the job")
    job_id = options["job_id"] or _job_id(machines, options["command"][0])
    tls = issue(read_secret(given), machines) if given.has_secret else None
    ensemble = Ensemble(job_id, machines, own, options["ctrl_port"] or DEFAULT_CTRL_PORT, tls)
    access = Access(ensemble.endpoints, Credentials(tls))
    node_id = options["node_id"] or node_id_of(own)
    meeting = _meeting(options, job_id, options["np"] or str(len(machines)), access, address, node_id)
    if meeting.job.np_max > len(machines):
        raise ConfigError(f"--np={options['np']} is more than the {len(machines)} machines in --ips")
    return replace(meeting, ensemble=ensemble)


def _job_id(machines: tuple[str, ...], script: str) -> str:
    """The same on all machines, in whatever order they are listed; another script is another job."""
    told = ",".join([*sorted(machines), Path(script).name])
    return f"ips-{hashlib.blake2b(told.encode(), digest_size=4).hexdigest()}"


def _refuse_etcd(what: str, options: dict[str, Any], given: Sequence[str]) -> None:
    """What is said of an etcd has no meaning then, and hints at a mistake."""
    wrong = ("--elastic_server",) if options["elastic_server"] else given
    if wrong:
        raise ConfigError(f"{what} an etcd of its own: leave out {wrong[0]} (or unset its variable)")


def _meeting(
    options: dict[str, Any], job_id: str, np: str | None, access: Access, address: str, node_id: str | None = None
) -> Meeting:
    chosen = node_id or options["node_id"]
    return Meeting(
        job=JobConfig(job_id, *parse_np(np or "1"), fresh=options["fresh"]),
        access=access,
        address=address,
        node_id=chosen or node_facts.default_node_id(),
        is_node_id_chosen=chosen is not None,
    )
