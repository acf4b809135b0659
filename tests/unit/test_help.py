"""The help of `elastic-agent`: one screen for a first user, and every option under a topic."""

from __future__ import annotations

import re
from collections.abc import Callable

import click
import pytest

from agent.cli.command_line import COMMANDS, run
from agent.cli.help import help_command
from agent.cli.options import DocumentedOption
from agent.cli.run_options import RUN_OPTIONS, TOPICS, Topic

Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs a command, and returns what it prints on a terminal of some columns."""

    def show(command: click.Command, *arguments: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert command.main(list(arguments), prog_name=command.name, standalone_mode=False) == 0
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("columns", [80, 110])
def test_the_first_screen_is_one_screen(shown: Shown, columns: int) -> None:
    lines = shown(run, "--help", columns=columns).splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("Usage: elastic-agent")
    assert "  elastic-agent --elastic_server=etcd:2379 --job_id=X --np=2 train.py" in lines, "one line, to be copied"


def test_the_first_screen_names_every_command_and_every_topic(shown: Shown) -> None:
    words = shown(run, "--help").replace(",", " ").replace(".", " ").split()
    assert COMMANDS.keys() - {"run"} <= set(words)
    assert {topic.name for topic in TOPICS} | {"all"} <= set(words)


def test_help_without_a_topic_is_the_first_screen(shown: Shown) -> None:
    assert shown(help_command) == shown(run, "--help")


def test_all_topics_together_show_each_option_once_with_its_default(shown: Shown) -> None:
    text = shown(help_command, "all", columns=110)
    heads = [line.strip().partition("  ")[0] for line in text.splitlines() if re.match("  -", line)]
    for parameter in run.params:
        if isinstance(parameter, DocumentedOption):
            assert len([head for head in heads if re.search(rf"--{parameter.name}(?!\w)", head)]) == 1, parameter.name
            assert parameter.shown_default in " ".join(text.split())


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_a_topic_shows_its_options_and_no_others(shown: Shown, topic: Topic) -> None:
    text = shown(help_command, topic.name)
    assert text.startswith(f"{topic.title}:\n")
    others = [each.title for each in TOPICS if each is not topic]
    assert not any(f"{other}:\n" in text for other in others)


def test_each_option_of_run_has_a_topic() -> None:
    assert len(RUN_OPTIONS) > sum(len(topic.options) for topic in TOPICS) > 60
    visible = [each for each in run.params if isinstance(each, click.Option) and not each.hidden]
    assert {each.name for each in visible if not isinstance(each, DocumentedOption)} == {"version"}


def test_durations_are_in_seconds() -> None:
    for parameter in run.params:
        assert getattr(parameter, "metavar", None) != "S", parameter.name


def test_an_unknown_topic_is_a_mistake_that_names_the_topics() -> None:
    with pytest.raises(click.BadParameter, match="'recovery'"):
        help_command.main(["nothing"], standalone_mode=False)


def test_doctor_shows_its_own_options_and_refers_to_the_others(shown: Shown) -> None:
    text = shown(COMMANDS["doctor"], "--help")
    assert "--json" in text
    assert "elastic-agent help all" in " ".join(text.split())
    assert "--hang_floor" not in text
