"""Status records made of their parts, for tests that need only some of them."""

from __future__ import annotations

from agent.core.failures import ExitReport
from agent.core.incident import StallReport, TransitionReport
from agent.core.member_status import MemberStatus
from agent.core.model import Group, Quiesced
from agent.core.saved_states import Inventory

Part = Inventory | Quiesced | TransitionReport | StallReport | ExitReport
NAMES: dict[type[Part], str] = {
    Inventory: "inventory",
    Quiesced: "quiesced",
    TransitionReport: "transition",
    StallReport: "stall",
    ExitReport: "exit",
}


def statuses(*parts: Part) -> tuple[MemberStatus, ...]:
    """One status for each member that these are about, by node id."""
    by_member: dict[tuple[str, str, int], dict[str, Part]] = {}
    for part in parts:
        by_member.setdefault((part.node_id, part.incarnation, part.group), {})[NAMES[type(part)]] = part
    return tuple(
        MemberStatus(group=group, node_id=node_id, incarnation=incarnation, **fields)  # type: ignore[arg-type]
        for (node_id, incarnation, group), fields in sorted(by_member.items())
    )


def first_steps(group: Group) -> tuple[TransitionReport, ...]:
    """Reports of all members of the group that their ranks have made a step in it."""
    return tuple(
        TransitionReport(
            group=group.number, node_id=who.node_id, incarnation=who.incarnation, stopped_s=0.0, stepped_s=1.0
        )
        for who in group.node_ranks
    )
