"""What an agent says last of a job that has failed: what with, wherever that was."""

from __future__ import annotations

from collections.abc import Callable

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Failure
from agent.errors import RecordError, StoreUnavailable
from agent.observe.notices import first_failure_output
from agent.observe.stderr import standard_error
from agent.store.api import Store
from agent.store.keys import JobKeys, view_of

_Run = Callable[[fx.StoreEffect], ev.WriteAnswered]


class FinalReport:
    """Reads it before this node takes its leave: an etcd that agents bring lasts until all have, and no longer.

    Args:
        store: has the reports of all nodes.
        keys: of the job.
        is_on_console: whether this node's console has shown what that node's worker wrote: it is not told again.
    """

    def __init__(
        self, store: Store, keys: JobKeys, is_on_console: Callable[[str, Failure], bool] = lambda _node_id, _: False
    ) -> None:
        self._is_on_console = is_on_console
        self._store = store
        self._keys = keys
        self._words = ""

    def before_leaving(self, run: _Run) -> _Run:
        """What carries out effects on the store, as one that reads first where the effect is to leave."""

        def read_first(effect: fx.StoreEffect) -> ev.WriteAnswered:
            if isinstance(effect, fx.Deregister):
                self._read()
            return run(effect)

        return read_first

    def tell(self) -> None:
        """On the console, if the job has failed."""
        if not self._words:
            self._read()
        if self._words:
            standard_error().write(self._words)

    def _read(self) -> None:
        try:
            view = view_of(self._store.read(self._keys.whole()), self._keys, is_whole=True)
        except (StoreUnavailable, RecordError):
            return
        if view.result is not None and not view.result.value.succeeded:
            self._words = first_failure_output(view, self._is_on_console)
