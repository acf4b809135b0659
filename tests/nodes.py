"""Nodes made by hand, for tests of what is said of them."""

from __future__ import annotations

import msgspec

from agent.core.model import Node, Timing
from agent.core.policy import Policy
from agent.core.records import Stored
from agent.core.state import AgentFacts

TIMING = Timing(detect_within_s=5.0, lease_ttl_s=4.0, link_heartbeat_s=0.5, settle_s=1.0)
ME = AgentFacts(
    job_id="job",
    node_id="a",
    is_node_id_chosen=True,
    incarnation="i1",
    address="10.0.0.1",
    nproc=1,
    link=1,
    host="h",
    pid=1,
    pid_started=1,
    run="r",
    secret="s",
    np_min=3,
    np_max=3,
    fresh=False,
    started_at=0.0,
    started_now=0.0,
    timing=TIMING,
)
POLICY = Policy(
    lease_ttl_s=4.0,
    settle_s=1.0,
    stop_grace_s=5.0,
    kill_timeout_s=10.0,
    handoff_timeout_s=8.0,
    handoff_wait_s=1.0,
    max_restarts=3,
    progress_window_s=60.0,
    elastic_timeout_s=None,
)
NODE = Node(
    node_id="a",
    incarnation="i1",
    address="10.0.0.1",
    nproc=1,
    port=1,
    link=2,
    host="h",
    pid=1,
    pid_started=1,
    timing=TIMING,
)


def node(name: str) -> Stored[Node]:
    return Stored(msgspec.structs.replace(NODE, node_id=name), 1, 1)
