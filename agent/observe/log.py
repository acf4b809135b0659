"""What the agent says: one line per event on standard error, so that standard output is the workers' alone."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(node_id: str) -> None:
    """Print log lines as `HH:MM:SS elastic-agent[node] message key=value`."""

    def named(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        level = f"{event.pop('level')}: " if event.get("level") in {"warning", "error"} else ""
        event.pop("level", None)
        event["event"] = f"elastic-agent[{node_id}] {level}{event['event']}"
        return event

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            named,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
