"""From the options of a command line to an `AgentConfig`."""

from __future__ import annotations

import difflib
import math
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from agent.cli.run_options import FOR_RANKS
from agent.cli.slurm import allotted_gpus, leaf_switch
from agent.cli.standalone import checkpoints_of
from agent.config import (
    AgentConfig,
    HangConfig,
    HealthConfig,
    HttpConfig,
    NodeConfig,
    SnapshotConfig,
    TimingConfig,
    TimingOverrides,
    WorkerConfig,
    check_script,
    parse_bytes,
    parse_command,
)
from agent.console import ConsoleConfig, parse_ranks, parse_streams
from agent.errors import ConfigError
from agent.roles.plan import is_asked_for, plan
from agent.store.access import DEFAULT_STORE_TIMEOUT_S
from agent.web.access import read_token
from agent.web.address import parse_http
from agent.workers import devices
from agent.workers.numa import NumaBinding, bind_ranks
from trainer_runtime.object_store import require_place

_PACKAGES = {"s3": ("s3fs",), "gs": ("gcsfs",), "gcs": ("gcsfs",), "az": ("adlfs",), "abfs": ("adlfs",)}
"""What fsspec needs for a kind of object store, by the scheme of its URLs."""

STDIN_SCRIPT = "-"
"""Name of a script that is read from standard input, as for python."""


def read_config(options: dict[str, Any], gpus: tuple[str, ...], environ: Mapping[str, str]) -> AgentConfig:
    """The configuration of an agent.

    Args:
        options: of the current command line, by name.
        gpus: that were chosen; empty: none were.
        environ: that the user gave to the agent.

    Raises:
        ConfigError: a value is wrong, or two options contradict each other.
    """
    return _with_servers(options, gpus, environ) if is_asked_for(options) else read_node_config(options, gpus, environ)


def read_node_config(
    options: dict[str, Any], gpus: tuple[str, ...], environ: Mapping[str, str], *, has_servers: bool = False
) -> AgentConfig:
    """The same, without the processes of a job with parameter servers. `has_servers`: the job has them."""
    from agent import node_facts  # noqa: PLC0415 - only when needed
    from agent.cli.rendezvous import read_rendezvous  # noqa: PLC0415 - loads the etcd client: only when needed
    from agent.doctor.facts import Facts  # noqa: PLC0415 - as above
    from agent.runtime.agent_certificates import read_files  # noqa: PLC0415 - as above

    command = _command(options)
    rendezvous = read_rendezvous(options, environ)
    ensemble = rendezvous.ensemble
    nproc = devices.count_ranks(options["nproc_per_node"] or allotted_gpus(environ), gpus, environ)
    return AgentConfig(
        endpoints=rendezvous.access.endpoints,
        credentials=rendezvous.access.credentials,
        ensemble=ensemble,
        store_timeout_s=options["store_timeout"] or (math.inf if ensemble else DEFAULT_STORE_TIMEOUT_S),
        job=rendezvous.job,
        node=NodeConfig(
            node_id=rendezvous.node_id,
            is_node_id_chosen=rendezvous.is_node_id_chosen,
            address=rendezvous.address,
            ips=node_facts.resolve(rendezvous.address),
            position=ensemble.position if ensemble else 0,
            domain=options["fault_domain"] or leaf_switch(environ),
            nproc=nproc,
            cpus=_cpus(options["numa_binding"], nproc, gpus, environ),
        ),
        timing=TimingConfig(
            detect_within_s=options["detect_within"],
            overrides=TimingOverrides(options["lease"], options["link_heartbeat"], options["settle"]),
            kill_timeout_s=options["kill_timeout"],
            handoff_timeout_s=options["handoff_timeout"],
            handoff_wait_s=options["handoff_wait"],
            stop_grace_s=options["stop_grace"],
            elastic_timeout_s=options["elastic_timeout"],
            preempted_code=rendezvous.preempted_code,
        ),
        workers=WorkerConfig(
            command=command,
            log_dir=Path(options["log_dir"]).absolute(),
            checkpoint_dir=_place_of(options["checkpoint_dir"], command)
            or str(checkpoints_of(rendezvous.job.job_id).absolute()),
            console=_console(options),
            role=options["role"],
            max_restarts=0 if options["fault_tolerance_level"] == "0" else options["max_restarts"],
            ends_at_script_errors=_source_of("max_restarts") is ParameterSource.DEFAULT,
            progress_window_s=options["progress_window"],
            standby=options["standby"],
            stdin_rank=options["stdin_rank"],
            script_from_stdin=_read_script() if command[:2] == (sys.executable, STDIN_SCRIPT) else None,
        ),
        hang=HangConfig(options["hang_timeout"], options["hang_floor"], options["hang_factor"], options["hang_first"]),
        snapshots=SnapshotConfig(
            options["snapshot_overhead"], parse_bytes("--snapshot_memory", options["snapshot_memory"])
        ),
        http=_http(options),
        tls=read_files(options, has_servers=has_servers),
        events=options["events"],
        facts=Facts.here(script_file(options)).brief,
        health=HealthConfig(parse_command("--health_check", options["health_check"]), options["health_timeout"]),
        preemption_notice=parse_command("--preemption_notice", options["preemption_notice"]),
    )


def _with_servers(options: dict[str, Any], gpus: tuple[str, ...], environ: Mapping[str, str]) -> AgentConfig:
    """The configuration for a job with parameter servers. Its machines are those of its processes."""
    wrong = [name for name in FOR_RANKS if _source_of(name) is ParameterSource.COMMANDLINE]
    if wrong:
        raise ConfigError(f"--{wrong[0]} is for jobs of ranks: leave it out of one with parameter servers")
    roles = plan(options)
    if "://" in (options["checkpoint_dir"] or ""):
        raise ConfigError(
            "--checkpoint_dir of a parameter-server job must be a directory, into which servers write their rows, not "
            f"{options['checkpoint_dir']}"
        )
    if len(roles.machines) > 1 and not options["elastic_server"]:
        options = {**options, "ips": ",".join(roles.machines)}
    config = read_node_config(options, gpus, environ, has_servers=True)
    return replace(config, roles=roles, gpus=gpus or devices.detect(environ))


def _source_of(name: str) -> ParameterSource | None:
    return click.get_current_context().get_parameter_source(name)


def _http(options: dict[str, Any]) -> HttpConfig | None:
    if options["http"] is None:
        if options["http_token_file"] is not None:
            raise ConfigError("--http_token_file is for --http: say where the page is to be served")
        return None
    host, port = parse_http(options["http"])
    return HttpConfig(host, port, read_token(options["http_token_file"]))


def _command(options: dict[str, Any]) -> tuple[str, ...]:
    """The argv of the workers. Raises `ConfigError` if the script, module or program is not there."""
    if not options["command"]:
        raise ConfigError("no script was given: elastic-agent [options] script.py [arguments]; see --help")
    name, *arguments = options["command"]
    if options["module"] and options["no_python"]:
        raise ConfigError("--module and --no_python exclude each other")
    if options["module"]:
        _check_module(name)
        return (sys.executable, "-m", name, *arguments)
    if options["no_python"]:
        if shutil.which(name) is None:
            raise ConfigError(f"no program {name!r} on PATH")
        return (name, *arguments)
    if name != STDIN_SCRIPT:
        check_script(name, f" (-m runs a module, --no_python a program{_command_meant(name)})")
    return (sys.executable, name, *arguments)


def _command_meant(name: str) -> str:
    """End a hint with the command that was probably meant. Empty: none is like it."""
    from agent.cli.command_line import COMMANDS  # noqa: PLC0415 - that module imports this one

    near = difflib.get_close_matches(name.lower(), COMMANDS, 1, cutoff=0.75)
    return f"; the command is called {near[0]}" if near else ""


def script_file(options: dict[str, Any]) -> Path | None:
    """The file of the script. None: a module, a program or standard input is run."""
    name = options["command"][0]
    if options["module"] or options["no_python"] or name == STDIN_SCRIPT:
        return None
    return Path(name, "__main__.py") if Path(name).is_dir() else Path(name)


def _read_script() -> str:
    """Read the script from standard input, once for all ranks. Return the path of a file that holds it.

    The file exists as long as this process. Each rank runs as `python -`, also after a restart, and sees in `sys.argv`,
    tracebacks and `__main__` what it would see without the agent.
    """
    fd = os.memfd_create("elastic-agent:script", os.MFD_CLOEXEC)
    with suppress(OSError), open(0, "rb", closefd=False) as given, open(os.dup(fd), "wb") as script:  # noqa: PTH123
        shutil.copyfileobj(given, script)  # if nothing can be read the script is empty, as for python
    return f"/proc/{os.getpid()}/fd/{fd}"


def _check_module(name: str) -> None:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        found = find_spec(name.partition(".")[0])  # of the parent only: finding a submodule would import it
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove("")
    if found is None:
        raise ConfigError(f"no module {name!r} can be found from {Path.cwd()}")


def _cpus(
    binding: NumaBinding | None, nproc: int, gpus: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[tuple[int, ...], ...]:
    return tuple(bind_ranks(binding, nproc, devices.bus_ids(gpus, environ))) if binding else ()


def _console(options: dict[str, Any]) -> ConsoleConfig:
    default_ranks = "all" if options["local_ranks_filter"] else "0"
    return ConsoleConfig(
        ranks=parse_ranks("--console_ranks", options["console_ranks"] or default_ranks),
        local_ranks=parse_ranks("--local_ranks_filter", options["local_ranks_filter"] or "all"),
        redirects=parse_streams("--redirects", options["redirects"]),
        tee=parse_streams("--tee", options["tee"]),
        prefix=options["log_line_prefix_template"],
    )


def _place_of(checkpoint_dir: str | None, command: tuple[str, ...]) -> str:
    """Return an absolute path; a URL stays as it is. Empty: none was chosen.

    Raises:
        ConfigError: it is neither, or is of a kind that nothing installed can write.
    """
    if not checkpoint_dir:
        return ""
    try:
        require_place(checkpoint_dir)
    except ValueError as error:
        raise ConfigError(f"--checkpoint_dir: {error}") from None
    if "://" not in checkpoint_dir:
        # Not checked: a network mount caches for up to a minute that a name is missing, and rank 0 is about to make it.
        return str(Path(checkpoint_dir).absolute())
    scheme = checkpoint_dir.partition("://")[0]
    packages = [] if scheme in {"file", "local"} else ["upath", *_PACKAGES.get(scheme, ())]
    missing = [package for package in packages if find_spec(package) is None]
    if missing and command[0] == sys.executable:  # another Python may have them
        raise ConfigError(
            f"--checkpoint_dir={checkpoint_dir} needs the package {missing[-1]}, which is not installed: "
            "pip install 'elastic-agent[cloud]', or what fsspec names for other stores than S3"
        )
    return checkpoint_dir
