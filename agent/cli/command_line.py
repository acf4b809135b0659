"""The command line, and where the parts are put together.

    elastic-agent [run] [options] script.py [arguments…]
    elastic-agent scale --np=4                                     (and what else `agent/cli/commands.py` has)
    elastic-agent rehearse [--np=2] [--steps=N] script.py [arguments…]

A command may also stand after the options, as with Paddle: `elastic-agent --np=4 --job_id=X scale`. A script of
that name is run as `./scale`. A user's mistake is answered with one line and an exit code (`agent/errors.py`),
never with a traceback.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from agent import __version__
from agent.cli import commands, report_command
from agent.cli.completion import VARIABLE, complete, completion
from agent.cli.foreign_options import PADDLE_OPTIONS, advice, settle
from agent.cli.options import CONTEXT, DEFAULT_STORE_TIMEOUT_S, JSON, complete_path, with_options
from agent.cli.preflight import limit_behind, require_directory, require_loopback, require_room
from agent.cli.run_options import FOR_RANKS, RUN_OPTIONS
from agent.cli.script_calls import take_calls, with_calls
from agent.cli.slurm import allotted_gpus
from agent.cli.standalone import checkpoints_of
from agent.config import (
    AgentConfig,
    Chosen,
    HangConfig,
    HealthConfig,
    HttpConfig,
    NodeConfig,
    SnapshotConfig,
    TimingConfig,
    WorkerConfig,
    check_script,
    parse_bytes,
    parse_command,
)
from agent.console import ConsoleConfig, parse_ranks, parse_streams
from agent.errors import EXIT_USAGE, ConfigError, ElasticAgentError
from agent.observe.stderr import standard_error
from agent.roles.plan import is_asked_for, plan
from agent.store.access import PASSWORD_VARIABLE
from agent.web.access import read_token
from agent.web.address import parse_http
from agent.workers import devices
from agent.workers.numa import NumaBinding, bind_ranks

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
  elastic-agent page                    where the job's web page is, and the token that it asks for
  elastic-agent doctor SCRIPT           say what would keep a job from starting
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
    from agent.cli.start import run_agent, run_standalone  # noqa: PLC0415 - loads the etcd client: only when needed

    require_directory()
    require_loopback()
    options, unused = settle(options, _ENVIRON)
    if unused:
        standard_error().write(f"elastic-agent: warning: {unused}")
    gpus = devices.choose(options["gpus"], _ENVIRON)
    chosen = {devices.VISIBLE: ",".join(gpus)} if gpus else {}
    config = _with_roles(options, gpus) if is_asked_for(options) else _config(options, gpus)
    require_room(config.node.nproc, brings_etcd=config.ensemble is not None or not config.endpoints)
    run_it = run_agent if config.endpoints else run_standalone
    given = _given(options, gpus, config) if options["banner"] or _comes_from_paddle(options) else ()
    return run_it(replace(config, given=given), _ENVIRON | chosen)


@click.command("elastic-agent doctor", context_settings={**CONTEXT, "allow_interspersed_args": False})
@with_options(RUN_OPTIONS)
@JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]…")
def doctor(json: bool, **options: Any) -> int:  # noqa: ANN401, FBT001 - as above
    """Say what would keep the job from starting, given the same options and script, on each machine at once."""
    from agent.doctor.command import diagnose  # noqa: PLC0415 - as above

    require_directory()
    options, _ = settle(options, _ENVIRON)
    gpus = devices.choose(options["gpus"], _ENVIRON)
    return diagnose(_config(options, gpus), _ENVIRON, _script(options), as_json=json)


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

    require_directory()
    return rehearse_script(command, np, steps)


_COMMANDS = {
    "run": run,
    **commands.BY_NAME,
    **report_command.BY_NAME,
    "doctor": doctor,
    "rehearse": rehearse,
    "completion": completion,
}
_ENVIRON: dict[str, str] = {}
_PADDLE_MODULE = os.path.join("agent", "agent/launch.py")  # noqa: PTH118 - what `python -m` makes of a module's name
_STDIN = "-"
"""As a script's name, as python has it: it comes on standard input."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line; exit with its code."""
    _open_standard_streams()
    take_calls()
    # What the workers get: before any library of the agent's adds to it, and never etcd's password.
    _ENVIRON.update({name: value for name, value in os.environ.items() if name != PASSWORD_VARIABLE})
    try:
        code = complete(_choose) if VARIABLE in os.environ else _run(list(sys.argv[1:] if argv is None else argv))
    except click.NoSuchOption as error:
        instead = advice(error.option_name)
        said = f"{error.option_name} is another launcher's: {instead}" if instead else error.format_message()
        code = _complain(said, EXIT_USAGE)
    except click.ClickException as error:
        code = _complain(error.format_message(), EXIT_USAGE)
    except ElasticAgentError as error:
        code = _complain(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:  # noqa: BLE001 - mostly a fault of ours: the traceback is what a report needs
        limit = limit_behind(error)
        if not limit:
            standard_error().write(f"{traceback.format_exc()}elastic-agent: error: this is a fault of elastic-agent")
        code = _complain(limit, EXIT_USAGE) if limit else 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    arguments = _spelled_out(arguments)
    command, arguments = _choose(arguments)
    code: int = command.main(arguments, prog_name=command.name, standalone_mode=False, obj=arguments)
    return code


def _spelled_out(arguments: list[str]) -> list[str]:
    """Put options in the place of their unambiguous beginnings, as torchrun takes them.

    Raises:
        click.NoSuchOption: no option begins so.
        ConfigError: several do.
    """
    arguments = list(arguments)
    while True:
        try:
            _choose(arguments)
        except click.NoSuchOption as error:
            at = next((number for number, word in enumerate(arguments) if _name_of(word) == error.option_name), None)
            full = _full_name(error.option_name)
            if at is None or full is None:
                raise
            _, equals, value = arguments[at].partition("=")
            arguments[at] = f"{full}{equals}{value}"
        else:
            return arguments


def _full_name(beginning: str) -> str | None:
    """The one option that begins so; None: none does."""
    names = {each.name: name for each in run.params for name in each.opts if name.startswith(beginning)}
    if len(beginning) <= len("--") or not names:
        return None
    if len(names) > 1:
        raise ConfigError(f"{beginning} may be {' or '.join(sorted(names.values()))}: say which")
    return next(iter(names.values()))


def _name_of(word: str) -> str:
    """An option as the parser has it; any other word as it is."""
    return "--" + word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else word


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
    standard_error().write(f"elastic-agent: error: {with_calls(' '.join(message.split()))}")
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


def _comes_from_paddle(options: dict[str, Any]) -> bool:
    """Whether the line has a name of its launcher's, or the environment."""
    line: list[str] = click.get_current_context().obj
    typed = map(_name_of, line[: len(line) - len(options["command"])])
    return (
        not PADDLE_OPTIONS.isdisjoint(typed)
        or any(name.startswith("PADDLE_ELASTIC_") for name in _ENVIRON)
        or sys.argv[0].endswith(_PADDLE_MODULE)
    )


def _given(options: dict[str, Any], gpus: tuple[str, ...], config: AgentConfig) -> tuple[tuple[str, str], ...]:
    """What is shown at the start: all that was given, and what Paddle's launcher always shows."""
    source = click.get_current_context().get_parameter_source
    set_by_user = {name for name in options if source(name) is not ParameterSource.DEFAULT} - {"command"}
    script, *arguments = options["command"]
    shown = {
        **{name: options[name] for name in sorted({*set_by_user, "log_dir"})},
        "gpus": ",".join(gpus) or None,
        "ips": options["ips"] or (None if config.endpoints else config.node.address),
        "training_script": script,
        "training_script_args": arguments,
    }
    return tuple((name, str(value)) for name, value in shown.items())


def _config(options: dict[str, Any], gpus: tuple[str, ...], *, has_servers: bool = False) -> AgentConfig:
    from agent.cli.meeting import read_meeting  # noqa: PLC0415
    from agent.doctor.facts import Facts  # noqa: PLC0415
    from agent.runtime import node_facts  # noqa: PLC0415
    from agent.runtime.agent_certificates import read_files  # noqa: PLC0415

    command = _command(options)
    meeting = read_meeting(options, _ENVIRON)
    nproc = devices.count_ranks(options["nproc_per_node"] or allotted_gpus(_ENVIRON), gpus, _ENVIRON)
    return AgentConfig(
        endpoints=meeting.access.endpoints,
        credentials=meeting.access.credentials,
        ensemble=meeting.ensemble,
        store_timeout_s=options["store_timeout"] or (math.inf if meeting.ensemble else DEFAULT_STORE_TIMEOUT_S),
        job=meeting.job,
        node=NodeConfig(
            node_id=meeting.node_id,
            is_node_id_chosen=meeting.is_node_id_chosen,
            address=meeting.address,
            ips=node_facts.resolve(meeting.address),
            position=meeting.ensemble.position if meeting.ensemble else 0,
            nproc=nproc,
            cpus=_cpus(options["numa_binding"], nproc, gpus),
        ),
        timing=TimingConfig(
            detect_within_s=options["detect_within"],
            chosen=Chosen(options["lease"], options["link_heartbeat"], options["settle"]),
            kill_timeout_s=options["kill_timeout"],
            handoff_timeout_s=options["handoff_timeout"],
            handoff_wait_s=options["handoff_wait"],
            stop_grace_s=options["stop_grace"],
            elastic_timeout_s=options["elastic_timeout"],
            preempted_code=meeting.preempted_code,
        ),
        workers=WorkerConfig(
            command=command,
            log_dir=Path(options["log_dir"]).absolute(),
            checkpoint_dir=Path(options["checkpoint_dir"] or checkpoints_of(meeting.job.job_id)).absolute(),
            console=_console(options),
            role=options["role"],
            max_restarts=0 if options["fault_tolerance_level"] == "0" else options["max_restarts"],
            ends_at_mistakes=_is_default("max_restarts"),
            progress_window_s=options["progress_window"],
            standby=options["standby"],
            stdin_rank=options["stdin_rank"],
            script_from_stdin=_read_script() if command[:2] == (sys.executable, _STDIN) else None,
        ),
        hang=HangConfig(options["hang_timeout"], options["hang_floor"], options["hang_factor"], options["hang_first"]),
        snapshots=SnapshotConfig(
            options["snapshot_overhead"], parse_bytes("--snapshot_memory", options["snapshot_memory"])
        ),
        http=_http(options),
        tls=read_files(options, has_servers=has_servers),
        events=options["events"],
        facts=Facts.here(_script(options)).brief,
        health=HealthConfig(parse_command("--health_check", options["health_check"]), options["health_timeout"]),
    )


def _with_roles(options: dict[str, Any], gpus: tuple[str, ...]) -> AgentConfig:
    """Of a job with parameter servers: its machines are those of its processes. Raises `ConfigError`."""
    source = click.get_current_context().get_parameter_source
    wrong = [name for name in FOR_RANKS if source(name) is ParameterSource.COMMANDLINE]
    if wrong:
        raise ConfigError(f"--{wrong[0]} is for jobs of ranks: leave it out of one with parameter servers")
    roles = plan(options)
    several = len(roles.machines) > 1 and not options["elastic_server"]
    config = _config({**options, "ips": ",".join(roles.machines)} if several else options, gpus, has_servers=True)
    return replace(config, roles=roles, gpus=gpus or devices.detect(_ENVIRON))


def _is_default(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.DEFAULT


def _http(options: dict[str, Any]) -> HttpConfig | None:
    if options["http"] is None:
        if options["http_token_file"] is not None:
            raise ConfigError("--http_token_file is for --http: say where the page is to be served")
        return None
    host, port = parse_http(options["http"])
    return HttpConfig(host, port, read_token(options["http_token_file"]))


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
        if shutil.which(name) is None:
            raise ConfigError(f"no program {name!r} on PATH")
        return (name, *arguments)
    if name == _STDIN:
        return (sys.executable, name, *arguments)
    check_script(name, " (-m runs a module, --no_python a program)")
    return (sys.executable, name, *arguments)


def _script(options: dict[str, Any]) -> Path | None:
    """The script's file, if it is one."""
    name = options["command"][0]
    if options["module"] or options["no_python"] or name == _STDIN:
        return None
    return Path(name, "agent/__main__.py") if Path(name).is_dir() else Path(name)


def _read_script() -> str:
    """Read the script from standard input, once and for all ranks; return a file that holds it while we live.

    Each rank is then `python -`, also after a restart, and sees in `sys.argv`, tracebacks and `__main__` what it would
    see without us.
    """
    fd = os.memfd_create("elastic-agent:script", os.MFD_CLOEXEC)
    with suppress(OSError), open(0, "rb", closefd=False) as given, open(os.dup(fd), "wb") as script:  # noqa: PTH123
        shutil.copyfileobj(given, script)  # where nothing can be read the script is empty, as it is for python
    return f"/proc/{os.getpid()}/fd/{fd}"


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


def _cpus(how: NumaBinding | None, nproc: int, gpus: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(bind_ranks(how, nproc, devices.bus_ids(gpus, _ENVIRON))) if how else ()


def _console(options: dict[str, Any]) -> ConsoleConfig:
    usual = "all" if options["local_ranks_filter"] else "0"
    return ConsoleConfig(
        ranks=parse_ranks("--console_ranks", options["console_ranks"] or usual),
        local_ranks=parse_ranks("--local_ranks_filter", options["local_ranks_filter"] or "all"),
        redirects=parse_streams("--redirects", options["redirects"]),
        tee=parse_streams("--tee", options["tee"]),
        prefix=options["log_line_prefix_template"],
    )
