"""The command line, and where the parts are put together.

    elastic-agent [run] [options] script.py [arguments…]
    elastic-agent scale --np=4                                     (and what else `agent/commands.py` has)
    elastic-agent rehearse [--np=2] [--steps=N] script.py [arguments…]

A command may also stand after the options, as in the seeds: `elastic-agent --np=4 --job_id=X scale`. A script of
that name is run as `./scale`. A user's mistake is answered with one line and an exit code (`agent/errors.py`),
never with a traceback.
"""

from __future__ import annotations

import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from agent import __version__, commands, report_command
from agent.completion import VARIABLE, complete, completion
from agent.config import (
    AgentConfig,
    Chosen,
    HangConfig,
    HealthConfig,
    JobConfig,
    NodeConfig,
    SnapshotConfig,
    TimingConfig,
    WorkerConfig,
    parse_bytes,
    parse_command,
    parse_np,
)
from agent.errors import EXIT_USAGE, ConfigError, ElasticAgentError
from agent.observe.stderr import standard_error
from agent.options import CONTEXT, RUN_OPTIONS, complete_path, read_credentials, read_server, with_options
from agent.store.access import ANONYMOUS, PASSWORD_VARIABLE, Access

_EPILOG = """\b
Other commands, each with --help:
  elastic-agent status [--watch]        show a job
  elastic-agent history, explain        what happened to it, and why
  elastic-agent report                  the same as a page, and as a picture
  elastic-agent incident export         one incident as a file, to be played again
  elastic-agent logs [--follow]         what the ranks have said, on whichever node
  elastic-agent scale --np=N            change the number of nodes of a running job
  elastic-agent drain NODE…             ask nodes to leave
  elastic-agent exclude, include NODE…  leave nodes out of what comes, let them back in
  elastic-agent pause, resume           change nothing by itself for a while, then go on
  elastic-agent restart                 start all workers anew
  elastic-agent stop                    save the training and end the job
  elastic-agent reset                   let an ended job begin anew
  elastic-agent rehearse SCRIPT         break a script here, and say what it does not save
  elastic-agent completion SHELL        let bash, zsh or fish complete all of this
"""


def _complete_command(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """A command, as long as there is no script; and files, first: bash then shows these where no command fits."""
    names = [] if context.params["command"] else [name for name in _COMMANDS if name.startswith(word)]
    return [*complete_path(context, parameter, word), *map(CompletionItem, names)]


@click.command("elastic-agent", epilog=_EPILOG, context_settings={**CONTEXT, "allow_interspersed_args": False})
@with_options(RUN_OPTIONS)
@click.version_option(__version__, message="%(version)s")
@click.argument(
    "command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]…", shell_complete=_complete_command
)
def run(**options: Any) -> int:  # noqa: ANN401 - click passes the options by name
    """Train SCRIPT on this node, as a member of a job."""
    from agent.daemon import run_agent, run_standalone  # noqa: PLC0415 - loads the etcd client: only when needed

    run_it = run_standalone if options["standalone"] else run_agent
    return run_it(_config(options), dict(_ENVIRON))


@click.command("elastic-agent rehearse", context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option("--np", type=click.IntRange(min=1), default=2, show_default=True, metavar="N", help="Nodes to play.")
@click.option(
    "--steps",
    type=click.IntRange(min=10),
    metavar="N",
    help="Optimizer steps of the undisturbed run.  [default: found out]",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]…")
def rehearse(np: int, steps: int | None, command: tuple[str, ...]) -> int:
    """Run SCRIPT on this machine, break and resize it, and say what a restart does not bring back."""
    from agent.rehearse.command import rehearse as rehearse_script  # noqa: PLC0415 - as above

    return rehearse_script(command, np, steps)


_COMMANDS = {"run": run, **commands.BY_NAME, **report_command.BY_NAME, "rehearse": rehearse, "completion": completion}
_ENVIRON: dict[str, str] = {}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line; exit with its code."""
    _open_standard_streams()
    # What the workers get: before any library of the agent's adds to it, and never etcd's password.
    _ENVIRON.update({name: value for name, value in os.environ.items() if name != PASSWORD_VARIABLE})
    try:
        code = complete(_choose) if VARIABLE in os.environ else _run(list(sys.argv[1:] if argv is None else argv))
    except click.ClickException as error:
        code = _complain(error.format_message(), EXIT_USAGE)
    except ElasticAgentError as error:
        code = _complain(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except Exception:  # noqa: BLE001 - a fault of ours: the traceback is what a report needs
        standard_error().write(f"{traceback.format_exc()}elastic-agent: error: this is a fault of elastic-agent")
        code = 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    command, arguments = _choose(arguments)
    code: int = command.main(arguments, prog_name=command.name, standalone_mode=False)
    return code


def _open_standard_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr (0, 1, 2) empty ones.

    Else the next files that it opens get these numbers, and what is printed goes into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one


def _complain(message: str, code: int) -> int:
    standard_error().write(f"elastic-agent: error: {' '.join(message.split())}")
    return code


def _choose(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """Find the command's name: the first word that is neither an option nor an option's value."""
    context = click.Context(run, **run.context_settings)
    words = run.make_parser(context).parse_args(list(arguments))[0].get("command")
    rest = words if isinstance(words, (list, tuple)) else ()  # click marks "none" in its own way
    if not rest or rest[0] not in _COMMANDS:
        return run, arguments
    at = len(arguments) - len(rest)
    return _COMMANDS[rest[0]], arguments[:at] + arguments[at + 1 :]


def _config(options: dict[str, Any]) -> AgentConfig:
    from agent import node  # noqa: PLC0415

    command = _command(options)
    standalone = options["standalone"]
    if standalone:
        _refuse_etcd(options)
    job_id = options["job_id"] or (f"standalone-{secrets.token_hex(4)}" if standalone else None)
    if job_id is None:
        raise ConfigError("--job_id is missing: name the job, the same on all of its nodes (or use --standalone)")
    np_min, np_max = parse_np(options["np"] or "1")
    if standalone and np_max != 1:
        raise ConfigError(f"--standalone is one node: --np must be 1, not {options['np']}; see --nproc_per_node")
    access = Access((), ANONYMOUS) if standalone else read_server(options)
    address = options["address"] or ("127.0.0.1" if standalone else node.address_towards(access.endpoints[0]))
    job = JobConfig(job_id, np_min, np_max, fresh=options["fresh"])
    return AgentConfig(
        endpoints=access.endpoints,
        credentials=access.credentials,
        store_timeout_s=options["store_timeout"],
        job=job,
        node=NodeConfig(
            node_id=options["node_id"] or node.default_node_id(),
            is_node_id_chosen=options["node_id"] is not None,
            address=address,
            ips=node.resolve(address),
            nproc=options["nproc_per_node"],
        ),
        timing=TimingConfig(
            detect_within_s=options["detect_within"],
            chosen=Chosen(options["lease"], options["link_heartbeat"], options["settle"]),
            kill_timeout_s=options["kill_timeout"],
            handoff_timeout_s=options["handoff_timeout"],
            handoff_wait_s=options["handoff_wait"],
            stop_grace_s=options["stop_grace"],
            elastic_timeout_s=options["elastic_timeout"],
        ),
        workers=WorkerConfig(
            command=command,
            log_dir=Path(options["log_dir"]).absolute(),
            checkpoint_dir=Path(options["checkpoint_dir"] or Path("checkpoints") / job_id).absolute(),
            console_ranks=_ranks(options["console_ranks"]),
            max_restarts=0 if options["fault_tolerance_level"] == "0" else options["max_restarts"],
            progress_window_s=options["progress_window"],
            standby=options["standby"],
        ),
        hang=HangConfig(options["hang_timeout"], options["hang_floor"], options["hang_factor"], options["hang_first"]),
        snapshots=SnapshotConfig(
            options["snapshot_overhead"], parse_bytes("--snapshot_memory", options["snapshot_memory"])
        ),
        health=HealthConfig(parse_command("--health_check", options["health_check"]), options["health_timeout"]),
    )


def _refuse_etcd(options: dict[str, Any]) -> None:
    """What is said of an etcd has no meaning with --standalone, and hints at a mistake."""
    given = ("--elastic_server",) if options["elastic_server"] else read_credentials(options).given()
    if given:
        raise ConfigError(f"--standalone runs an etcd of its own: leave out {given[0]} (or unset its variable)")


def _command(options: dict[str, Any]) -> tuple[str, ...]:
    """The workers' argv. Raises `ConfigError` if what is to be run is not there."""
    if not options["command"]:
        raise ConfigError("no script was given: elastic-agent [options] script.py [arguments]; see --help")
    name, *arguments = options["command"]
    if options["module"] and options["no_python"]:
        raise ConfigError("--module and --no_python exclude each other")
    if options["module"]:
        _check_module(name)
        return (sys.executable, "-m", name, *arguments)
    if options["no_python"]:
        if which(name) is None:
            raise ConfigError(f"no program {name!r} on PATH")
        return (name, *arguments)
    if not Path(name).is_file():
        raise ConfigError(f"no script {name!r} in {Path.cwd()} (-m runs a module, --no_python a program)")
    return (sys.executable, name, *arguments)


def _check_module(name: str) -> None:
    sys.path.insert(0, "")  # as python -m does
    try:
        found = find_spec(name.partition(".")[0])  # of the parent only: finding a submodule would import it
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove("")
    if found is None:
        raise ConfigError(f"no module {name!r} can be found from {Path.cwd()}")


def _ranks(text: str) -> frozenset[int] | None:
    if text in {"all", "none"}:
        return None if text == "all" else frozenset()
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--console_ranks must be ranks like 0,1 or all or none, not {text!r}") from None
