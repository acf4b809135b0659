"""Incidents of records come again in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from reasons import NEW_NP, failed, left, lost
from records import RESTART, Run, ended
from simulation import scenario
from simulation.replay import read, replay

from agent.core.incident import Phases
from agent.core.model import Cause
from agent.core.reasons import (
    CheckpointOnDisk,
    DataLost,
    FailedWorker,
    Hang,
    NodesJoined,
    NodesLost,
    NodesThere,
    NodesUnreachable,
    ProcessesLeft,
    Requested,
    WorkersFailed,
)
from agent.observe.incident_export import ExportedIncident, exported_incident, nodes_of
from agent.observe.messages import describe

_HANG = Hang(doing="sleeps", step=9, for_s=60)
_ALL = ("a", "b", "c")
_CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an exception": (
        {"cause": "failed", "names": _ALL, "reason": failed("b", 1, exit_code=3)}
        | {"ended": (ended("b", 1, exit_code=3), ended("a", 0, is_peer_lost=True, after_s=0.1))},
        ["end b 3 0"],
    ),
    "a signal": (
        {"cause": "failed", "names": _ALL, "reason": failed("b", 1, signal=9)}
        | {"ended": (ended("b", 1, exit_code=None, signal=9),)},
        ["end b -9 0"],
    ),
    "two failures, one after the other": (
        {"cause": "failed", "names": _ALL, "reason": failed("c", 2, exit_code=1)}
        | {"ended": (ended("c", 2), ended("a", 0, exit_code=7, after_s=0.05))},
        ["end c 1 0", "run 0.05", "end a 7 0"],
    ),
    "a lost node": ({"cause": "lost", "names": ("a", "c"), "reason": lost("b")}, ["kill b"]),
    "a node that vanishes without a word": (
        {"cause": "lost", "names": ("a", "c"), "reason": lost("b")}
        | {"phases": msgspec.structs.replace(RESTART, detect_s=4.1)},
        ["kill-host b"],
    ),
    "a lost node and a spare": (
        {"cause": "lost", "names": ("a", "c", "d"), "reason": lost("b")},
        ["kill b"],
    ),
    "an agent that was started again": ({"cause": "lost", "names": _ALL, "reason": lost("b")}, ["kill b", "start b"]),
    "too few nodes": (
        {"cause": "wait", "names": (), "reason": lost("b"), "np": (3, 3), "phases": Phases(detect_s=0.3, agree_s=0.0)},
        ["kill b"],
    ),
    "a drain": ({"cause": "drain", "names": ("a", "c"), "reason": left("b"), "step": 5}, ["stop b"]),
    "a drain below the minimum": (
        {"cause": "drain", "names": (), "reason": left("b"), "np": (3, 3)},
        ["stop b"],
    ),
    "an excluded node": (
        {"cause": "drain", "names": ("a", "c"), "reason": Requested(what="exclude", node_ids=("b",))},
        ["exclude b"],
    ),
    "a newcomer": (
        {"cause": "join", "names": (*_ALL, "d"), "reason": NodesJoined(node_ids=("d",), np="1:4")},
        ["start d"],
    ),
    "a smaller np": ({"cause": "scale", "names": ("a", "b"), "reason": NEW_NP}, ["scale 2"]),
    "a hang": (
        {"cause": "failed", "names": _ALL, "reason": failed("b", 1, hang=_HANG)}
        | {"ended": (ended("b", 1, exit_code=None, hang=_HANG),)},
        ["hang b 0"],
    ),
    "a restart": (
        {"cause": "restart", "names": _ALL, "reason": Requested(what="restart"), "step": 5},
        ["restart-job"],
    ),
    "a port": ({"cause": "port", "names": _ALL, "reason": failed("a", 0, is_port_taken=True)}, ["port-taken a"]),
}


def recorded(cause: Cause, names: tuple[str, ...], np: tuple[int, int] = (1, 9), **told: object) -> ExportedIncident:
    """The situation of an incident, after a group of three nodes."""
    run = Run(*_ALL, np=np)
    incident = run.add(cause, 50.0, names, **told)
    return exported_incident("job", run.history(60.0).spec, incident, run.incidents[0])


@pytest.mark.parametrize("case", _CASES)
def test_what_is_recorded_comes_again(case: str) -> None:
    """The same cause, about the same nodes, with the same members after it; and no invariant breaks."""
    told, faults = _CASES[case]
    played = replay(recorded(**told))
    assert list(played.events[played.events.index("run 5") + 1 :]) == faults


def test_a_first_start_comes_again() -> None:
    run = Run("a", "b")
    assert replay(exported_incident("job", run.history(1.0).spec, run.incidents[0], None)).events == (
        "job 1:9",
        "start a",
        "start b",
    )


def test_ranks_of_a_node_are_distinguished() -> None:
    """The second rank of a node is the second of its simulated ones."""
    run = Run("a", "b", nproc=2)
    end = ended("b", 3, local_rank=1)
    incident = run.add("failed", 50.0, ("a", "b"), reason=failed("b", 3, exit_code=1), ended=(end,))
    played = replay(exported_incident("job", run.history(60.0).spec, incident, run.incidents[0]))
    assert played.events[1:3] == ("start a nproc=2", "start b nproc=2")
    assert describe(played.group.reason).startswith("rank 3 on b exited with code 1")


def test_a_replay_is_a_scenario() -> None:
    """What it prints can be kept as a file of `scenarios/`."""
    played = replay(recorded("lost", ("a", "c"), reason=lost("b")))
    assert "\ngroup 2: a c (lost)\n" in scenario.play((*played.events, "run 1"))


@pytest.mark.parametrize(
    "told",
    [
        {"cause": "failed", "names": _ALL, "reason": failed("a", 0, exit_code=3), "ended": (ended("b", 1),)},
        {"cause": "lost", "names": ("a",), "reason": lost("b")},
        {"cause": "drain", "names": ("a", "c"), "reason": left("c")},
    ],
    ids=["another node", "another group", "another reason"],
)
def test_a_replay_that_differs_shows_the_difference(told: dict[str, Any]) -> None:
    """With what came instead, and how."""
    with pytest.raises(AssertionError, match="group 2: "):
        replay(recorded(**told))


def test_a_file_is_read_back(tmp_path: Path) -> None:
    """Strictly: what is not known is refused."""
    path = tmp_path / "incident.json"
    found = recorded("lost", ("a", "c"), reason=lost("b"))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    assert read(path) == found
    path.write_bytes(path.read_bytes().replace(b'"np"', b'"pn"'))
    with pytest.raises(ValueError, match="pn"):
        read(path)


def test_the_nodes_that_a_reason_is_about_are_named() -> None:
    assert nodes_of(NodesLost(node_ids=("a", "b"), unfit=(("c", ProcessesLeft(group=1)),))) == {"a", "b", "c"}
    apart = WorkersFailed(first=FailedWorker(node_id="a", rank=0), unreachable=("b",), left_out=("c",))
    assert nodes_of(apart) == {"a", "b", "c"}
    assert nodes_of(NodesUnreachable(node_ids=("a",))) == nodes_of(left("a")) == {"a"}
    assert nodes_of(CheckpointOnDisk(node_id="a", checkpoint="n")) == {"a"}
    assert nodes_of(NodesThere(nodes=2, np="2")) == nodes_of(DataLost(state="restored")) == frozenset()
