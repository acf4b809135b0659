"""What the agent says: one line per event on standard error, so that standard output is the workers' alone."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from agent.observe.script_calls import with_calls
from agent.observe.stderr import standard_error

# structlog imports rich where it finds it, to draw in colour what is printed plain here: a fifth of an agent's start.
_has_rich = "rich" in sys.modules
if not TYPE_CHECKING and not _has_rich:
    sys.modules["rich"] = None
import structlog  # noqa: E402

if not _has_rich:
    del sys.modules["rich"]

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
"""Says things. May be used from any thread."""


class _Lines:
    """Where structlog ends: it calls the method that is named like the level."""

    def __init__(self) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = standard_error().write


def configure(node_id: str) -> None:
    """Print log lines as `HH:MM:SS elastic-agent[node] message key=value`."""
    lines = _Lines()

    def named(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        level = f"{event.pop('level')}: " if event.get("level") in {"warning", "error"} else ""
        event.pop("level", None)
        event.update({key: with_calls(value) for key, value in event.items() if isinstance(value, str)})
        event["event"] = f"elastic-agent[{node_id}] {level}{event['event']}"
        return event

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            named,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda: lines,
        cache_logger_on_first_use=False,
    )


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
