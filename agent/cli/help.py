"""The help of `elastic-agent` itself: one screen for a first user, and the options by topic.

elastic-agent --help            the first screen
elastic-agent help              the same
elastic-agent help recovery     all options of one topic
elastic-agent help all          all options
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from agent.cli.foreign_options import ADVICE
from agent.cli.options import CONTEXT, MAX_WIDTH, DocumentedOption, parameters_of
from agent.cli.run_options import TOPICS, Topic

_FIRST_OPTIONS = (
    *("job_id", "np", "nproc_per_node", "elastic_server", "ips", "checkpoint_dir", "log_dir", "max_restarts"),
    *("detect_within", "http", "fresh", "module", "no_python"),
)
"""Names of the options on the first screen."""
_FIRST_COLUMN = 29
"""Columns for their names."""
_INTRODUCTION = "Train SCRIPT as a member of a job. Run the same line on each of its nodes:"
_EXAMPLE = "elastic-agent --elastic_server=etcd:2379 --job_id=X --np=2 train.py"
"""At most 76 columns, so that it is one line on a terminal of 80."""
_COMMANDS = (
    ("inspect a job", "status history explain logs report page incident"),
    ("change a job", "scale drain exclude include restart pause resume stop reset"),
    ("check first", "doctor (the machines), rehearse (the script)"),
    ("shell, help", "completion help"),
)
_VARIABLES = (
    "Each option is also read from a variable: --job_id from ELASTIC_AGENT_JOB_ID. The command line wins. Hyphens may "
    "be written in place of underscores, and names may be shortened."
)
_CONFIG = (
    "The file has options by their names, in TOML: a text, a number, true or false for options without a value, or a "
    "list of texts. Paths are as on the command line, where the script and its arguments stay. Commands about a job "
    "take from the same file which job they are about."
)
_CONFIG_EXAMPLE = ('job_id = "resnet"', 'elastic_server = "etcd:2379"', 'np = "2:4"', "standalone = false")
_LAUNCHERS = (
    "Options of torchrun and Paddle's launcher that have a like meaning are aliases, which the other topics show. The "
    "following options are accepted with a warning or refused with the advice that stands beside them:"
)


class RunCommand(click.Command):
    """A command that takes the many options of `run`: its help is one screen."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's names
        """Write the first screen."""
        _write_first_screen(formatter)


class RunLikeCommand(click.Command):
    """A command that takes the options of `run` beside its own: its help has its own options only."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and where the others are explained."""
        shared = {parameter.name for topic in TOPICS for parameter in parameters_of(topic.options)}
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and each.name not in shared]
        own = [each.get_help_record(ctx) for each in options]
        with formatter.section("Options"):
            formatter.write_dl([record for record in own if record is not None])
        formatter.write_paragraph()
        formatter.write_text("It also takes all options of `elastic-agent run`: see `elastic-agent help all`.")


def _write_first_screen(formatter: click.HelpFormatter) -> None:
    formatter.write_usage("elastic-agent", "[run] [OPTIONS] SCRIPT [ARGUMENTS]…")
    formatter.write_usage("elastic-agent", "COMMAND [OPTIONS]", prefix="       ")
    formatter.write_paragraph()
    formatter.write_text(_INTRODUCTION)
    with formatter.indentation():
        formatter.write_text(_EXAMPLE)
    options = {parameter.name: parameter for topic in TOPICS for parameter in parameters_of(topic.options)}
    with formatter.section("Options"):
        formatter.write_dl([_short_record(options[name]) for name in _FIRST_OPTIONS], col_max=_FIRST_COLUMN)
    with formatter.section("Commands, each with --help"):
        formatter.write_dl(list(_COMMANDS))
    formatter.write_paragraph()
    formatter.write_text(f"More: elastic-agent help TOPIC, where TOPIC is {', '.join(_topic_names())}.")


def _topic_names() -> list[str]:
    return [*(topic.name for topic in TOPICS), "all"]


def _short_record(parameter: click.Parameter) -> tuple[str, str]:
    """One line of the first screen: the main name, and the first sentence of the help."""
    assert isinstance(parameter, DocumentedOption)  # noqa: S101 - as all options of the topics
    short = [name for name in parameter.opts if not name.startswith("--")]
    names = ", ".join([*short, f"--{parameter.name}"])
    sentence = (parameter.help or "").partition(". ")[0].removesuffix(".")
    default = f"  [default: {parameter.shown_default}]" if parameter.shown_default else ""
    return f"{names} {parameter.metavar or ''}".strip(), sentence + default


def _write_topic(topic: Topic, formatter: click.HelpFormatter) -> None:
    context = click.Context(click.Command("elastic-agent"))
    records = [parameter.get_help_record(context) for parameter in parameters_of(topic.options)]
    with formatter.section(topic.title):
        formatter.write_dl([record for record in records if record is not None])
    if topic.name == "config":
        formatter.write_paragraph()
        formatter.write_text(_CONFIG)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write("".join(f"{'':4}{line}\n" for line in _CONFIG_EXAMPLE))
    if topic.name == "launchers":
        formatter.write_paragraph()
        formatter.write_text(_LAUNCHERS)
        with formatter.indentation():
            formatter.write_dl([(f"--{name}", advice) for name, advice in sorted(ADVICE.items())])


@click.command("elastic-agent help", context_settings=CONTEXT)
@click.argument("topic", type=click.Choice(_topic_names()), required=False)
def help_command(topic: str | None) -> int:
    """Explain the options of one TOPIC, or all of them."""
    formatter = click.HelpFormatter(max_width=MAX_WIDTH)
    if topic is None:
        _write_first_screen(formatter)
    else:
        for each in _chosen(topic):
            _write_topic(each, formatter)
        formatter.write_paragraph()
        formatter.write_text(_VARIABLES)
    click.echo(formatter.getvalue().strip("\n"))
    return 0


def _chosen(name: str) -> Iterator[Topic]:
    return (topic for topic in TOPICS if name in {topic.name, "all"})
