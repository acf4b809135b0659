"""Real ranks under real local workers: saving and resuming through the channel, with the test as the agent's core."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from ports import free_port

from agent.core.events import Event, PublishAsked, WorkerExited, WorkersGone
from agent.core.saved_states import Checkpoint, RestorePoint
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.worker_group import WorkerGroup
from trainer_runtime import contract

BOUND_S = 120
WORLD = 2

TRAIN = """
import torch, trainer_runtime as tr
from trainer_runtime import writer
writer._VERDICT_WAIT_S = 60.0  # no save is left out since the verdict on the one before is late
tr.init(timeout_s=120)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
state = tr.State(model=model, save_every=2, best=0.0)
for epoch in state.epochs({epochs}):
    print("from", state.step, state.best, flush=True)
    for item in state.steps(range({steps})):
        state.best += 1
        state.commit()
"""


class Core:
    """Commits what is asked, unless a later group has been formed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers = WorkerGroup(self.events.put)
        self.committed: Checkpoint | None = None
        self.is_behind = False

    def run(self, group: int, steps: int, run: str = "us") -> tuple[list[int | None], list[str]]:
        """Run a group to its end; return exit codes and outputs in rank order."""
        self.workers.start(Launch(group, tuple(self._command(rank, group, steps, run) for rank in range(WORLD))))
        copy = self.committed.copy if self.committed else None
        self.workers.send_restore_point(RestorePoint(group=group, copy=copy, lineage=(), checkpoint=self.committed))
        codes: dict[int, int | None] = {}
        while not isinstance(event := self.events.get(timeout=BOUND_S), WorkersGone):
            if isinstance(event, WorkerExited):
                codes[event.local_rank] = event.exit_code
            if isinstance(event, PublishAsked):
                self._decide(event, run)
        return [codes[rank] for rank in range(WORLD)], [self._log(rank, group).read_text() for rank in range(WORLD)]

    def _decide(self, event: PublishAsked, run: str) -> None:
        copy = event.checkpoint.copy
        if self.is_behind:
            self.workers.send_publish_answer(event.group, copy, None, "group 9 has been formed since")
            return
        number = self.committed.number + 1 if self.committed else 1
        self.committed = msgspec.structs.replace(event.checkpoint, number=number, run=run)
        self.workers.send_publish_answer(event.group, copy, self.committed, "")

    def _log(self, rank: int, group: int) -> Path:
        return self.directory / f"{group}-{rank}.log"

    def _command(self, rank: int, group: int, steps: int, run: str) -> RankCommand:
        if rank == 0:
            self.port = free_port()
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            contract.RUN_ID: run,
            contract.GROUP: str(group),
            contract.CHECKPOINT_DIR: str(self.directory / "checkpoints"),
        }
        argv = (sys.executable, "-c", TRAIN.format(steps=steps, epochs=group))
        return RankCommand(rank, rank, argv, os.environ | env, self.directory, self._log(rank, group), None)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path)
    yield made
    made.workers.close()


def names(core: Core) -> list[str]:
    return sorted(path.name for path in (core.directory / "checkpoints").iterdir())


def test_groups_go_on_from_what_the_agent_has_committed(core: Core) -> None:
    codes, said = core.run(group=1, steps=3)
    assert codes == [0, 0], said
    assert core.committed
    assert (core.committed.number, core.committed.name) == (2, "us-g000001-s000000003-1")
    core.is_behind = True
    codes, said = core.run(group=2, steps=5)  # none of its checkpoints counts
    assert codes == [0, 0], said
    assert "NOT saved: group 9 has been formed since" in said[0]
    core.is_behind = False
    codes, said = core.run(group=3, steps=2)
    assert codes == [0, 0], said
    assert all("from 3 3.0" in output for output in said), said
    assert names(core) == ["us-g000003-s000000006", "us-g000003-s000000007-1"]


def test_all_ranks_leave_for_a_restart_where_the_group_may_not_begin(core: Core) -> None:
    codes, said = core.run(group=1, steps=2, run="old")
    assert codes == [0, 0], said
    core.committed, core.is_behind = None, True
    codes, said = core.run(group=2, steps=2)
    assert codes == [contract.EXIT_RESTART] * WORLD, said
    assert "may not resume from old-g000001-s000000002-1: group 9" in said[0]
    assert not any("from" in line.split()[:1] for output in said for line in output.splitlines())
