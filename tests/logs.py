"""What the agent says, as values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from agent.observe.log import Log


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Keep each line's parts, under `event`, `log_level`, `exc_info` if there is one, and its own keys; show none."""
    said: list[dict[str, Any]] = []

    def keep(
        _log: Log, level: str, sentence: str, more: dict[str, object], exc_info: BaseException | None = None
    ) -> None:
        error = {} if exc_info is None else {"exc_info": exc_info}
        said.append({"event": sentence, "log_level": level, **more, **error})

    with patch.object(Log, "_say", keep):
        yield said
