"""How an option is declared, and the options that several commands share.

Each option `--some_name` can also be written as `--some-name`, and is also read from the variable
`ELASTIC_AGENT_SOME_NAME`, from the variables of other launchers that its declaration lists, and from the file of
`--config`. The command line wins over a variable, and a variable over the file. An empty variable counts as not set.
An empty value on the command line mostly means that a shell variable was not set, so it is refused, except for facts
that a node can find out about itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from agent.cli.config_file import use_config_file
from agent.errors import ConfigError
from agent.store.access import DEFAULT_SERVER, DEFAULT_STORE_TIMEOUT_S, PASSWORD_VARIABLE

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]

DEFAULT_CTRL_PORT = 9988
MAX_WIDTH = 110
"""Columns of the help on a wide terminal."""

CONTEXT = {
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": MAX_WIDTH,
}


class DocumentedOption(click.Option):
    """An option whose help ends with its default value, also where the code derives that value.

    Args:
        declarations: the names, as click takes them.
        default_text: the default in words, where there is no constant.
        attributes: everything else, as click takes it.
    """

    def __init__(self, declarations: tuple[str, ...], default_text: str = "", **attributes: Any) -> None:  # noqa: ANN401
        super().__init__(declarations, **attributes)
        self.default_text = default_text

    @property
    def shown_default(self) -> str:
        """The default as a user would write it; empty: none is worth showing."""
        if self.default_text or self.is_flag or not isinstance(self.default, str | int | float):
            return self.default_text
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that are read, the first one that is set counts."""
        return (self.envvar,) if isinstance(self.envvar, str) else tuple(self.envvar or ())

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Names and metavar, and the help with the default, as click's help shows them."""
        record = super().get_help_record(ctx)
        if record is None or not self.shown_default:
            return record
        return record[0], f"{record[1]}  [default: {self.shown_default}]"


def option(name: str, *also: str, env: tuple[str, ...] = (), **attributes: Any) -> Decorator:  # noqa: ANN401
    """Declare an option.

    Args:
        name: without hyphens; it also names the variable.
        also: other names for it.
        env: variables of other launchers, which are read after our own.
        attributes: as `DocumentedOption` takes them.
    """
    attributes.setdefault("callback", _refuse_empty)
    if attributes.get("metavar") in {"FILE", "DIR"}:
        attributes["shell_complete"] = complete_path
    variables = [f"ELASTIC_AGENT_{name.upper()}", *env]
    return click.option(f"--{name}", *also, name, cls=DocumentedOption, envvar=variables, **attributes)


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
    """Accept an empty value: it has a meaning."""
    return value


def drop_empty(_context: click.Context, _parameter: click.Parameter, value: object) -> object:
    """Treat an empty value as not given. For facts that a node can find out about itself."""
    return None if value == "" else value


ELASTIC_SERVER = option(
    "elastic_server",
    env=("PADDLE_ELASTIC_SERVER",),
    metavar="HOST:PORT,…",
    default_text=DEFAULT_SERVER,
    help="etcd endpoints that all nodes reach. Use https://HOST:PORT for TLS.",
)
ETCD_ACCESS = (
    option("etcd_ca", metavar="FILE", help="PEM file with the CA of etcd's certificates, for https:// endpoints."),
    option("etcd_cert", metavar="FILE", help="PEM file with this client's certificate, if etcd asks for one."),
    option("etcd_key", metavar="FILE", help="PEM file with the private key of --etcd_cert, without a passphrase."),
    option(
        "etcd_user",
        metavar="NAME",
        help=f"etcd user. Its password is read from {PASSWORD_VARIABLE} or --etcd_password_file.",
    ),
    option(
        "etcd_password_file",
        metavar="FILE",
        help="File that contains only the password of --etcd_user or, with --ips, the secret that the machines share.",
    ),
)
JOB_ID = option(
    "job_id",
    "--rdzv_id",
    env=("PADDLE_ELASTIC_JOB_ID", "PADDLE_JOB_ID", "PET_RDZV_ID"),
    shell_complete=_complete_job,
    metavar="ID",
    help="Name of the job, the same on all of its nodes.",
)
_NP_VARIABLES = ("PADDLE_ELASTIC_NP", "PADDLE_NNODES", "PET_NNODES")
NP = option(
    "np",
    "--nnodes",
    env=_NP_VARIABLES,
    metavar="N|MIN:MAX",
    default_text="1",
    help="Number of nodes. N: a lost node is waited for. MIN:MAX: the job goes on with the nodes that are left.",
)
CONFIG = option(
    "config",
    callback=use_config_file,
    is_eager=True,
    expose_value=False,
    metavar="FILE",
    help="TOML file with options by their names; the command line and variables win.",
)
NEW_NP = option("np", "--nnodes", env=_NP_VARIABLES, metavar="N|MIN:MAX", help="New number of nodes.")
STORE_TIMEOUT = option(
    "store_timeout",
    type=float,
    metavar="SECONDS",
    default_text=f"{DEFAULT_STORE_TIMEOUT_S:g}; no limit with --ips",
    help="How long to try to reach etcd at the start.",
)
JSON = option("json", is_flag=True, help="Print JSON for programs.")
LOGS = (
    click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.  [default: all]"),
    click.option(
        "--group",
        type=click.IntRange(min=1),
        metavar="N",
        help="Only this group; with --follow, this group and all later ones.  [default: the newest]",
    ),
    click.option(
        "--follow", "-f", is_flag=True, help="Print new lines as they are written, across groups, until the job ends."
    ),
    click.option(
        "--lines",
        "-n",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only the last N lines of each log.  [default: all; with --follow 20]",
    ),
    option(
        "log_dir",
        metavar="DIR",
        default_text="log, or the directory that this machine has noted for the job",
        help="A --log_dir that this machine can read, for nodes whose agents are gone.",
    ),
)
YES = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")

JOB_OPTIONS: tuple[Decorator, ...] = (
    ELASTIC_SERVER,
    *ETCD_ACCESS,
    JOB_ID,
    CONFIG,
    option(
        "store_timeout",
        type=float,
        metavar="SECONDS",
        default_text="5, which is the maximum",
        help="How long to try to reach etcd.",
    ),
)
"""The options by which a command finds a job."""


def with_options(options: tuple[Decorator, ...]) -> Callable[[F], F]:
    """Apply options so that --help lists them in this order."""

    def apply(command: F) -> F:
        for decorate in reversed(options):
            command = decorate(command)
        return command

    return apply


def parameters_of(options: tuple[Decorator, ...]) -> tuple[click.Parameter, ...]:
    """The click parameters that these options declare, in their order."""
    return tuple(click.command("any")(with_options(options)(lambda: None)).params)
