"""What a command asks its user, and what it answers."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from agent.errors import ConfigError, ElasticAgentError


class AnswerDeclined(ElasticAgentError):  # noqa: N818 - says what is the case, not that a bug was hit
    """Nobody need act: who was asked said no, and nothing was changed."""


def confirm(question: str, *, is_agreed: bool) -> None:
    """Ask before something is disturbed or lost.

    Args:
        question: what would be done, and to what; ends with a question mark.
        is_agreed: `--yes` was given, so nobody is asked.

    Raises:
        ConfigError: nobody can be asked: standard input is no terminal.
        Declined: the answer was no.
    """
    if is_agreed:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask at: say --yes if you mean it")
    if not click.confirm(question, err=True):
        raise AnswerDeclined("nothing was changed")


def tell(job_id: str, command: str, sentence: str, *, as_json: bool, **details: Any) -> int:  # noqa: ANN401
    """Print what a command has done; return the exit code.

    Args:
        job_id: to whom.
        command: the command's name.
        sentence: for people.
        as_json: print an object with all of this instead.
        details: for programs.
    """
    if as_json:
        print_json({"job_id": job_id, "command": command, "sentence": sentence, **details})
    else:
        click.echo(f"job {job_id}: {sentence}")
    return 0


def print_json(value: object) -> None:
    """Print a value as JSON that people can read too."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)))
