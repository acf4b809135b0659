"""Where the agents of a job meet, according to the command line.

There are three places: an etcd that exists (`--elastic_server`); an etcd that the agents bring, if all machines are
listed (`--ips`, as with fleetrun, or an allocation of Slurm's); or, if nothing is said about other machines, a private
etcd of this agent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent import node_facts
from agent.cli.options import DEFAULT_CTRL_PORT
from agent.cli.slurm import Allocation, read_allocation
from agent.cli.standalone import claim_job_id
from agent.config import JobConfig, parse_np
from agent.errors import EXIT_TIMEOUT, ConfigError
from agent.local_etcd.ensemble import Ensemble, node_id_of
from agent.store.access import (
    ANONYMOUS,
    DEFAULT_SERVER,
    Access,
    CredentialOptions,
    Credentials,
    read_access,
    read_credentials,
    read_secret,
)
from agent.store.certificates import issue

_LOOPBACK = "127.0.0.1"
_JOB_INDEX = "JOB_COMPLETION_INDEX"
"""Variable that Kubernetes sets in the pods of an Indexed Job."""


@dataclass(frozen=True)
class Rendezvous:
    """How this agent finds the others."""

    job: JobConfig
    access: Access
    """Endpoints and credentials of etcd. Without endpoints the agent starts a private etcd."""
    address: str
    """Where the others reach this node."""
    node_id: str
    is_node_id_chosen: bool
    """False: it is the host name."""
    ensemble: Ensemble | None = None
    """The etcd that the job's agents bring, and this machine's member of it. None: they bring none."""
    preempted_code: int = 0
    """Exit code of an agent that a signal has asked to leave.

    Under Slurm another code than 0 makes the batch script requeue the job. In an Indexed Job of Kubernetes it makes the
    controller replace the pod: 0 would say that the work of this index is done.
    """


def read_rendezvous(options: dict[str, Any], environ: Mapping[str, str]) -> Rendezvous:
    """Read it from the options or, in a task of Slurm's without such options, from the allocation.

    Raises:
        ConfigError: the options contradict each other, or something is missing.
    """
    given = read_credentials(options)
    is_specified = bool(given.names_for_other_etcds) or any(
        options[name] for name in ("job_id", "elastic_server", "ips", "standalone")
    )
    allocation = None if is_specified else read_allocation(environ)
    is_replaced = allocation is not None or _JOB_INDEX in environ
    return replace(
        _read_meeting(options, given, allocation, is_specified=is_specified),
        preempted_code=EXIT_TIMEOUT if is_replaced else 0,
    )


def _read_meeting(
    options: dict[str, Any], given: CredentialOptions, allocation: Allocation | None, *, is_specified: bool
) -> Rendezvous:
    if allocation is not None:
        return _with_allocation(options, given, allocation)
    if options["ips"]:
        return _with_machine_list(options, given)
    np_max = parse_np(options["np"] or "1")[1]
    is_alone = options["standalone"] or (not is_specified and np_max == 1)
    return _with_private_etcd(options, given) if is_alone else _with_existing_etcd(options, given)


def _with_existing_etcd(options: dict[str, Any], given: CredentialOptions) -> Rendezvous:
    if options["job_id"] is None:
        raise ConfigError("--job_id is missing: name the job, the same on all of its nodes (or use --standalone)")
    access = read_access(options["elastic_server"] or DEFAULT_SERVER, given)
    address = options["address"] or node_facts.address_towards(access.endpoints[0])
    return _rendezvous(options, options["job_id"], options["np"], access, address)


def _with_private_etcd(options: dict[str, Any], given: CredentialOptions) -> Rendezvous:
    _refuse_etcd("a job on one machine runs", options, given.given())
    if parse_np(options["np"] or "1")[1] != 1:
        raise ConfigError(f"--standalone is one node: --np must be 1, not {options['np']}; see --nproc_per_node")
    job_id = options["job_id"] or claim_job_id(
        options["command"], Path(options["log_dir"]), keeps_checkpoints=bool(options.get("checkpoint_dir"))
    )
    return _rendezvous(options, job_id, options["np"], Access((), ANONYMOUS), options["address"] or _LOOPBACK)


def _with_machine_list(options: dict[str, Any], given: CredentialOptions) -> Rendezvous:
    if options["standalone"]:
        raise ConfigError("--standalone is one machine, and --ips names all of several: leave out one of them")
    machines = tuple(part.strip() for part in options["ips"].split(",") if part.strip())
    if len({*machines}) < len(machines):
        raise ConfigError(f"--ips={options['ips']} names a machine twice")
    own = node_facts.own_of(machines, options["address"])
    return _with_machines(machines, own, options, given)


def _with_allocation(options: dict[str, Any], given: CredentialOptions, allocation: Allocation) -> Rendezvous:
    completed = {**options, "job_id": allocation.job_id, "ctrl_port": options["ctrl_port"] or allocation.port}
    return _with_machines(allocation.machines, allocation.own, completed, given)


def _with_machines(
    machines: tuple[str, ...], own: str, options: dict[str, Any], given: CredentialOptions
) -> Rendezvous:
    """The rendezvous of a job on these machines, whose agents bring etcd.

    Args:
        machines: all of them, by name or address.
        own: this one.
        options: of the command line.
        given: credentials; of these only a secret is used, from which the machines derive certificates.
    """
    _refuse_etcd("--ips brings", options, given.names_for_other_etcds)
    address = options["address"] or own
    if len(machines) == 1:  # there is no other machine that needs the secret
        return _with_private_etcd({**options, "address": address}, CredentialOptions())
    if node_facts.is_loopback(node_facts.resolve(own)) and not all(
        node_facts.is_loopback(node_facts.resolve_if_there(each)) for each in machines
    ):
        raise ConfigError(
            f"--ips: {own} leads to a loopback address on this machine, where the others do not reach it (see "
            "/etc/hosts); give all machines by IP address"
        )
    if options["job_id"] is None and options["command"][0] == "-":
        raise ConfigError("--job_id is missing: a script from standard input has no name that could stand for the job")
    job_id = options["job_id"] or _derive_job_id(machines, options["command"][0])
    tls = issue(read_secret(given), machines) if given.has_secret else None
    ensemble = Ensemble(job_id, machines, own, options["ctrl_port"] or DEFAULT_CTRL_PORT, tls)
    access = Access(ensemble.endpoints, Credentials(tls))
    node_id = options["node_id"] or node_id_of(own)
    found = _rendezvous(options, job_id, options["np"] or str(len(machines)), access, address, node_id)
    if found.job.np_max > len(machines):
        raise ConfigError(f"--np={options['np']} is more than the {len(machines)} machines in --ips")
    return replace(found, ensemble=ensemble)


def _derive_job_id(machines: tuple[str, ...], script: str) -> str:
    """A job id that is the same on all machines, in whatever order they are listed. Another script is another job."""
    identity = ",".join([*sorted(machines), Path(script).name])
    return f"ips-{hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()}"


def _refuse_etcd(subject: str, options: dict[str, Any], given: Sequence[str]) -> None:
    """Raise `ConfigError` for options about another etcd: they would have no effect, and hint at a mistake."""
    wrong = ("--elastic_server",) if options["elastic_server"] else given
    if wrong:
        raise ConfigError(f"{subject} an etcd of its own: leave out {wrong[0]} (or unset its variable)")


def _rendezvous(
    options: dict[str, Any], job_id: str, np: str | None, access: Access, address: str, node_id: str | None = None
) -> Rendezvous:
    chosen = node_id or options["node_id"]
    return Rendezvous(
        job=JobConfig(job_id, *parse_np(np or "1"), fresh=options["fresh"]),
        access=access,
        address=address,
        node_id=chosen or node_facts.default_node_id(),
        is_node_id_chosen=chosen is not None,
    )
