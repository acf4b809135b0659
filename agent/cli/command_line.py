"""The command line: finds the command, runs it, and reports a user's mistake.

    elastic-agent [run] [options] script.py [arguments…]
    elastic-agent scale --np=4                                     (and the other commands of `agent/cli/commands.py`)
    elastic-agent rehearse [--np=2] [--steps=N] script.py [arguments…]

A command may also stand after the options, as with Paddle: `elastic-agent --np=4 --job_id=X scale`. A script with the
name of a command is run as `./scale`. A user's mistake is reported as one line with an exit code (`agent/errors.py`),
never as a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from agent import __version__
from agent.cli import commands
from agent.cli.agent_config import read_config, read_node_config, script_file
from agent.cli.completion import VARIABLE, complete, completion
from agent.cli.foreign_options import PADDLE_OPTIONS, advice, apply_foreign_options
from agent.cli.help import RunCommand, RunLikeCommand, help_command
from agent.cli.options import CONTEXT, JSON, complete_path, with_options
from agent.cli.run_options import RUN_OPTIONS
from agent.config import AgentConfig
from agent.errors import EXIT_USAGE, ConfigError, ElasticAgentError
from agent.observe.script_calls import take_calls, with_calls
from agent.observe.stderr import standard_error
from agent.runtime.preflight import limit_behind, require_directory, require_loopback, require_room
from agent.store.access import PASSWORD_VARIABLE
from agent.workers import devices

_SCRIPT = "SCRIPT [ARGUMENTS]…"
_DISTINCTIVE = frozenset({"np", "elastic_server", "job_id", "standalone", "nproc_per_node", "max_restarts"})
"""Options that scripts hardly ever have."""
_ENVIRON: dict[str, str] = {}
"""The environment that the user gave to the agent, for the workers."""
_PADDLE_MODULE = os.path.join("agent", "launch.py")  # noqa: PTH118 - as sys.argv[0] ends for `python -m agent.launch`


def _complete_command(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Suggest files and, before a script, commands. Files are first: bash shows these if no command fits."""
    names = [] if context.params["command"] else [name for name in COMMANDS if name.startswith(word)]
    return [*complete_path(context, parameter, word), *map(CompletionItem, names)]


@click.command("elastic-agent", cls=RunCommand, context_settings={**CONTEXT, "allow_interspersed_args": False})
@with_options(RUN_OPTIONS)
@click.version_option(__version__, message="%(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar=_SCRIPT, shell_complete=_complete_command)
def run(**options: Any) -> int:  # noqa: ANN401 - click passes the options by name
    """Train SCRIPT on this node, as a member of a job."""
    from agent.cli.start import run_agent, run_standalone  # noqa: PLC0415 - loads the etcd client: only when needed

    require_directory()
    require_loopback()
    options, unused = apply_foreign_options(options, _ENVIRON)
    if unused:
        standard_error().write(f"elastic-agent: warning: {unused}")
    if passed := _passed_to_script(options):
        standard_error().write(f"elastic-agent: note: {passed}")
    gpus = devices.choose(options["gpus"], _ENVIRON)
    visible = {devices.VISIBLE: ",".join(gpus)} if gpus else {}
    config = read_config(options, gpus, _ENVIRON)
    require_room(config.node.nproc, brings_etcd=config.ensemble is not None or not config.endpoints)
    run_it = run_agent if config.endpoints else run_standalone
    shown = _shown_options(options, gpus, config) if options["banner"] or _has_paddle_names(options) else ()
    return run_it(replace(config, shown_options=shown), _ENVIRON | visible)


@click.command(
    "elastic-agent doctor", cls=RunLikeCommand, context_settings={**CONTEXT, "allow_interspersed_args": False}
)
@with_options(RUN_OPTIONS)
@JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar=_SCRIPT)
def doctor(json: bool, **options: Any) -> int:  # noqa: ANN401, FBT001 - as above
    """Report what would keep the job from starting. Give it the same options and script, on each machine at once."""
    from agent.doctor.command import diagnose  # noqa: PLC0415 - as above

    require_directory()
    options, _ = apply_foreign_options(options, _ENVIRON)
    gpus = devices.choose(options["gpus"], _ENVIRON)
    return diagnose(read_node_config(options, gpus, _ENVIRON), _ENVIRON, script_file(options), as_json=json)


@click.command("elastic-agent rehearse", context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option("--np", type=click.IntRange(min=1), default=2, show_default=True, metavar="N", help="Nodes to simulate.")
@click.option(
    "--steps",
    type=click.IntRange(min=10),
    metavar="N",
    help="Optimizer steps of the undisturbed run.  [default: measured]",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar=_SCRIPT)
def rehearse(np: int, steps: int | None, command: tuple[str, ...]) -> int:
    """Run SCRIPT on this machine, break and resize it, and report what a restart does not restore."""
    from agent.rehearse.command import rehearse as rehearse_script  # noqa: PLC0415 - as above

    require_directory()
    return rehearse_script(command, np, steps)


COMMANDS: dict[str, click.Command] = {
    "run": run,
    **commands.BY_NAME,
    "doctor": doctor,
    "rehearse": rehearse,
    "completion": completion,
    "help": help_command,
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line; exit with its code."""
    _open_standard_streams()
    take_calls()
    # The workers' environment is copied before any library of the agent adds to it, and without etcd's password.
    _ENVIRON.update({name: value for name, value in os.environ.items() if name != PASSWORD_VARIABLE})
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        code = complete(find_command) if VARIABLE in os.environ else _run(arguments)
    except click.NoSuchOption as error:
        code = _report(_unknown_option(error), EXIT_USAGE)
    except click.ClickException as error:
        code = _report(error.format_message(), EXIT_USAGE)
    except ElasticAgentError as error:
        code = _report(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:  # noqa: BLE001 - mostly a bug of ours: print the traceback for a report
        limit = limit_behind(error)
        if not limit:
            standard_error().write(f"{traceback.format_exc()}elastic-agent: error: this is a fault of elastic-agent")
        code = _report(limit, EXIT_USAGE) if limit else 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    arguments = expand_prefixes(arguments)
    command, arguments = find_command(arguments)
    code: int = command.main(arguments, prog_name=command.name, standalone_mode=False, obj=arguments)
    return code


def expand_prefixes(arguments: list[str]) -> list[str]:
    """Replace unambiguous prefixes of options by the full options, as torchrun does.

    Raises:
        click.NoSuchOption: no option begins with a prefix.
        ConfigError: several options do.
    """
    arguments = list(arguments)
    while True:
        try:
            find_command(arguments)
        except click.NoSuchOption as error:
            at = next((number for number, word in enumerate(arguments) if _name_of(word) == error.option_name), None)
            full = _full_name(error.option_name)
            if at is None or full is None:
                raise
            _, equals, value = arguments[at].partition("=")
            arguments[at] = f"{full}{equals}{value}"
        else:
            return arguments


def _full_name(prefix: str) -> str | None:
    """The only option with this prefix; None if no option has it."""
    names = _names_with(prefix)
    if len(prefix) <= len("--") or not names:
        return None
    if len(names) > 1:
        raise ConfigError(f"{prefix} may be {' or '.join(sorted(names.values()))}: say which")
    return next(iter(names.values()))


def _names_with(prefix: str) -> dict[str | None, str]:
    """A spelling with this prefix of each option that has one, by the option's name."""
    return {each.name: name for each in run.params for name in each.opts if name.startswith(prefix)}


def _unknown_option(error: click.NoSuchOption) -> str:
    """What to write instead of an option that does not exist."""
    if instead := advice(error.option_name):
        return f"{error.option_name} is another launcher's: {instead}"
    if _is_option_of_run(error.option_name) and error.ctx is not None and error.ctx.command is not run:
        command = error.ctx.info_name
        return f"{command} has no {error.option_name}, which is an option of elastic-agent run: see {command} --help"
    near = list(_names_with(error.option_name[:-1]).values())  # --nprocs: only its last letter is too much
    return f"{error.message} Did you mean {near[0]!r}?" if len(near) == 1 else error.format_message()


def _is_option_of_run(name: str) -> bool:
    return any(name in each.opts for each in run.params)


def _passed_to_script(options: dict[str, Any]) -> str:
    """Say which options probably stand behind the script by mistake. Empty: none.

    Scripts have options of their own, so this concerns only distinctive names that are given nowhere else. A program
    (`--no_python`) may be a launcher that has the same ones.
    """
    words: list[str] = list(options["command"])
    context = click.get_current_context()
    names = {
        name
        for each in context.command.params
        if each.name in _DISTINCTIVE and context.get_parameter_source(each.name) is ParameterSource.DEFAULT
        for name in each.opts
    }
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    found = [word for word in own if _name_of(word) in names]
    if not found or options["no_python"]:
        return ""
    verb = "are" if len(found) > 1 else "is"
    return f"{', '.join(found)} {verb} passed to {words[0]}; options of elastic-agent come before the script"


def _name_of(word: str) -> str:
    """An option's name as the parser normalizes it; any other word unchanged."""
    return "--" + word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else word


def _open_standard_streams() -> None:
    """Open /dev/null in place of each of stdin, stdout and stderr (0, 1, 2) that this process was started without.

    Otherwise the next files that are opened would get these numbers, and output would be written into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one


def _report(message: str, code: int) -> int:
    standard_error().write(f"elastic-agent: error: {with_calls(' '.join(message.split()))}")
    return code


def find_command(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """Find the command: its name is the first word that is neither an option nor an option's value.

    Returns:
        The command, and the arguments without its name.
    """
    context = click.Context(run, **run.context_settings)
    words = run.make_parser(context).parse_args(list(arguments))[0].get("command")
    rest = words if isinstance(words, (list, tuple)) else ()  # click has a value of its own for "no words"
    if not rest or rest[0] not in COMMANDS:
        return run, arguments
    at = len(arguments) - len(rest)
    return COMMANDS[rest[0]], arguments[:at] + arguments[at + 1 :]


def _has_paddle_names(options: dict[str, Any]) -> bool:
    """Whether the command line or the environment uses a name of Paddle's launcher."""
    line: list[str] = click.get_current_context().obj
    typed = map(_name_of, line[: len(line) - len(options["command"])])
    return (
        not PADDLE_OPTIONS.isdisjoint(typed)
        or any(name.startswith("PADDLE_ELASTIC_") for name in _ENVIRON)
        or sys.argv[0].endswith(_PADDLE_MODULE)
    )


def _shown_options(options: dict[str, Any], gpus: tuple[str, ...], config: AgentConfig) -> tuple[tuple[str, str], ...]:
    """Names and values for the banner: all that the user gave, and what Paddle's launcher always shows."""
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
