"""The sentence of each kind of reason. `test_wording.py` has the sentences of decisions."""

from __future__ import annotations

from types import UnionType
from typing import get_args

import msgspec
import pytest
from reasons import FINISHED, LOST, lost

from agent.core import reasons
from agent.core.effects import Exit
from agent.core.reasons import (
    AgentEnded,
    AskedToEnd,
    Beginning,
    CheckpointOnDisk,
    CommitRefused,
    DataLost,
    Ended,
    FailedWorker,
    Finishing,
    GaveUp,
    Hang,
    Hanging,
    HealthCheckFailed,
    JobOver,
    NodeIdTaken,
    NodesJoined,
    NodesLost,
    NodesMissing,
    NodesThere,
    NodesUnreachable,
    NotRetried,
    ProcessesLeft,
    Reason,
    Requested,
    SetUpFailed,
    Training,
    UnsavedSteps,
    Waiting,
    WorkersFailed,
)
from agent.observe.messages import describe, describe_exit, describe_hang

EXITED = FailedWorker(node_id="a", rank=0, exit_code=1)
PEER = FailedWorker(node_id="a", rank=0, exit_code=1, is_peer_lost=True)
STILL = FailedWorker(node_id="b", rank=1, hang=Hang(doing="runs", step=3, for_s=6))
OUT = "its ranks alone failed twice before their first step"
FEW = NodesMissing(missing=1, needed=2, here=("a",))
OVER = JobOver(job_id="j", state="failed", result=NotRetried(first=EXITED, why="asked"))
ON_DISK = CheckpointOnDisk(node_id="b", checkpoint="n")
SENTENCES: list[tuple[Reason, str]] = [
    (NodesThere(nodes=1, np="1", is_all=True), "all of 1 node there"),
    (NodesThere(nodes=2, np="1:3"), "2 nodes there (np 1:3)"),
    (NodesJoined(node_ids=("c", "d"), np="1:4"), "c and d joined (np 1:4)"),
    (lost("a", "b"), "lost a and b"),
    (HealthCheckFailed(trouble="no GPU"), "its health check failed: no GPU"),
    (SetUpFailed(exit_code=3, signal=None, error=""), "the set-up of the script ended with code 3"),
    (SetUpFailed(exit_code=None, signal=9, error=""), "the set-up of the script ended with signal 9"),
    (SetUpFailed(exit_code=1, signal=None, error="OSError: x"), "the set-up of the script ended with OSError: x"),
    (ProcessesLeft(group=3), "processes of group 3 survive SIGKILL"),
    (
        NodesLost(node_ids=("a",), unfit=(("a", HealthCheckFailed(trouble="no GPU")), ("b", ProcessesLeft(group=3)))),
        "lost a; a is unfit: its health check failed: no GPU; b is unfit: processes of group 3 survive SIGKILL",
    ),
    (NodesUnreachable(node_ids=("a", "b")), "a and b and the others do not reach each other"),
    (NodesUnreachable(node_ids=()), ""),
    (WorkersFailed(first=EXITED), "rank 0 on a exited with code 1"),
    (
        WorkersFailed(first=EXITED, unreachable=("c",), left_out=("a", "b")),
        (
            "rank 0 on a exited with code 1; c and the others do not reach each other; "
            f"a is left out until its agent is started again: {OUT}; "
            f"b is left out until its agent is started again: {OUT}"
        ),
    ),
    (
        WorkersFailed(first=FailedWorker(node_id="a", rank=0, exit_code=1, unreadable="/x: EIO")),
        "waiting for the checkpoint: a cannot read /x: EIO",
    ),
    (
        WorkersFailed(first=FailedWorker(node_id="a", rank=0, exit_code=1, is_port_taken=True)),
        "the master's port on a was taken",
    ),
    (Requested(what="np", np="1:3"), "np is now 1:3"),
    (Requested(what="leave", node_ids=("a", "b")), "a and b were asked to leave"),
    (Requested(what="exclude", node_ids=("a",)), "a was excluded by an operator"),
    (Requested(what="restart"), "an operator asked for a restart"),
    (Requested(what="pause", by="{me}"), "paused by {me}: nothing changes until it is resumed"),
    (Requested(what="stop", by="me"), "stopped by me"),
    (
        Requested(what="stop", by="me", node_ids=("a", "b"), saved=7),
        "stopped by me; what only the memory of a and b had could not be saved: a new run begins after step 7",
    ),
    (
        Requested(what="stop", by="me", node_ids=("a",), saved=0),
        (
            "stopped by me; what only the memory of a had could not be saved: there is no checkpoint, so that a new "
            "run begins anew"
        ),
    ),
    (Waiting(what="save", node_ids=("a",)), "waiting for a to save what its memory holds"),
    (Requested(what="reset", by="me"), "reset by me"),
    (Requested(what="start over"), "a new run begins"),
    (ON_DISK, "b has the checkpoint n on its disk"),
    (DataLost(state="unknown"), "etcd has lost the job, and no node has it cached"),
    (DataLost(state="collecting"), "etcd has lost data; waiting for all members to publish their cached records"),
    (DataLost(state="restored"), "etcd had lost data; all members are back"),
    (FEW, "waiting for 1 of 2 nodes; here: a"),
    (
        NodesMissing(missing=1, needed=1, here=(), last=LOST, left_out=("a", "b")),
        f"waiting for 1 of 1 node; here: none; lost x; left out: a and b ({OUT})",
    ),
    (Training(nodes=1), "running on 1 node"),
    (Training(nodes=2, np="1:3"), "running on 2 nodes (np 1:3)"),
    (Training(nodes=2, np="3", missing=0), "running on 2 nodes; 0 more needed for np 3"),
    (Training(nodes=2, np="1:3", left_out=("c",)), f"running on 2 nodes (np 1:3); left out: c ({OUT})"),
    (Beginning(group=1, step=None), "group 1 begins at the start"),
    (Beginning(group=1, step=0), "group 1 begins after step 0"),
    (Finishing(group=1, done=1, nodes=2), "group 1: 1 of 2 nodes have finished"),
    (
        Waiting(what="nodes", because=NodesThere(nodes=2, np="1:3")),
        "2 nodes there (np 1:3); waiting a moment for more",
    ),
    (Waiting(what="return", node_ids=("a", "b")), "etcd was away; waiting for a and b to return"),
    (
        Waiting(what="newer records", node_ids=("a", "b")),
        "waiting for a and b to publish newer records, if etcd has lost any",
    ),
    (
        Waiting(what="lease", node_ids=("b",), because=WorkersFailed(first=PEER)),
        "rank 0 on a exited with code 1 of a broken connection; checking the lease of b",
    ),
    (
        Waiting(what="lease", node_ids=("b",), because=WorkersFailed(first=EXITED)),
        "rank 0 on a exited with code 1; checking the lease of b",
    ),
    (
        Waiting(what="lease", because=NodesUnreachable(node_ids=("a",))),
        "a and the others do not reach each other; waiting for a lease to end",
    ),
    (
        Waiting(
            what="same error",
            node_ids=("b",),
            because=WorkersFailed(first=FailedWorker(node_id="a", rank=0, script_error="KeyError: {x}")),
        ),
        "KeyError: {x}; waiting for the same error on b",
    ),
    (
        Waiting(what="retry", because=WorkersFailed(first=EXITED), failures=2, within_s=7.5),
        "rank 0 on a exited with code 1: 2 failures without progress; trying again within 8 s",
    ),
    (
        Waiting(what="retry", because=WorkersFailed(first=EXITED)),
        "rank 0 on a exited with code 1; trying again within 1 s",
    ),
    (
        Waiting(what="warm", node_ids=("c",), because=Training(nodes=2)),
        "running on 2 nodes; waiting for c to be warm",
    ),
    (Waiting(what="inventory", node_ids=("a", "b")), "waiting for a and b to say what can be resumed from"),
    (Waiting(what="checkpoint", because=ON_DISK), "waiting for b: only its own disk has the checkpoint n"),
    (
        Waiting(what="handoff", because=Requested(what="np", np="2")),
        "np is now 2; the ranks are to stop after a common step and save it",
    ),
    (FINISHED, "all 2 ranks finished in group 1"),
    (GaveUp(after_s=9.0, waiting=FEW), "gave up after 9 s of waiting for 1 of 2 nodes; here: a"),
    (NotRetried(first=EXITED, why="asked"), "rank 0 on a exited with code 1, which asks for no restart"),
    (
        NotRetried(first=EXITED, why="script error"),
        "rank 0 on a exited with code 1, as did every rank, twice in a row; --max_restarts=N tries N times",
    ),
    (
        NotRetried(first=EXITED, why="budget"),
        "rank 0 on a exited with code 1, and no restart is allowed (--max_restarts=0)",
    ),
    (
        NotRetried(first=EXITED, why="budget", restarts=1),
        "rank 0 on a exited with code 1, after 1 restart without progress",
    ),
    (AgentEnded(exit_code=None, advice="go on"), "its agent was killed before the job had ended; go on"),
    (AgentEnded(exit_code=0, advice="go on"), "its agent left with exit code 0 before the job had ended; go on"),
    (Ended(result=FINISHED), "the job has ended: all 2 ranks finished in group 1"),
    (
        Hanging(because=Training(nodes=2, np="2"), first=STILL),
        "running on 2 nodes (np 2); rank 1 on b made no step after step 3 for 6 s: it computes",
    ),
    (OVER, "job j failed: rank 0 on a exited with code 1, which asks for no restart"),
    (
        JobOver(job_id="j", state="succeeded", result=FINISHED, summary="no incidents"),
        "job j succeeded: all 2 ranks finished in group 1; no incidents",
    ),
    (
        JobOver(job_id="j", state="succeeded", result=FINISHED, summary="no incidents", was_over=True),
        (
            "job j is finished (succeeded: all 2 ranks finished in group 1); elastic-agent reset lets it "
            "continue from its newest checkpoint, if any; --fresh starts it over"
        ),
    ),
    (
        JobOver(job_id="j", state="stopped", result=Requested(what="stop", by="me"), summary="", was_over=True),
        (
            "job j is finished (stopped: stopped by me); elastic-agent reset lets it continue from its newest "
            "checkpoint, if any; --fresh starts it over"
        ),
    ),
    (
        NodeIdTaken(node_id="a", pid=7, address="10.0.0.2"),
        "node id 'a' is held by a living agent (pid 7, address 10.0.0.2): choose another --node_id, or stop that agent",
    ),
    (AskedToEnd(), "left the job, as it was asked to"),
    (AskedToEnd(signal=2), "stopped by SIGINT"),
    (CommitRefused(why="group", group=2), "group 2 has been formed since"),
    (CommitRefused(why="history", group=1, step=5), "step 5 of group 1 is not of this job's history"),
    (
        CommitRefused(why="fork", group=1, step=5, save=2),
        "step 5, save 2, of group 1 is not of this job's history: it continues from another copy",
    ),
    (CommitRefused(why="not older", group=1, step=4), "step 4 of group 1 is not older than what it replaces"),
    (CommitRefused(why="committed", group=1, step=4), "step 4 of group 1 is committed already"),
]


@pytest.mark.parametrize(("reason", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_a_reason_has_a_sentence(reason: Reason, sentence: str) -> None:
    assert describe(reason) == sentence


def kinds(of: UnionType) -> set[type[msgspec.Struct]]:
    return set(get_args(of))


def test_each_kind_of_reason_has_a_case_here() -> None:
    assert {type(reason) for reason, _ in SENTENCES} == kinds(reasons.Reason)


@pytest.mark.parametrize(("reason", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_a_reason_comes_back_as_it_was_written(reason: Reason, sentence: str) -> None:
    del sentence
    assert msgspec.json.decode(msgspec.json.encode(reason), type=reasons.Reason) == reason


@pytest.mark.parametrize(
    ("hang", "sentence"),
    [
        (Hang(doing="exited", step=9, for_s=70), "it has ended with code 0"),
        (Hang(doing="stopped", step=9, for_s=70), "it is stopped by a signal"),
        (Hang(doing="disk", step=9, for_s=70), "it hangs in the kernel (state D)"),
        (Hang(doing="sleeps", step=9, for_s=70, where="t.py:3 in f", others=3), "it sleeps at t.py:3 in f"),
        (Hang(doing="runs", step=9, for_s=70, waiting=2, others=3), "it computes; 2 of 3 others wait for it"),
        (Hang(doing="waits", step=9, for_s=70, waiting=3, others=3), "it waits for others, and so do all"),
        (
            Hang(doing="waits", step=9, for_s=70, where="y.py:2", waiting=2, others=2, elsewhere=("x.py:1", "z.py:3")),
            "it waits for others at y.py:2; others wait at x.py:1, z.py:3",
        ),
    ],
)
def test_a_hang_has_a_sentence(hang: Hang, sentence: str) -> None:
    assert describe_hang(hang) == f"made no step after step 9 for 70 s: {sentence}"


def test_the_end_of_an_agent_has_a_sentence() -> None:
    assert describe_exit(Exit(69, "etcd is gone")) == "etcd is gone"
    assert describe_exit(Exit(2, AskedToEnd(signal=2))) == "stopped by SIGINT"
    left = "left the job, as it was asked to; 4 steps up to step 9 given up: the newest checkpoint is of step 5"
    assert describe_exit(Exit(0, AskedToEnd(), UnsavedSteps(reached=9, saved=5))) == left
    unsaved = UnsavedSteps(reached=1, saved=0, were_ranks_signalled=True)
    assert describe_exit(Exit(0, AskedToEnd(), unsaved)).endswith(
        "; 1 step up to step 1 given up: there is no checkpoint, and SIGTERM ended the ranks before they could save: "
        "signal the agent alone (systemd: KillMode=mixed)"
    )
