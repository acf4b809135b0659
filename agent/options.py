"""The command line's options: with the names of Paddle's launcher and torchrun, also from the environment.

Each option `--some_name` is also read as `--some-name`, from `ELASTIC_AGENT_SOME_NAME`, and from the names that
these read. The command line wins. An empty variable counts as not set. An empty value on the command
line is a shell variable that was meant to be set: it is refused, but for what a node finds out about itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from agent.errors import ConfigError
from agent.store.access import PASSWORD_VARIABLE, Access, CredentialOptions, read_access

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_SERVER = "127.0.0.1:2379"
DEFAULT_CTRL_PORT = 9988
DEFAULT_STORE_TIMEOUT_S = 30.0

CONTEXT = {
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
}


def option(name: str, *also: str, env: tuple[str, ...] = (), **kwargs: Any) -> Callable[[F], F]:  # noqa: ANN401
    """An option with its variable names. `env`: those of other launchers, after our own."""
    variables = [f"ELASTIC_AGENT_{name.upper()}", *env]
    kwargs.setdefault("callback", _refuse_empty)
    if kwargs.get("metavar") in {"FILE", "DIR"}:
        kwargs["shell_complete"] = complete_path
    return click.option(f"--{name}", *also, name, envvar=variables, **kwargs)


def complete_path(_context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file, or of a directory."""
    return [CompletionItem(word, type="dir" if parameter.metavar == "DIR" else "file")]


def _complete_job(context: click.Context, _parameter: click.Parameter, word: str) -> list[CompletionItem]:
    from agent.operate.suggest import job_ids  # noqa: PLC0415 - loads the etcd client: only when needed

    return [CompletionItem(job_id) for job_id in job_ids(read_server(context.params)) if job_id.startswith(word)]


def _refuse_empty(_context: click.Context, parameter: click.Parameter, value: object) -> object:
    if value == "":
        raise ConfigError(f"--{parameter.name} is empty: give it a value, or leave it out")
    return value


def _drop_empty(_context: click.Context, _parameter: click.Parameter, value: object) -> object:
    return None if value == "" else value


ELASTIC_SERVER = option(
    "elastic_server",
    env=("PADDLE_ELASTIC_SERVER",),
    metavar="HOST:PORT[,…]",
    help=f"etcd's endpoints; https://HOST:PORT for TLS.  [default: {DEFAULT_SERVER}]",
)
ETCD_ACCESS = (
    option("etcd_ca", metavar="FILE", help="PEM: who signs etcd's certificates (for https:// endpoints)."),
    option("etcd_cert", metavar="FILE", help="PEM: this client's certificate, if etcd asks for one."),
    option("etcd_key", metavar="FILE", help="PEM: the key of --etcd_cert, without a passphrase."),
    option("etcd_user", metavar="NAME", help=f"A user of etcd's. The password: in {PASSWORD_VARIABLE}, or"),
    option("etcd_password_file", metavar="FILE", help="a file that holds nothing but the password."),
)
JOB_ID = option(
    "job_id",
    "--rdzv_id",
    env=("PADDLE_ELASTIC_JOB_ID", "PET_RDZV_ID"),
    shell_complete=_complete_job,
    metavar="ID",
    help="The job. Agents of one job meet.",
)
NP = option(
    "np",
    "--nnodes",
    env=("PADDLE_ELASTIC_NP", "PET_NNODES"),
    metavar="N|MIN:MAX",
    help="Desired nodes. N: exactly so many, a lost one is waited for. MIN:MAX: the rest go on.  [default: 1]",
)
STORE_TIMEOUT = option(
    "store_timeout",
    type=float,
    metavar="S",
    help=f"How long to try to reach etcd at the start.  [default: {DEFAULT_STORE_TIMEOUT_S:g}; with --ips without end]",
)
JSON = option("json", is_flag=True, help="Print JSON for programs.")
LOGS = (
    click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Of this rank only.  [default: all]"),
    click.option(
        "--group", type=click.IntRange(min=1), metavar="N", help="Of this group, or from it on.  [default: the newest]"
    ),
    click.option(
        "--follow", "-f", is_flag=True, help="Go on as more is written, from group to group, to the job's end."
    ),
    click.option(
        "--lines",
        "-n",
        type=click.IntRange(min=0),
        metavar="N",
        help="The last N lines of each log only.  [default: all; with --follow 20]",
    ),
    option(
        "log_dir",
        default="log",
        show_default=True,
        metavar="DIR",
        help="A --log_dir that is seen here: for nodes whose agents are gone.",
    ),
)
YES = click.option("--yes", "-y", is_flag=True, help="Do it without asking.")

JOB_OPTIONS: tuple[Callable[[Any], Any], ...] = (ELASTIC_SERVER, *ETCD_ACCESS, JOB_ID, STORE_TIMEOUT)

RUN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    ELASTIC_SERVER,
    *ETCD_ACCESS,
    JOB_ID,
    NP,
    option(
        "gpus", "--devices", metavar="0,1", help="The GPUs to use, of those in CUDA_VISIBLE_DEVICES.  [default: all]"
    ),
    option(
        "nproc_per_node",
        env=("PET_NPROC_PER_NODE",),
        metavar="N|gpu|cpu|auto",
        help="Rank processes on this node.  [default: one for each GPU, else 1]",
    ),
    option(
        "ips",
        metavar="IP,IP",
        help="All machines of the job, the same list on each. It then needs no etcd: the first three bring one.",
    ),
    option("server_num", type=click.IntRange(min=1), metavar="N", help="Parameter servers, all on this machine."),
    option("worker_num", type=click.IntRange(min=1), metavar="N", help="Their workers, all on this machine."),
    option("heter_worker_num", type=click.IntRange(min=1), metavar="N", help="Workers that have the GPUs, likewise."),
    option("servers", metavar="IP:PORT,…", help="Parameter servers on several machines: give the same list on each."),
    option("workers", metavar="IP[:PORT],…", help="Their workers, each by its machine."),
    option("heter_workers", metavar="IP[:PORT],…", help="Workers that have the GPUs, likewise."),
    option(
        "ps_replicas",
        type=click.IntRange(0, 1),
        metavar="N",
        help="Copies of each server's rows on another one, so that either may be lost.  [default: 0]",
    ),
    option("heter_devices", metavar="KIND", help="What those have.  [default: gpu]"),
    option(
        "http_port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="Where the workers meet in a process group, if the script makes one.",
    ),
    option(
        "ctrl_port",
        type=click.IntRange(1, 65534),
        metavar="PORT",
        help=f"Where that etcd listens; its members meet at the next one.  [default: {DEFAULT_CTRL_PORT}]",
    ),
    option("node_id", callback=_drop_empty, metavar="ID", help="This node's stable name.  [default: host name]"),
    option(
        "address",
        "--local_addr",
        env=("POD_IP", "PET_LOCAL_ADDR"),
        callback=_drop_empty,
        metavar="IP",
        help="Where other nodes reach this one.  [default: found out]",
    ),
    option(
        "log_dir",
        env=("PET_LOG_DIR",),
        default="log",
        show_default=True,
        metavar="DIR",
        help="One file per rank and group goes here.",
    ),
    option(
        "checkpoint_dir",
        metavar="DIR",
        help="Given to the workers; all nodes must see it.  [default: checkpoints/JOB_ID]",
    ),
    option(
        "console_ranks",
        metavar="0,1|all|none",
        help="Ranks whose output is shown on the console.  [default: 0; all with --local_ranks_filter]",
    ),
    option(
        "tee",
        "-t",
        env=("PET_TEE",),
        metavar="0-3|RANK:0-3,…",
        help="As in torchrun: shown too, of each local rank: 1 stdout, 2 stderr, 3 both.",
    ),
    option("redirects", "-r", env=("PET_REDIRECTS",), metavar="0-3|RANK:0-3,…", help="The same: not shown."),
    option("local_ranks_filter", env=("PET_LOCAL_RANKS_FILTER",), metavar="0,1", help="The same: shown only."),
    option(
        "numa_binding",
        env=("PET_NUMA_BINDING",),
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        help="As in torchrun: keep each rank on CPUs near its GPU.  [default: the system chooses]",
    ),
    option("http", metavar="[HOST:]PORT", help="Serve a web page, metrics and probes here.  [HOST: 127.0.0.1]"),
    option(
        "http_token_file",
        metavar="FILE",
        help="What lets in there, 16 characters or more.  [default: what `elastic-agent page` tells]",
    ),
    option("events", metavar="FILE", help="Append what happens to the job, a line of JSON each.  [-: standard output]"),
    option("role", env=("PET_ROLE",), default="default", help="What ROLE_NAME says to the ranks."),
    option(
        "max_restarts",
        env=("PET_MAX_RESTARTS",),
        type=int,
        default=10,
        show_default=True,
        metavar="N",
        help="Worker failures in a row, without progress, that are answered with a restart.",
    ),
    option(
        "progress_window",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="What counts as progress: as many new steps as are usual in this time.",
    ),
    option(
        "health_check",
        metavar="COMMAND",
        help="Must end with code 0 before this node joins, and after a worker's failure; else the node is left out.",
    ),
    option(
        "health_timeout",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="How long --health_check may take.",
    ),
    option(
        "elastic_timeout",
        type=float,
        env=("PADDLE_ELASTIC_TIMEOUT",),
        metavar="S",
        help="How long to wait for missing nodes.  [default: without end]",
    ),
    option(
        "detect_within",
        type=float,
        default=5.0,
        show_default=True,
        metavar="S",
        help="A node that vanishes is noticed within this time. The next three derive from it.",
    ),
    option("lease", type=float, metavar="S", help="How long a node keeps its place unheard.  [default: derived, 4]"),
    option("link_heartbeat", type=float, metavar="S", help="Between neighbours' signs of life.  [default: 0.5]"),
    option("settle", type=float, metavar="S", help="How long to wait for more nodes below MAX.  [default: 1]"),
    option(
        "stop_grace",
        type=float,
        default=15.0,
        show_default=True,
        metavar="S",
        help="Between SIGTERM and SIGKILL when workers are stopped for a planned change.",
    ),
    option(
        "handoff_timeout",
        type=float,
        default=20.0,
        show_default=True,
        metavar="S",
        help="How long a node that was asked to leave waits for all ranks to stop at one step and save it.",
    ),
    option(
        "handoff_wait",
        type=float,
        default=1.0,
        show_default=True,
        metavar="S",
        help="How long ranks that stopped and saved wait for the next group before they train on.",
    ),
    option(
        "kill_timeout",
        type=float,
        default=10.0,
        show_default=True,
        metavar="S",
        help="A node on which a worker outlives SIGKILL for so long is left out.",
    ),
    option(
        "hang_timeout",
        type=float,
        metavar="S",
        help="Any program is suspected to hang after so long without a step and without output. 0: nothing is.  "
        "[default: by the next three, and only those that commit steps]",
    ),
    option(
        "hang_floor",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="No step that takes less than this is suspicious.",
    ),
    option(
        "hang_factor",
        type=float,
        default=50.0,
        show_default=True,
        metavar="N",
        help="A step that takes so many usual ones is; at twice that it is taken for a hang.",
    ),
    option(
        "hang_first",
        type=float,
        default=3600.0,
        show_default=True,
        metavar="S",
        help="As --hang_floor, for the first steps.",
    ),
    option(
        "standby",
        type=click.Choice(["off", "torch", "learned"]),
        default="learned",
        show_default=True,
        help="Have a process for each rank, server or worker wait for the next restart, with torch imported, or with "
        "what the script imported last time.",
    ),
    option(
        "snapshot_overhead",
        type=float,
        default=1.0,
        show_default=True,
        metavar="PERCENT",
        help="How much of the training's time its copies in memory may take. 0: none are made.",
    ),
    option(
        "snapshot_memory",
        metavar="BYTES",
        help="How much memory they may take on this node, as 8G.  [default: half of what is free]",
    ),
    STORE_TIMEOUT,
    option(
        "fault_tolerance_level",
        type=click.Choice(["0", "1", "2"]),
        env=("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"),
        help="As in Paddle: 0 ends the job at its first failure; 1 and 2 restart (np says whether it is elastic).",
    ),
    option("fresh", is_flag=True, help="Start a finished job over; use no checkpoint of an earlier run."),
    option(
        "standalone",
        env=("PET_STANDALONE",),
        is_flag=True,
        help="One machine, no etcd: a private one, and a job of its own.",
    ),
    option("module", "-m", env=("PET_MODULE",), is_flag=True, help="What is run is a Python module, as in python -m."),
    option("no_python", env=("PET_NO_PYTHON",), is_flag=True, help="What is run is a program, not a Python script."),
)

FOR_RANKS = (
    *("np", "ips", "nproc_per_node", "numa_binding", "role", "console_ranks", "tee", "redirects"),
    *("local_ranks_filter", "http", "http_token_file", "events", "health_check", "health_timeout", "elastic_timeout"),
    *("link_heartbeat", "settle", "handoff_timeout", "handoff_wait", "kill_timeout", "hang_timeout", "hang_floor"),
    *("hang_factor", "hang_first", "snapshot_overhead", "snapshot_memory"),
)
"""What means nothing in a job with parameter servers."""


def with_options(options: tuple[Callable[[Any], Any], ...]) -> Callable[[F], F]:
    """Apply options so that --help lists them in this order."""

    def apply(command: F) -> F:
        for decorate in reversed(options):
            command = decorate(command)
        return command

    return apply


def read_server(options: dict[str, Any]) -> Access:
    """Where etcd is, and how to be let in. Raises `ConfigError`."""
    return read_access(options["elastic_server"] or DEFAULT_SERVER, read_credentials(options))


def read_credentials(options: dict[str, Any]) -> CredentialOptions:
    """As whom to come to etcd. The password leaves the environment, so that no child inherits it."""
    names = ("ca", "cert", "key", "user", "password_file")
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    return CredentialOptions(password=password or None, **{name: options[f"etcd_{name}"] for name in names})
