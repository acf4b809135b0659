"""options.md: every option, by topic and by command."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import click

from agent.cli.command_line import COMMANDS, run
from agent.cli.options import JOB_OPTIONS, DocumentedOption, parameters_of
from agent.cli.run_options import TOPICS
from reference_pages.source import cell, code_cell, page, table


def options_page() -> str:
    """All options, by topic, and those of the commands."""
    parts = [
        (
            "Options of `elastic-agent [run] [OPTIONS] SCRIPT [ARGUMENTS]…`, as `elastic-agent help all` shows them. "
            "Hyphens may be written in place of underscores, and a name may be shortened as long as it is unambiguous. "
            "The command line wins over variables; of several variables, the first one that is set counts.\n"
        ),
        *(f"- [{topic.title}](#{_anchor(topic.title)}): `elastic-agent help {topic.name}`" for topic in TOPICS),
        "- [Commands](#commands)\n",
    ]
    for topic in TOPICS:
        parts += [f"## {topic.title}\n", _options_table(parameters_of(topic.options))]
    parts += [
        "## Commands\n",
        (
            "All commands but `doctor`, `rehearse`, `completion` and `help` take the following options beside their "
            "own, and `--json`, which prints JSON for programs.\n"
        ),
        _options_table(parameters_of(JOB_OPTIONS)),
    ]
    for name, command in COMMANDS.items():
        if command is run:
            continue
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        metavars = [each.make_metavar(click.Context(command)) for each in arguments]
        lines = [line.strip() for line in inspect.cleandoc(command.help or "").splitlines()]
        parts += [f"### `{' '.join(['elastic-agent', name, *filter(None, metavars)])}`\n", "\n".join(lines) + "\n"]
        own = _own_options(command)
        parts += [_options_table(own)] if own else []
        if "server_num" in {each.name for each in command.params}:
            parts += ["It also takes all options of `elastic-agent run`.\n"]
    return page("Options", *parts)


def _own_options(command: click.Command) -> list[click.Option]:
    """The options of a command that it does not share with `run` or with the other commands."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    of_job = {parameter.name for parameter in parameters_of(JOB_OPTIONS)}
    of_run = {parameter.name for parameter in run.params}
    names = {each.name for each in options}
    shared = of_run if of_run - {"version"} <= names | {"command"} else of_job | {"json"} if of_job <= names else set()
    return [each for each in options if each.name not in shared]


def _anchor(title: str) -> str:
    return "".join(each for each in title.lower().replace(" ", "-") if each.isalnum() or each == "-")


def _options_table(parameters: Iterable[click.Parameter]) -> str:
    rows = []
    for each in parameters:
        if not isinstance(each, click.Option):
            continue
        names, text = each.get_help_record(click.Context(click.Command("elastic-agent"))) or ("", "")
        default = each.shown_default if isinstance(each, DocumentedOption) else ""
        text = text.removesuffix(f"  [default: {default}]")
        variables = ", ".join(map(code_cell, each.variables)) if isinstance(each, DocumentedOption) else "—"
        rows.append((code_cell(names), cell(text), cell(default), variables))
    return table(("option", "meaning", "default", "variables"), rows)
