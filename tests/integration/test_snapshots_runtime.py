"""Real ranks that resume from memory: which node holds what, the test says in place of their agents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cases import some
from fake_agent import FakeAgent
from ports import free_port

from trainer_runtime import contract
from trainer_runtime.snapshot_page import HEADER_BYTES, create_memory, read_slots

JOB = Path(__file__).with_name("snapshot_job.py")
BOUND_S = 150
LAST = 9
KILLED_AFTER = 5

Memories = dict[int, int]


@dataclass
class Ranks:
    """A group that has ended."""

    outputs: list[str]
    codes: list[int]
    memories: Memories
    agents: list[FakeAgent]

    def said(self, word: str) -> list[str]:
        """What the ranks said under that word."""
        return [line for output in self.outputs for line in output.splitlines() if line.startswith(word)]


def run(
    directory: Path,
    group: int,
    agents: list[FakeAgent],
    *,
    killed_after: int = 0,
    cut_after: int = 0,
    cut_rank: int = 0,
    is_one_node: bool = False,
    limit: dict[int, int] | None = None,
    job: Sequence[str] = (),
) -> Ranks:
    """Run a group with so many ranks to its end.

    Args:
        directory: of its checkpoints.
        group: its number.
        agents: of its ranks.
        killed_after: the step after which all end without a word.
        cut_after: the step after which a rank loses its connections to the store.
        cut_rank: that rank.
        is_one_node: they share a node; else each has one of its own.
        limit: what snapshots may take on the node of a rank, in bytes.
        job: script and arguments that follow the last step, of another job.
    """
    script, *arguments = job or (str(JOB), str(cut_after), str(cut_rank))
    port = free_port()
    memories = {rank: create_memory(str(rank)) for rank in range(len(agents))}
    processes = []
    for rank, agent in enumerate(agents):
        channel = agent.theirs.fileno()
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if is_one_node else 0),
            "LOCAL_WORLD_SIZE": str(len(agents) if is_one_node else 1),
            "WORLD_SIZE": str(len(agents)),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            contract.RUN_ID: "us",
            contract.GROUP: str(group),
            contract.CHECKPOINT_DIR: str(directory),
            contract.CHANNEL_FD: str(channel),
            contract.SNAPSHOT_FD: str(memories[rank]),
            contract.SNAPSHOT_OVERHEAD: "1e6",
            contract.SNAPSHOT_MEMORY: str((limit or {}).get(rank, 1 << 30)),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, script, str(killed_after), str(LAST), *arguments],
                env={**os.environ, **env},
                pass_fds=(channel, memories[rank]),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=BOUND_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        for agent in agents:
            agent.close()
    return Ranks(outputs, [process.returncode for process in processes], memories, agents)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks become that nothing happens to."""
    ranks = run(tmp_path_factory.mktemp("undisturbed"), 1, [FakeAgent(), FakeAgent()])
    assert ranks.codes == [0, 0], ranks.outputs
    return ranks.said("became")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Memories:
    """What two ranks left that were killed right after a step."""
    ranks = run(tmp_path_factory.mktemp("killed"), 1, [FakeAgent(), FakeAgent()], killed_after=KILLED_AFTER)
    assert ranks.codes == [1, 1], ranks.outputs
    assert all(KILLED_AFTER in {slot.step for slot in read_slots(memory)} for memory in ranks.memories.values())
    assert [agent.snapshots for agent in ranks.agents] == [list(range(1, KILLED_AFTER + 1, 2))] * 2
    return ranks.memories


def damaged(memory: int) -> int:
    """A copy of a memory with a byte of the newest common part changed."""
    data = bytearray(os.pread(memory, os.fstat(memory).st_size, 0))
    slot = read_slots(memory)[0]
    assert slot.common_at >= HEADER_BYTES
    data[slot.common_at + slot.common_bytes // 2] ^= 1
    made = create_memory("damaged")
    os.write(made, data)
    return made


@pytest.mark.parametrize(
    "case", some(["first lost", "first damaged"], of=["both there", "second lost", "first lost", "first damaged"])
)
def test_ranks_go_on_from_memory_as_if_nothing_had_been(
    case: str, tmp_path: Path, undisturbed: list[str], killed: Memories
) -> None:
    """Whoever lost its node, or what was on it, gets it from the others: the common part, and its own."""
    first, second = FakeAgent(), FakeAgent()
    if case == "both there":
        first.hold(KILLED_AFTER, {0: killed[0]})
        second.hold(KILLED_AFTER, {1: killed[1]})
    elif case == "second lost":
        first.hold(KILLED_AFTER, killed, only_parts={1})
        second.hold(KILLED_AFTER, {})
    elif case == "first lost":
        first.hold(KILLED_AFTER, {})
        second.hold(KILLED_AFTER, killed, only_parts={0})
    else:
        first.hold(KILLED_AFTER, {0: damaged(killed[0])})
        second.hold(KILLED_AFTER, {1: killed[1]})
    ranks = run(tmp_path, 2, [first, second])
    assert ranks.codes == [0, 0], ranks.outputs
    assert all(line.startswith(f"from {KILLED_AFTER} ") for line in ranks.said("from"))
    assert ranks.said("became") == undisturbed
    assert ("is damaged" in ranks.outputs[0]) == (case == "first damaged")
    assert first.damaged == ([{"kind": "common", "rank": 0}] if case == "first damaged" else [])


@pytest.mark.long("unit/test_snapshot_state.py")
def test_the_ranks_of_one_node_have_the_common_part_once(tmp_path: Path, undisturbed: list[str]) -> None:
    """All of them begin from it."""
    both = [FakeAgent(), FakeAgent()]
    memories = run(tmp_path, 1, both, killed_after=KILLED_AFTER, is_one_node=True).memories
    assert [read_slots(memory)[0].common_bytes > 0 for memory in memories.values()] == [True, False]
    both = [FakeAgent(), FakeAgent()]
    for agent in both:
        agent.hold(KILLED_AFTER, memories)
    ranks = run(tmp_path, 2, both, is_one_node=True)
    assert ranks.codes == [0, 0], ranks.outputs
    assert ranks.said("became") == undisturbed


@pytest.mark.long("unit/test_snapshot_state.py, of one rank")
def test_where_one_rank_can_take_none_the_others_soon_take_none_either(tmp_path: Path) -> None:
    """Theirs would be of no use."""
    both = [FakeAgent(), FakeAgent()]
    ranks = run(tmp_path, 1, both, limit={1: 1000})
    assert ranks.codes == [0, 0], ranks.outputs
    assert "no snapshots in memory: they would take" in ranks.outputs[1]
    assert both[0].snapshots in ([1], [1, 3, 5, 7]), "no more than before the first settlement"
    assert both[1].snapshots == []


def test_a_rank_0_that_cannot_say_how_to_go_on_ends_and_so_do_the_others(tmp_path: Path) -> None:
    """They wait for it at the store, which still lives."""
    ranks = run(tmp_path, 1, [FakeAgent(), FakeAgent()], cut_after=2)
    assert ranks.codes == [1, 1]
    assert "DistNetworkError" in ranks.outputs[0]


@pytest.mark.long("test_a_rank_0_that_cannot_say_how_to_go_on_ends_and_so_do_the_others")
def test_a_rank_that_cannot_receive_the_outcome_ends_while_the_others_continue(tmp_path: Path) -> None:
    """It has no snapshots of its part any more, which a next group needs."""
    ranks = run(tmp_path / "on", 1, [FakeAgent(), FakeAgent()], cut_after=2, cut_rank=1)
    assert ranks.codes == [1, 1]
    assert "DistNetworkError" in ranks.outputs[1]
    assert [agent.snapshots for agent in ranks.agents] == [[1, 3, 5, 7], [1, 3, 5, 7]]
    last = run(tmp_path / "last", 1, [FakeAgent(), FakeAgent()], cut_after=2, cut_rank=1, killed_after=7)
    assert "Traceback" not in last.outputs[1], "this may have been rank 0's end after its last step"


@pytest.mark.long("integration/test_runtime_parts.py")
def test_another_world_size_has_the_statistics_of_rank_0(tmp_path: Path, killed: Memories) -> None:
    """Also where the common part is that of another node, whose own statistics are in it."""
    both, alone = [FakeAgent(), FakeAgent()], FakeAgent()
    both[0].hold(KILLED_AFTER, {0: killed[0]})
    both[1].hold(KILLED_AFTER, {1: killed[1]})
    statistics = run(tmp_path / "both", 2, both).said("from")
    alone.hold(KILLED_AFTER, killed, only_parts={0})
    ranks = run(tmp_path / "alone", 2, [alone])
    assert statistics[0] != statistics[1]
    assert ranks.said("from") == statistics[:1]
    assert ranks.codes == [0], ranks.outputs


def test_a_snapshot_that_no_node_has_is_reported_and_ends_the_group(tmp_path: Path, killed: Memories) -> None:
    first, second = FakeAgent(), FakeAgent()
    first.hold(KILLED_AFTER, {0: damaged(killed[0])})
    second.hold(KILLED_AFTER, {1: damaged(killed[1])})
    ranks = run(tmp_path, 2, [first, second])
    assert ranks.codes == [1, 1]
    assert first.unreadable == ["the snapshot in memory: no node has the common part"]
    assert "cannot read the snapshot in memory" in ranks.outputs[0]
    assert "PeerError" in ranks.outputs[1]
