"""Shell completion. It uses click's, extended to commands that stand after the options.

`elastic-agent completion bash` prints a script. It makes the shell call `elastic-agent` each time the completion key is
pressed, with the words so far in the environment. Suggestions that come from etcd are waited for one second at most.
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
"""Characters at which only bash splits words: it passes `--np=2` as three words."""

FindCommand = Callable[[list[str]], tuple[click.Command, list[str]]]


@click.command("elastic-agent completion", context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> int:
    """Print a script that makes SHELL complete commands, options, jobs and nodes.

    For bash, in ~/.bashrc: eval "$(elastic-agent completion bash)"
    """
    click.echo(_completer(shell, click.Command("elastic-agent")).source())
    return 0


def complete(find_command: FindCommand) -> int:
    """Print the suggestions for the word at the cursor, in the form that the shell's script reads.

    Args:
        find_command: returns the command that the words belong to, and the words without its name.
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
    command = find_command([])[0]
    with contextlib.suppress(click.UsageError):  # the last option may have no value yet
        command, words = find_command(words)
    if _has_script(command, words):
        words.append("--")  # the words that follow are the script's arguments
    completer = _completer(shell, command)
    for item in completer.get_completions(words, "" if word == "=" else word):
        click.echo(completer.format_completion(item))
    return 0


def _completer(shell: str, command: click.Command) -> ShellComplete:
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows these three
    return kind(command, {}, "elastic-agent", VARIABLE)


def _has_script(command: click.Command, words: list[str]) -> bool:
    """Whether the words name a script, so that the words that follow are its arguments."""
    with command.make_context(command.name, list(words), resilient_parsing=True) as context:
        return not context.allow_interspersed_args and bool(context.params["command"])


def _rejoined(words: list[str]) -> list[str]:
    """Undo bash's splitting: return the words as they were typed."""
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
