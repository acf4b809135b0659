"""Options of other launchers that have no meaning here, and what becomes of a line that has them.

A line is often copied as a whole. An option that changes nothing is taken, and one warning names all of these: who
relied on one should hear that. An option that asks for what does not happen here ends the start, and one error names
all of these, with what to use instead. So it is with torchrun's variables `PET_…`.

Options with a like meaning are options of ours under both names (`agent/cli/run_options.py`); docs/migrating.md has the
whole tables.
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

_MEET = "agents meet in etcd: give --elastic_server and --job_id, or --ips with all machines and no etcd"
"""What to do where several nodes are told to meet in another way."""

_PADDLE_REFUSED = {
    "cluster_node_ips": "use --ips",
    "selected_gpus": "use --gpus",
    "node_ip": "use --address",
    "host": "use --address",
    "elastic_level": "use --fault_tolerance_level",
}
_PADDLE_UNUSED = {
    "use_paddlecloud": "POD_IP and the PADDLE_ELASTIC_ variables are read anyway",
    "started_port": "free ports are taken; --ctrl_port is for the etcd that --ips brings",
    "start_port": "free ports are taken; --ctrl_port is for the etcd that --ips brings",
    "log_level": "a line is printed for what happens, once",
    "print_config": "--banner prints the configuration",
}
_PADDLE_MEETING = {"master": "agents meet in etcd", "rank": "ranks are given out by the job, by age"}
_REFUSED = {
    "logs_specs": "use --log_dir, --redirects and --tee",
    "duplicate_stdout_filters": "use elastic-agent logs, and grep",
    "duplicate_stderr_filters": "use elastic-agent logs, and grep",
    "shutdown_timeout": "use --stop_grace",
    "virtual_local_rank": "leave it out: the script picks its GPU by LOCAL_RANK",
}
_UNUSED = {
    "master_port": "a free one is taken for each group",
    "rdzv_conf": "--elastic_timeout, --settle and --detect_within have its time-outs",
    "monitor_interval": "a worker's end is noticed at once, nothing is polled",
    "start_method": "each rank is a process of its own, as with spawn",
    "run_path": "a script is run as __main__ anyway",
    "use_env": "LOCAL_RANK is set anyway",
    "event_log_handler": "elastic-agent history has the events",
    "signals_to_handle": "SIGTERM, SIGINT, SIGHUP and SIGQUIT ask the node to leave",
}
_MEETING = {
    "rdzv_backend": "agents meet in etcd",
    "rdzv_endpoint": "agents meet in etcd",
    "master_addr": "rank 0's node is the master",
    "node_rank": "ranks are given out by the job, by age",
}
"""Where torchrun's nodes meet. That changes nothing where they are told another place, or there is one node."""
_VARIABLES = {"FLAGS_check_nan_inf": "State(check_finite=True) looks at weights and metrics at each commit"}
_REFUSED_NAMES = {*_PADDLE_REFUSED, *_REFUSED}
_FLAGS = {"run_path", "use_env", "virtual_local_rank"}
_OF_PADDLE = {**_PADDLE_REFUSED, **_PADDLE_UNUSED, **_PADDLE_MEETING}
_OF_TORCHRUN = {**_REFUSED, **_UNUSED, **_MEETING}
_WORDS = {**_OF_PADDLE, **_OF_TORCHRUN}
_GIVEN = f"{__name__}.given"

PADDLE_OPTIONS = frozenset(
    {"--gpus", "--devices", "--ips", "--elastic_server", "--np", "--job_id", "--servers", "--workers"}
    | {"--server_num", "--worker_num", "--heter_workers", "--heter_worker_num", "--heter_devices", "--http_port"}
    | {f"--{name}" for name in _OF_PADDLE}
)
"""Names that Paddle's launcher has and torchrun has not."""


def _note(context: click.Context, parameter: click.Parameter, value: object) -> object:
    """Remember that it was given, by its name as it was typed, or by its variable."""
    name = parameter.name or ""
    source = context.get_parameter_source(name)
    if value not in {None, False} and source != ParameterSource.DEFAULT:
        typed = f"PET_{name.upper()}" if source == ParameterSource.ENVIRONMENT else f"--{name}"
        context.meta.setdefault(_GIVEN, {})[name] = typed
    return value


def _option(name: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}",
        name,
        envvar=[f"PET_{name.upper()}"] if name in _OF_TORCHRUN else None,
        is_flag=name in _FLAGS,
        default=None,
        hidden=True,
        expose_value=False,
        callback=_note,
    )


FOREIGN_OPTIONS = tuple(_option(name) for name in _WORDS)
"""Not in --help; they take their values, so that what follows them is read aright."""


def settle(options: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Decide what becomes of those that the current command line has, or the environment.

    Returns:
        The options, and what to warn of. A line that says where torchrun's nodes meet, and is for one node, is one
        for a job on this machine.

    Raises:
        ConfigError: some ask for what does not happen here.
    """
    context = click.get_current_context()
    given: dict[str, str] = context.meta.get(_GIVEN, {})
    meets = given.keys() & {**_MEETING, **_PADDLE_MEETING}.keys()
    is_told = any(options[name] for name in ("elastic_server", "ips", "standalone"))
    is_told = is_told or (options["job_id"] is None and read_allocation(environ) is not None)
    is_one = parse_np(options["np"] or "1")[1] == 1
    # Variables alone may be another program's; torchrun's own name of the job is not.
    is_meant = any(given[name].startswith("--") for name in meets) or "PET_RDZV_ID" in environ
    if meets and not is_told and is_one and is_meant:
        options = {**options, "standalone": True}
    refused = [f"{given[name]} is another launcher's: {_WORDS[name]}" for name in sorted(given.keys() & _REFUSED_NAMES)]
    if meets and not is_told and not is_one:
        several = "are" if len(meets) > 1 else "is"
        names = ", ".join(given[name] for name in sorted(meets))
        refused.append(f"{names} {several} another launcher's: {_MEET}")
    if refused:
        raise ConfigError("; ".join(refused))
    unused = [f"{given[name]} ({_WORDS[name]})" for name in sorted(given)]
    known = {name for parameter in context.command.params for name in parameter.envvar or ()}
    unknown = [f"{name} (torchrun has no such option)" for name in sorted(environ) if name.startswith("PET_")]
    unused += [words for words in unknown if words.partition(" ")[0] not in known]
    unused += [f"{name} ({do})" for name, do in _VARIABLES.items() if environ.get(name, "0") not in {"", "0", "false"}]
    return options, f"not used: {'; '.join(unused)}" if unused else ""


def advice(option: str) -> str | None:
    """What to do instead of giving this option, whichever way it is spelled; None: nobody's option is called so."""
    return _WORDS.get(option.lstrip("-").replace("-", "_"))
