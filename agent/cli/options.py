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
    from agent.operate.jobs import suggest_job_ids  # noqa: PLC0415 - loads the etcd client: only when needed

    return [CompletionItem(job_id) for job_id in suggest_job_ids(context.params) if job_id.startswith(word)]


def _refuse_empty(_context: click.Context, parameter: click.Parameter, value: object) -> object:
    if value == "":
        raise ConfigError(f"--{parameter.name} is empty: give it a value, or leave it out")
    return value


def keep_empty(_context: click.Context, _parameter: click.Parameter, value: object) -> object:
    """Take an empty value as it is: it says something."""
    return value


def drop_empty(_context: click.Context, _parameter: click.Parameter, value: object) -> object:
    """Take an empty value for none: of what a node finds out about itself."""
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
    option(
        "etcd_password_file", metavar="FILE", help="a file that holds nothing but the password, or with --ips a secret."
    ),
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
        metavar="DIR",
        help="A --log_dir that is seen here: for nodes whose agents are gone.  [default: log, or where it is known]",
    ),
)
YES = click.option("--yes", "-y", is_flag=True, help="Do it without asking.")

JOB_OPTIONS: tuple[Callable[[Any], Any], ...] = (ELASTIC_SERVER, *ETCD_ACCESS, JOB_ID, STORE_TIMEOUT)


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
