"""End a job before its ranks have finished: what they or the agents' memory have is saved first.

A job ends so if an operator asks for it, if a failure is not tried again, or if too few nodes were there for too long.
The reason is in the spec, so a later leader continues.

- A group whose ranks take part in a handoff saves in one (`handoff.py`). If all of them finish before that, the job has
  succeeded.
- Otherwise a group without members ends the ranks: they set up, hang or have failed, or the group is about to change.
  Then the newest steps are only in the memory of agents. Each agent reports which snapshots it holds, once its ranks
  have ended. The leader chooses the newest one that an agent holds in full, and names the agent in the restore point.
  That agent saves it (`last_checkpoint.py`).
- If that agent is lost, or reports that it could not save, another group without members is formed, so that all report
  anew, and another agent saves.
- The job ends once the checkpoint is committed, no agent is left that could save, or there is nothing to save.
"""

from __future__ import annotations

import msgspec

from agent.core import lineage
from agent.core.gathering import Gathering
from agent.core.handoff import PlannedChange, are_ranks_quiesced
from agent.core.model import Group
from agent.core.proposals import Plan, node_ids
from agent.core.reasons import EndingReason, Finished, GaveUp, NotRetried, ProcessesLeft, Requested, Waiting


class Ending(Gathering):
    """Adds what is decided once the job is to end."""

    def save_and_end(self, reason: EndingReason) -> Plan:
        """End the job, once what its ranks or its agents' memory have is saved."""
        group = self.group
        if group is None:
            return self.write_result(reason)
        return self._end_ranks(group, reason) if group.members else self._save(group, reason)

    def _end_ranks(self, group: Group, reason: EndingReason) -> Plan:
        done = {each.identity for each in self.view.exits if each.failure is None}
        if group.node_ranks.keys() <= done:
            return self.write_result(Finished(ranks=group.world_size, group=group.number))
        unfit = {node.identity for node in self.view.unfit}
        is_whole = group.node_ranks.keys() <= (self.view.present.keys() - unfit) | done
        if isinstance(reason, Requested) and is_whole and len(done) == len(self.view.exits):
            awaited = self.awaited(group, PlannedChange("drain", reason, ()))  # ranks that have finished wait for it
            if awaited is not None:
                return awaited
            progress = self.seen.handoff_progress
            if are_ranks_quiesced(progress, self.policy, self.now) and not progress.is_in_memory:
                return self.write_result(reason)
        return self._form_without_members(group, reason)

    def _form_without_members(self, group: Group, reason: EndingReason) -> Plan:
        match reason:
            case Requested():
                return self.form((), "drain", reason)
            case NotRetried():
                return self.form((), "failed", reason, is_failure=bool(group.members))
            case GaveUp():
                return self.form((), "wait", group.reason)

    def _save(self, group: Group, reason: EndingReason) -> Plan:
        """Let an agent save the newest snapshot that it holds in full, once all have reported theirs."""
        held = {each.identity: each.copies for each in self.view.inventories if each.identity in self.view.present}
        nodes = [node.value for node in self.view.nodes if not isinstance(node.value.unfit, ProcessesLeft)]
        silent = [node.member for node in nodes if node.identity not in held]
        if silent:
            return Plan(None, Waiting(what="inventory", node_ids=node_ids(silent)))
        committed = self.view.checkpoint.value if self.view.checkpoint is not None else None
        begun = self.view.restore_point.value if self.view.restore_point is not None else None
        saved = committed.copy if committed is not None else None
        last, run = lineage.as_begun(begun, committed), self.spec.run
        newest = lineage.choose(held.values(), last, committed, run)
        if newest is None or newest == saved:
            return self.write_result(reason)
        holders = tuple(who.node_id for who, copies in held.items() if any(each.copy == newest for each in copies))
        unsaved = reason
        if isinstance(reason, Requested):
            step = saved.step if saved is not None else 0
            unsaved = msgspec.structs.replace(reason, node_ids=tuple(sorted(holders)), saved=step)
        found = {who: lineage.choose([copies], last, committed, run) for who, copies in held.items()}
        failed = {each.identity for each in self.view.statuses if each.has_failed_to_save}
        whole = {who: copy for who, copy in found.items() if copy is not None and copy != saved and who not in failed}
        if begun is not None and begun.group == group.number and begun.saver is not None:
            is_saving = begun.saver in self.view.present and begun.saver not in failed
            if (saved is None or saved != begun.copy) and (is_saving or whole):
                waiting = Plan(None, Waiting(what="save", node_ids=(begun.saver.node_id,)))
                return waiting if is_saving else self._form_without_members(group, reason)
            whole = {}
        if not whole:
            return self.write_result(unsaved)
        saver = max(sorted(whole), key=lambda who: lineage.age(whole[who], run))
        restore_point = lineage.follow(group.number, whole[saver], last, committed, run)
        named = msgspec.structs.replace(restore_point, saver=saver)
        return Plan(named, Waiting(what="save", node_ids=(saver.node_id,)))
