"""The agent's log: one line per event on standard error. Standard output belongs to the workers."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from agent.observe.script_calls import with_calls
from agent.observe.stderr import standard_error

# structlog imports rich if it is installed, for colours that are not used here. That takes a fifth of an agent's start.
_has_rich = "rich" in sys.modules
if not TYPE_CHECKING and not _has_rich:
    sys.modules["rich"] = None
import structlog  # noqa: E402

if not _has_rich:
    del sys.modules["rich"]

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
"""The logger. May be used from any thread."""


class _LineLogger:
    """The innermost logger: structlog calls the method that is named like the level."""

    def __init__(self) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = standard_error().write


def configure(node_id: str) -> None:
    """Print log lines as `HH:MM:SS elastic-agent[node] message key=value`."""
    lines = _LineLogger()

    def add_prefix(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        level = f"{event.pop('level')}: " if event.get("level") in {"warning", "error"} else ""
        event.pop("level", None)
        event.update({key: with_calls(value) for key, value in event.items() if isinstance(value, str)})
        event["event"] = f"elastic-agent[{node_id}] {level}{event['event']}"
        return event

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            add_prefix,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda: lines,
        cache_logger_on_first_use=False,
    )


class InternalErrors:
    """Log unexpected exceptions of a thread that continues after them.

    An exception that repeats at every attempt is logged once, with its traceback.

    Args:
        where: the part of the agent, for the log line.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._last = ""

    def report(self, error: Exception) -> None:
        """Log an exception, unless it equals the last one."""
        if repr(error) != self._last:
            self._last = repr(error)
            log.error("internal error; continuing", where=self._where, exc_info=error)
