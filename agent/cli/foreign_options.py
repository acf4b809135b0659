"""Options of other launchers that have no counterpart here, and how a command line that contains them is handled.

Users often copy a whole command line. An option that would change nothing is accepted, and one warning lists all such
options, since the user may rely on one of them. An option that asks for something that does not happen here ends the
start, and one error lists all such options with what to use instead. torchrun's variables `PET_…` are handled in the
same way.

Options with a like meaning are aliases of our options (`agent/cli/run_options.py`). docs/migrating.md has the complete
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from agent.cli.slurm import read_allocation
from agent.config import parse_np
from agent.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_HOW_NODES_MEET = "agents meet in etcd: give --elastic_server and --job_id, or --ips with all machines and no etcd"
"""What to do where a command line for several nodes names another place to meet."""

_PADDLE_REFUSED = {
    "cluster_node_ips": "use --ips",
    "selected_gpus": "use --gpus",
    "node_ip": "use --address",
    "host": "use --address",
    "elastic_level": "use --fault_tolerance_level",
    "endpoints": "use --servers",
}
_PADDLE_UNUSED = {
    "use_paddlecloud": "POD_IP and the PADDLE_ELASTIC_ variables are always read",
    "started_port": "free ports are taken; --ctrl_port is for the etcd that --ips brings",
    "start_port": "free ports are taken; --ctrl_port is for the etcd that --ips brings",
    "log_level": "each event is logged on one line, once",
    "log_overwrite": "each group has log files of its own",
    "sort_ip": "ranks follow the order of --ips",
    "run_mode": "--servers or --server_num asks for parameter servers",
    "print_config": "--banner prints the configuration",
}
_PADDLE_RENDEZVOUS = {"master": "agents meet in etcd", "rank": "the job assigns ranks, by age"}
_TORCHRUN_REFUSED = {
    "logs_specs": "use --log_dir, --redirects and --tee",
    "duplicate_stdout_filters": "use elastic-agent logs, and grep",
    "duplicate_stderr_filters": "use elastic-agent logs, and grep",
    "shutdown_timeout": "use --stop_grace",
    "virtual_local_rank": "leave it out: the script picks its GPU by LOCAL_RANK",
}
_TORCHRUN_UNUSED = {
    "master_port": "a free one is taken for each group",
    "rdzv_conf": "--elastic_timeout, --settle and --detect_within have its time-outs",
    "monitor_interval": "a worker's exit is noticed at once, nothing is polled",
    "start_method": "each rank is a process of its own, as with spawn",
    "run_path": "a script always runs as __main__",
    "use_env": "LOCAL_RANK is always set",
    "event_log_handler": "elastic-agent history has the events",
    "signals_to_handle": "SIGTERM and SIGQUIT ask the node to leave, SIGINT and SIGHUP end the agent",
}
_TORCHRUN_RENDEZVOUS = {
    "rdzv_backend": "agents meet in etcd",
    "rdzv_endpoint": "agents meet in etcd",
    "master_addr": "rank 0's node is the master",
    "node_rank": "the job assigns ranks, by age",
}
"""Where torchrun's nodes meet. These change nothing if an etcd or the machines are given too, or for one node."""
_VARIABLES = {"FLAGS_check_nan_inf": "State(check_finite=True) looks at weights and metrics at each commit"}
_REFUSED_NAMES = {*_PADDLE_REFUSED, *_TORCHRUN_REFUSED}
_FLAGS = {"run_path", "use_env", "virtual_local_rank"}
_PADDLE = {**_PADDLE_REFUSED, **_PADDLE_UNUSED, **_PADDLE_RENDEZVOUS}
_TORCHRUN = {**_TORCHRUN_REFUSED, **_TORCHRUN_UNUSED, **_TORCHRUN_RENDEZVOUS}
ADVICE = {**_PADDLE, **_TORCHRUN}
"""By option: what to use instead, or why it changes nothing."""
_JOB_NAMES = {"PET_RDZV_ID", "PADDLE_JOB_ID"}
_GIVEN = f"{__name__}.given"
_PADDLE_VARIABLES = {"master": "PADDLE_MASTER", "rank": "PADDLE_RANK", "run_mode": "PADDLE_RUN_MODE"}
"""By option: the variable that Paddle's launcher reads for it, where overlooking it would start another job."""

PADDLE_OPTIONS = frozenset(
    {"--gpus", "--devices", "--ips", "--servers", "--workers"}
    | {"--server_num", "--worker_num", "--heter_workers", "--heter_worker_num", "--heter_devices", "--http_port"}
    | {"--trainer_num", "--trainers", "--gloo_port"}
    | {f"--{name}" for name in _PADDLE}
)
"""Options that show that a command line was written for Paddle's launcher. `--elastic_server`, `--np` and `--job_id`
are its options too, but every user of an elastic job gives them."""


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> object:
    """Note under which name the user gave an option: as it was typed, or its variable."""
    name = parameter.name or ""
    source = context.get_parameter_source(name)
    if value not in {None, False} and source != ParameterSource.DEFAULT:
        typed = _variable_of(name) if source == ParameterSource.ENVIRONMENT else f"--{name}"
        context.meta.setdefault(_GIVEN, {})[name] = typed
    return value


def _variable_of(name: str) -> str:
    return _PADDLE_VARIABLES.get(name, f"PET_{name.upper()}")


def _option(name: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}",
        name,
        envvar=[_variable_of(name)] if name in {*_TORCHRUN, *_PADDLE_VARIABLES} else None,
        is_flag=name in _FLAGS,
        default=None,
        hidden=True,
        expose_value=False,
        callback=_remember,
    )


FOREIGN_OPTIONS = tuple(_option(name) for name in ADVICE)
"""Hidden in the help. They consume their values, so that the words after them are parsed correctly."""


def apply_foreign_options(options: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Handle the foreign options of the current command line and environment.

    Returns:
        The options, and a warning about those that are not used (empty: none). Where the line is for one node, and only
        says how the nodes of another launcher meet or names the job by its option, `standalone` is set.

    Raises:
        ConfigError: some options ask for something that does not happen here.
    """
    context = click.get_current_context()
    given: dict[str, str] = context.meta.get(_GIVEN, {})
    rendezvous = given.keys() & {**_TORCHRUN_RENDEZVOUS, **_PADDLE_RENDEZVOUS}.keys()
    has_place = any(options[name] for name in ("elastic_server", "ips", "standalone"))
    has_place = has_place or (options["job_id"] is None and read_allocation(environ) is not None)
    is_one_node = parse_np(options["np"] or "1")[1] == 1
    # Variables alone may be meant for another program, unless they also name the job.
    is_intended = any(given[name].startswith("--") for name in rendezvous) or _is_named_as_elsewhere(options, environ)
    if not has_place and is_one_node and is_intended:
        options = {**options, "standalone": True}
    refused = [f"{given[name]} is another launcher's: {ADVICE[name]}" for name in sorted(given.keys() & _REFUSED_NAMES)]
    if rendezvous and not has_place and not is_one_node:
        verb = "are" if len(rendezvous) > 1 else "is"
        names = ", ".join(given[name] for name in sorted(rendezvous))
        refused.append(f"{names} {verb} another launcher's: {_HOW_NODES_MEET}")
    if refused:
        raise ConfigError("; ".join(refused))
    unused = [f"{given[name]} ({ADVICE[name]})" for name in sorted(given)]
    known = {name for parameter in context.command.params for name in parameter.envvar or ()}
    unknown = [name for name in sorted(environ) if name.startswith("PET_") and name not in known]
    unused += [f"{name} (torchrun has no such option)" for name in unknown]
    unused += [f"{name} ({do})" for name, do in _VARIABLES.items() if environ.get(name, "0") not in {"", "0", "false"}]
    return options, f"not used: {'; '.join(unused)}" if unused else ""


def _is_named_as_elsewhere(options: dict[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether the job has its name by another launcher's option, with which one node needs nothing to meet at."""
    line: list[str] = click.get_current_context().obj or []
    typed = {word.partition("=")[0].replace("-", "_") for word in line[: len(line) - len(options["command"])]}
    if "__rdzv_id" in typed or options["job_id"] is None:
        return options["job_id"] is not None
    return options["job_id"] in {environ.get(name) for name in _JOB_NAMES}


def advice(option: str) -> str | None:
    """What to do instead of giving this option, in any spelling; None if no launcher has this option."""
    return ADVICE.get(option.lstrip("-").replace("-", "_"))
