"""What the agent says: one line per event on standard error, so that standard output is the workers' alone.

Of our own making, for the libraries for it take a fifth of the agent's start to import.
"""

from __future__ import annotations

import time
import traceback

from agent.observe.stderr import standard_error

_QUOTED = frozenset(" \t\r\n=\"'")


class Log:
    """Prints lines as `HH:MM:SS elastic-agent[node] message key=value`. May be used from any thread."""

    def __init__(self) -> None:
        self.who = "elastic-agent"

    def info(self, sentence: str, **more: object) -> None:
        """Say what happens."""
        self._say("info", sentence, more)

    def warning(self, sentence: str, **more: object) -> None:
        """Say what somebody may want to change."""
        self._say("warning", sentence, more)

    def error(self, sentence: str, *, exc_info: BaseException | None = None, **more: object) -> None:
        """Say what went wrong, with an exception's traceback if one is given."""
        self._say("error", sentence, more, exc_info)

    def _say(self, level: str, sentence: str, more: dict[str, object], exc_info: BaseException | None = None) -> None:
        how = "" if level == "info" else f"{level}: "
        pairs = "".join(f" {key}={_shown(value)}" for key, value in more.items())
        line = f"{time.strftime('%H:%M:%S')} {self.who} {how}{sentence}{pairs}"
        if exc_info is not None:
            line += "\n" + "".join(traceback.format_exception(exc_info)).rstrip("\n")
        standard_error().write(line)


log = Log()
"""The one of this process."""


def configure(node_id: str) -> None:
    """Say from now on which node it is that speaks."""
    log.who = f"elastic-agent[{node_id}]"


class Mishaps:
    """Errors that nobody foresaw, in a thread that goes on after them.

    One that comes back at each try is told once, with its traceback.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._last = ""

    def tell(self, error: Exception) -> None:
        """Log an error, unless it is the same as the last one."""
        if repr(error) != self._last:
            self._last = repr(error)
            log.error("internal error; it goes on", where=self._where, exc_info=error)


def _shown(value: object) -> str:
    """A value in one word, or quoted."""
    return value if isinstance(value, str) and _QUOTED.isdisjoint(value) else repr(value)
