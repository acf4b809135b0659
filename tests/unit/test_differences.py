"""Nodes that do not run the same are told of, each once, by who sees them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from nodes import ME, POLICY, node

from agent.core.model import ClusterView, Node, NodeInfo, Stored
from agent.core.state import AgentState
from agent.observe.notices import NodeDifferences

SAME = (("python", "3.11.2"), ("script", "abc"), ("torch", "2.13.0"))


def running(name: str, *facts: tuple[str, str]) -> Stored[Node]:
    stored = node(name)
    return replace(stored, value=msgspec.structs.replace(stored.value, about=NodeInfo(facts=facts)))


def told(*nodes: Stored[Node], is_whole: bool = True) -> list[str]:
    """What the agent on a says that sees these, twice."""
    said: list[str] = []
    state = AgentState(replace(ME, about=NodeInfo(facts=SAME)), POLICY)
    differences = NodeDifferences(said.append)
    for revision in (1, 2):
        differences.update(replace(state, view=ClusterView(revision=revision, is_whole=is_whole, nodes=nodes)))
    return said


def test_nodes_that_run_the_same_are_not_told_of() -> None:
    assert told(running("a", *SAME), running("b", *SAME)) == []


def test_another_version_and_another_script_are_named_once() -> None:
    other = (("python", "3.11.2"), ("script", "def"), ("torch", "2.12.0"))
    (said,) = told(running("a", *SAME), running("b", *other))
    assert said.startswith("b runs other software: its script, or a module beside it, is not the same as on a; ")
    assert said.endswith(
        "; torch 2.12.0 there, 2.13.0 on a; install the same versions and the same script on all nodes"
    )


def test_what_is_missing_is_named_and_who_sees_nobody_says_nothing() -> None:
    assert "torch none there, 2.13.0 on a" in told(running("b", ("python", "3.11.2")))[0]
    assert told(running("b", ("python", "3.12.0")), is_whole=False) == []
