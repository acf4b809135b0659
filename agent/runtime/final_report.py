"""The last output of an agent whose job has failed: the error of the worker that failed, on whichever node it ran."""

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
    """Reads the exit reports from etcd and prints the failure.

    The reports are read before this node deregisters: an etcd that the agents bring ends once all nodes have left.

    Args:
        store: has the exit reports of all nodes.
        keys: of the job.
        is_on_console: whether this console has already shown what the worker of a node wrote; it is not repeated.
    """

    def __init__(
        self, store: Store, keys: JobKeys, is_on_console: Callable[[str, Failure], bool] = lambda _node_id, _: False
    ) -> None:
        self._is_on_console = is_on_console
        self._store = store
        self._keys = keys
        self._text = ""

    def before_leaving(self, run: _Run) -> _Run:
        """Wrap the function that carries out effects on the store: read the reports before a `Deregister`."""

        def read_first(effect: fx.StoreEffect) -> ev.WriteAnswered:
            if isinstance(effect, fx.Deregister):
                self._read()
            return run(effect)

        return read_first

    def print(self) -> None:
        """Print the failure, if the job has failed."""
        if not self._text:
            self._read()
        if self._text:
            standard_error().write(self._text)

    def _read(self) -> None:
        try:
            view = view_of(self._store.read(self._keys.whole()), self._keys, is_whole=True)
        except (StoreUnavailable, RecordError):
            return
        if view.result is not None and not view.result.value.succeeded:
            self._text = first_failure_output(view, self._is_on_console)
