"""Completion in the shell, by what click has for it, for a command line whose commands may stand after the options.

`elastic-agent completion bash` prints a script that has the shell call `elastic-agent` at each press of the key, with
the words so far in its environment. What etcd would have to be asked for is asked for a second at the most.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import click
from click.shell_completion import ShellComplete, get_completion_class

from agent.cli.options import CONTEXT

VARIABLE = "_ELASTIC_AGENT_COMPLETE"
"""Set by the script: `bash_complete`, `zsh_complete`, …"""
_SHELLS = ("bash", "zsh", "fish")
_BREAKS = frozenset("=:")
"""At which bash alone breaks words: `--np=2` comes as three."""

Choose = Callable[[list[str]], tuple[click.Command, list[str]]]


@click.command("elastic-agent completion", context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> int:
    """Print a script that lets SHELL complete commands, options, jobs and nodes.

    For bash, in ~/.bashrc: eval "$(elastic-agent completion bash)"
    """
    click.echo(_completer(shell, click.Command("elastic-agent")).source())
    return 0


def complete(choose: Choose) -> int:
    """Print what the word at the cursor may become, as the shell's script understands it.

    Args:
        choose: finds the command that words belong to, and the words that are its own.
    """
    shell = os.environ[VARIABLE].removesuffix("_complete")
    if shell not in _SHELLS:
        return 1
    words, word = _completer(shell, click.Command("elastic-agent")).get_completion_args()
    words = _rejoined(words)
    if words and words[-1].endswith("="):
        words[-1] = words[-1].removesuffix("=")
    if word.startswith("--"):
        word = "--" + word.removeprefix("--").replace("-", "_")
    command = choose([])[0]
    with contextlib.suppress(click.UsageError):  # an option is still without its value
        command, words = choose(words)
    if _has_script(command, words):
        words.append("--")  # what follows is the script's own
    completer = _completer(shell, command)
    for item in completer.get_completions(words, "" if word == "=" else word):
        click.echo(completer.format_completion(item))
    return 0


def _completer(shell: str, command: click.Command) -> ShellComplete:
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows these three
    return kind(command, {}, "elastic-agent", VARIABLE)


def _has_script(command: click.Command, words: list[str]) -> bool:
    """Whether the words name what is to be run, so that those that follow are its own."""
    with command.make_context(command.name, list(words), resilient_parsing=True) as context:
        return not context.allow_interspersed_args and bool(context.params["command"])


def _rejoined(words: list[str]) -> list[str]:
    """The words as they were typed."""
    joined: list[str] = []
    is_open = False
    for word in words:
        is_break = set(word) <= _BREAKS
        if joined and (is_break or is_open):
            joined[-1] += word
        else:
            joined.append(word)
        is_open = is_break
    return joined
