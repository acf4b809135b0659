"""MLflow: the metrics of a State's commits in one MLflow run, without the points of steps that were made again.

MLflow keeps every point that it is sent, and has no call to delete one. So a group asks for what the run has, and sends
later steps only. A thread sends, because a server that does not answer would hold up the training for minutes.
"""

from __future__ import annotations

import atexit
import os
import time
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING

from mlflow import MlflowClient
from mlflow.entities import Metric

from trainer_runtime import contract
from trainer_runtime.checkpoint import warn

if TYPE_CHECKING:
    from trainer_runtime.state import State

_RUN_TAG = "elastic_agent.run"
_WAIT_S = 1.0
"""How long a step waits for the server, if it has answered so far."""
_WAIT_AT_EXIT_S = 10.0


class _Sender:
    """Sends the points of the groups in which this process has rank 0.

    Args:
        experiment: name of the experiment; empty: MLflow's own choice.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        self._group = 0
        self._logged: dict[str, int] = {}
        """The last step of each metric in the run, of those that were sent in this group."""
        self._points: Queue[tuple[int, int, int, dict[str, float]]] = Queue()
        self._has_failed = False
        Thread(target=self._send_all, name="mlflow", daemon=True).start()
        atexit.register(self._finish)

    def put(self, group: int, step: int, metrics: dict[str, float]) -> None:
        """Send a point; wait for that for a moment, unless an earlier one is still being sent."""
        is_behind = self._points.unfinished_tasks > 0
        self._points.put((group, step, time.time_ns() // 1_000_000, metrics))
        if not is_behind:
            self._wait(_WAIT_S)

    def _wait(self, within_s: float) -> bool:
        with self._points.all_tasks_done:
            return self._points.all_tasks_done.wait_for(lambda: not self._points.unfinished_tasks, within_s)

    def _finish(self) -> None:
        if not self._wait(_WAIT_AT_EXIT_S):
            warn(f"MLflow lacks the last {self._points.unfinished_tasks} points: the server has not answered")

    def _send_all(self) -> None:
        client = MlflowClient()
        while True:
            group, step, at_ms, metrics = self._points.get()
            try:
                self._send(client, group, [Metric(name, value, at_ms, step) for name, value in metrics.items()])
            except Exception as error:  # noqa: BLE001 - a server can fail in any way, and training goes on
                if not self._has_failed:
                    warn(f"MLflow lacks step {step}, perhaps more: {error}")
                self._has_failed = True
            self._points.task_done()

    def _send(self, client: MlflowClient, group: int, points: list[Metric]) -> None:
        self._run_id = self._run_id or self._find_run(client)
        if group != self._group:
            self._group, self._logged = group, {}
        for each in points:
            if each.key not in self._logged:
                history = client.get_metric_history(self._run_id, each.key)
                self._logged[each.key] = max((known.step for known in history), default=0)
        new = [each for each in points if each.step > self._logged[each.key]]
        client.log_batch(self._run_id, metrics=new)
        self._logged.update((each.key, each.step) for each in new)

    def _find_run(self, client: MlflowClient) -> str:
        """Return the MLflow run of this training: the one of an earlier process, or a new one."""
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if found is None else found.experiment_id
        tag = os.environ.get(contract.RUN_ID)  # without an agent a new start is a new run
        runs = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{tag}'") if tag else []
        run = runs[0] if runs else client.create_run(experiment_id, tags={_RUN_TAG: tag} if tag else None)
        return str(run.info.run_id)


def log_to_mlflow(state: State, *, experiment: str = "", every: int = 10) -> None:
    """Log the metrics that `commit` is given, as rank 0 has them, and the group's number, which rises at each incident.

    All processes of a training use the same MLflow run: the one that MLFLOW_RUN_ID names, or one with the tag
    `elastic_agent.run`. If the server does not answer, training continues, and points may be missing.

    Args:
        state: the State that is committed.
        experiment: name of the experiment; it is created if there is none. Default: MLFLOW_EXPERIMENT_NAME, else
            `Default`.
        every: steps between two points.

    Raises:
        ValueError: as `State.on_commit`.
    """
    sender: _Sender | None = None

    def log(step: int, metrics: dict[str, float]) -> None:
        nonlocal sender
        sender = sender or _Sender(experiment)
        sender.put(state.group, step, {**metrics, "elastic_agent/group": float(state.group)})

    state.on_commit(log, every=every)
