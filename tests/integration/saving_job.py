"""A cluster on a script whose result is known, and which a test can hold in the middle of a save."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
from integration import held_saves
from integration.conftest import PATIENCE_S, Job, open_store

from agent.core.saved_states import Checkpoint
from agent.rehearse.cluster import read_trace, wait_for
from agent.store.keys import JobKeys, view_of


class Saving(Job):
    """A cluster on a script whose result is known, and which can be held in a save."""

    count = 1500
    step_time_s = 0.02

    @property
    def command(self) -> list[str]:
        return [held_saves.__file__, str(self.directory), str(self.count), str(self.step_time_s)]

    @property
    def checkpoints(self) -> Path:
        """Where they are, unless a node was told otherwise."""
        return self.directory / "checkpoints" / self.job_id

    def committed(self) -> Checkpoint | None:
        """The record in etcd."""
        store, keys = open_store(self.server), JobKeys(self.job_id)
        try:
            found = view_of(store.read(keys.whole()), keys, is_whole=True).checkpoint
        finally:
            store.close()
        return found.value if found is not None else None

    def wait_for_commit(self, after: int) -> Checkpoint:
        """Wait until a later step than that is committed."""

        def found() -> Checkpoint | None:
            committed = self.committed()
            return committed if committed is not None and committed.copy.step > after else None

        later: Checkpoint = wait_for(found, PATIENCE_S, f"a commit after step {after}; {self.log_text()}")
        return later

    def hold(self, moment: str) -> int:
        """Wait until the save of a step is held at that moment; return the step."""
        is_held = self.directory / "held"
        is_held.unlink(missing_ok=True)
        (self.directory / "hold").write_text(moment)
        # It is written again and again, and empty for a moment each time.
        return int(
            wait_for(
                lambda: is_held.exists() and is_held.read_text(), PATIENCE_S, f"a save {moment}; {self.log_text()}"
            )
        )

    def kill_worker(self, name: str) -> None:
        """Kill a worker, and wait until all have gone with it; then nothing is held any more."""
        workers = [worker for node in self.living() for worker in node.workers()]
        self.nodes[name].kill_worker()
        _, alive = psutil.wait_procs(workers, PATIENCE_S)
        assert not alive, self.log_text()
        (self.directory / "hold").unlink(missing_ok=True)

    def first_step(self, *, after_group: int) -> int:
        """The first step that is taken after that group."""
        self.wait_for_step(1, after_group=after_group)
        return next(line.step for line in read_trace(self.trace) if line.group > after_group)

    def wait_for_words(self, *words: str, of: str = "") -> None:
        """Wait until some line of what the nodes, or one of them, have printed has all of these words.

        What a rank prints may come to its node's output after what the rank does next.
        """
        nodes = [self.nodes[of]] if of else [*self.nodes.values()]

        def are_there() -> bool:
            lines = (line for node in nodes for line in node.text().splitlines())
            return any(all(each in line for each in words) for line in lines)

        wait_for(are_there, PATIENCE_S, f"{words}; {self.log_text()}")

    def newest_group(self) -> int:
        return read_trace(self.trace)[-1].group

    def assert_result(self) -> None:
        """The training ended with what it would have ended with."""
        value = float((self.directory / "result").read_text())
        assert math.isclose(value, held_saves.expected(self.count), rel_tol=1e-9), self.log_text()
