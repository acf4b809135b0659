"""The last output of an agent whose job has failed: the error of the worker that failed, on whichever node it ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.failures import Failure
from agent.errors import RecordError, StoreUnavailable
from agent.observe.log import log
from agent.observe.messages import how_it_ended
from agent.observe.notices import first_failure_of_job, first_failure_output
from agent.observe.stderr import standard_error
from agent.store.api import Store
from agent.store.keys import JobKeys, view_of

_Run = Callable[[fx.StoreEffect], ev.WriteAnswered]


class FinalReport:
    """Reads the exit reports from etcd and reports the first failure.

    The reports are read before this node deregisters: an etcd that the agents bring ends once all nodes have left.

    Args:
        store: has the exit reports of all nodes.
        keys: of the job.
        is_on_console: whether this console has already shown what the worker of a node wrote; it is not repeated.
        error_file: also gets the failure, as from torchrun with TORCHELASTIC_ERROR_FILE in its own environment: what
            started the agent, such as TorchX, reads it there. Empty: there is none.
    """

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        is_on_console: Callable[[str, Failure], bool] = lambda _node_id, _: False,
        error_file: str = "",
    ) -> None:
        self._is_on_console = is_on_console
        self._error_file = error_file
        self._store = store
        self._keys = keys
        self._first: tuple[str, Failure] | None = None
        """The node and its failure, if the job has failed."""

    def before_leaving(self, run: _Run) -> _Run:
        """Wrap the function that carries out effects on the store: read the reports before a `Deregister`."""

        def read_first(effect: fx.StoreEffect) -> ev.WriteAnswered:
            if isinstance(effect, fx.Deregister):
                self._read()
            return run(effect)

        return read_first

    def print(self) -> None:
        """Print the failure and write it to the error file, if the job has failed."""
        if self._first is None:
            self._read()
        if self._first is None:
            return
        if not self._is_on_console(*self._first) and (text := first_failure_output(*self._first)):
            standard_error().write(text)
        if self._error_file:
            self._write_file(*self._first)

    def _write_file(self, node_id: str, failure: Failure) -> None:
        extra = {"py_callstack": failure.traceback or failure.tail, "timestamp": str(int(failure.at))}
        message = {"message": failure.error or how_it_ended(node_id, failure), "extraInfo": extra}
        code = failure.exit_code if failure.exit_code is not None else -(failure.signal or 0)
        try:
            # In place: a container's termination log is a mount, which cannot be replaced.
            Path(self._error_file).write_text(json.dumps({"message": message, "errorCode": code}), encoding="utf-8")
        except OSError as error:
            log.warning(f"cannot write TORCHELASTIC_ERROR_FILE={self._error_file}", reason=str(error.strerror))

    def _read(self) -> None:
        try:
            view = view_of(self._store.read(self._keys.whole()), self._keys, is_whole=True)
        except (StoreUnavailable, RecordError):
            return
        if view.result is not None and not view.result.value.succeeded:
            self._first = first_failure_of_job(view)
