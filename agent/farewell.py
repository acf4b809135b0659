"""What an agent says last of a job that has failed: what with, wherever that was."""

from __future__ import annotations

import threading

from agent.core.state import AgentState
from agent.errors import RecordError, StoreUnavailable
from agent.observe.last_words import last_words
from agent.observe.stderr import standard_error
from agent.store.api import Store
from agent.store.keys import JobKeys, view_of


class Farewell:
    """Reads it as soon as the job has failed: an etcd that agents bring may be gone when this one's workers are.

    Args:
        store: has the reports of all nodes.
        keys: of the job.
    """

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self._store = store
        self._keys = keys
        self._words = ""
        self._reading: threading.Thread | None = None

    def look(self, state: AgentState) -> None:
        """Look at the agent's state after a turn of its loop."""
        result = state.view.result if state.view is not None else None
        has_failed = state.leaving is not None and result is not None and not result.value.succeeded
        if has_failed and self._reading is None:
            self._reading = threading.Thread(target=self._read, name="farewell", daemon=True)
            self._reading.start()

    def tell(self) -> None:
        """On the console, if the job has failed."""
        if self._reading is None:
            self._read()
        else:
            self._reading.join()
        if self._words:
            standard_error().write(self._words)

    def _read(self) -> None:
        try:
            view = view_of(self._store.read(self._keys.whole()), self._keys, is_whole=True)
        except (StoreUnavailable, RecordError):
            return
        if view.result is not None and not view.result.value.succeeded:
            self._words = last_words(view)
