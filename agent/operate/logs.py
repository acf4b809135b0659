"""`elastic-agent logs`: the output of a job's ranks, from whichever node has it.

Each node has the logs of its own ranks under its own `--log_dir`. Running agents provide theirs at their link port. The
logs of a node that is gone are found where nodes share a directory, or in the directory given here.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import click

from agent.core.view import ClusterView
from agent.errors import ConfigError
from agent.local_etcd.kept_records import KeptStore
from agent.observe.messages import describe
from agent.operate.jobs import Follower, follow_job, open_job, read_incidents, read_view
from agent.operate.log_sources import LogLibrary, log_hosts
from agent.operate.node_logs import GroupNode, LogSelection, NodeLogs, group_nodes, nodes_of_group
from agent.operate.target import Target
from agent.store.api import Store
from agent.store.keys import JobKeys
from agent.workers.rank_logs import LogArchive

_LINES_BEFORE = 20
_NODES_AT_ONCE = 32
"""Number of nodes that are asked at the same time."""
_POLL_S = 0.2
_SEARCH_EVERY_S = 2.0
"""How often the logs of a node that is gone are looked for at other nodes."""
_LINGER_S = 30.0
"""How long workers may still write after another group has followed theirs."""
_END_WITHIN_S = 3.0
"""How long agents need to leave a job that has ended."""


def show_logs(target: Target, selection: LogSelection) -> int:
    """Print logs; return the exit code. Raises `ConfigError` if there is no such job, group or rank, or no log."""
    with open_job(target, only_live=False) as (store, keys):
        job = _JobLogs(store, keys, selection)
        if not selection.is_followed:
            asyncio.run(job.show())
            return 0
        with follow_job(store, keys) as follower:
            asyncio.run(job.follow(follower))
    return 0


class _JobLogs:
    def __init__(self, store: Store, keys: JobKeys, selection: LogSelection) -> None:
        self._store = store
        self._keys = keys
        self._selection = selection
        self._view: ClusterView = read_view(store, keys)
        assert self._view.spec is not None  # noqa: S101 - callers find jobs by their spec
        self._spec = self._view.spec.value
        self._group = self._view.group.value if self._view.group is not None else None

    async def show(self) -> None:
        """Print a group's logs one after the other."""
        library = self._library()
        try:
            number = self._selection.group or self._newest()
            problems = await self._show(library, number, self._selection.lines)
        finally:
            library.close()
        if problems is not None:
            why = "; ".join(problems) or f"no log of group {number} was found"
            raise ConfigError(
                f"job {self._keys.job_id!r}: {why}; if this machine can read the directory, name it with --log_dir"
            )

    async def follow(self, follower: Follower[ClusterView]) -> None:
        """Print the group's logs, and continue until the job ends."""
        library = self._library()
        lines = _LINES_BEFORE if self._selection.lines is None else self._selection.lines
        try:
            current = self._group.number if self._group is not None else 0
            first = self._selection.group or current
            if self._selection.group is not None:
                self._nodes(library, first)  # raises for a wrong group or rank before anything is printed
            for number in range(first, current):
                await self._show(library, number, lines if number == first else None)
            await LogTail(library, self._selection, self._spec.run).run(follower, lines if first == current else None)
        finally:
            library.close()

    def _library(self) -> LogLibrary:
        default = self._store.log_dir if isinstance(self._store, KeptStore) else Path("log")
        archive = LogArchive((self._selection.log_dir or default).absolute(), self._keys.job_id)
        library = LogLibrary(self._spec.run, self._spec.secret, archive)
        library.update(log_hosts(self._view))
        return library

    async def _show(self, library: LogLibrary, number: int, lines: int | None) -> list[str] | None:
        """Print a group's logs. Returns None if any log was found, else the problems."""
        every = [NodeLogs(library, node, self._selection, lines) for node in self._nodes(library, number)]
        for some in (every[at : at + _NODES_AT_ONCE] for at in range(0, len(every), _NODES_AT_ONCE)):
            await asyncio.gather(*(logs.search() for logs in some))  # in parallel: some nodes may not answer
            for logs in some:
                await logs.show_once()
        problems = [problem for logs in every for problem in logs.problems()]
        if not any(logs.has_any for logs in every):
            return problems
        for problem in problems:
            click.echo(f"elastic-agent: {problem}", err=True)
        return None

    def _newest(self) -> int:
        """Return the number of the newest group that trained, or trains. Raises `ConfigError` if there is none."""
        if self._group is not None and self._group.members:
            return self._group.number
        trained = [each.group for each in read_incidents(self._store, self._keys) if each.members]
        if not trained:
            raise ConfigError(f"job {self._keys.job_id!r} has not trained yet: there are no logs")
        return trained[-1]

    def _nodes(self, library: LogLibrary, number: int) -> tuple[GroupNode, ...]:
        """Return the nodes of a group whose logs are selected. Raises `ConfigError` for a wrong group or rank."""
        newest = self._group.number if self._group is not None else 0
        if not self._spec.first_group <= number <= newest:
            groups = f"{self._spec.first_group} to {newest}" if newest else "none"
            raise ConfigError(f"job {self._keys.job_id!r} has no group {number} in this run; its groups: {groups}")
        found = self._recorded(number)
        if not found:  # the record is no longer kept: any running agent may have logs
            found = tuple(GroupNode(number, node_id, None) for node_id in library.running)
        elif not any(node.may_have_rank(self._selection.rank) for node in found):
            last = max(max(node.ranks or (0,)) for node in found)
            raise ConfigError(f"group {number} has no rank {self._selection.rank}: its ranks are 0 to {last}")
        return tuple(node for node in found if node.may_have_rank(self._selection.rank))

    def _recorded(self, number: int) -> tuple[GroupNode, ...]:
        if self._group is not None and self._group.number == number:
            return nodes_of_group(self._group)
        incidents = (each for each in read_incidents(self._store, self._keys) if each.group == number)
        incident = next(incidents, None)
        members = incident.members if incident is not None else ()
        return group_nodes(number, ((member.node_id, member.nproc) for member in members))


class LogTail:
    """Follows a job's logs as they grow, from group to group, until the job ends.

    Args:
        library: where they are read.
        selection: which of them.
        run: the run; following ends when another run begins.
    """

    def __init__(self, library: LogLibrary, selection: LogSelection, run: str) -> None:
        self._library = library
        self._selection = selection
        self._run = run
        self._over_at: dict[int, float] = {}
        """By group that was followed by another: when its workers have written everything."""
        self._ended_at: float | None = None
        self._newest = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._seen_nodes: set[str] = set()
        self._printed_problems: set[str] = set()

    async def run(self, follower: Follower[ClusterView], lines: int | None) -> None:
        """Print what is written from now on, until the job ends.

        Args:
            follower: follows the job.
            lines: number of last lines to print of what exists already. None: all.

        Raises:
            RecordError: a record of the job cannot be read.
        """
        try:
            while self._ended_at is None or not all(task.done() for task in self._tasks):
                view = follower.next(0.0)
                if view is not None:
                    lines = self._update(view, lines)
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._tasks:
                task.cancel()

    def _update(self, view: ClusterView, lines: int | None) -> int | None:
        """Take in a view. Returns the number of lines to print of the next group's existing logs."""
        self._library.update(log_hosts(view))
        is_same_run = view.spec is not None and view.spec.value.run == self._run
        if (view.result is not None or not is_same_run) and self._ended_at is None:
            self._ended_at = time.monotonic()
            why = describe(view.result.value.reason) if view.result is not None else "another run has begun"
            click.echo(f"elastic-agent: the job has ended: {why}", err=True)
        group = view.group.value if view.group is not None else None
        if group is None or group.run != self._run or group.number <= self._newest:
            return lines
        missed = range(self._newest + 1 if self._newest else group.number, group.number)
        for number in (self._newest, *missed):
            self._over_at[number] = time.monotonic() + _LINGER_S
        self._newest = group.number
        self._seen_nodes |= {*self._library.running, *(member.node_id for member in group.members)}
        # The members of a group that came and went between two views are not known here: any node may have been one.
        unseen = (GroupNode(number, node_id, None) for number in missed for node_id in sorted(self._seen_nodes))
        for node in (*unseen, *nodes_of_group(group)):
            if node.may_have_rank(self._selection.rank):
                self._tasks.append(asyncio.create_task(self._follow_node(node, lines)))
        return None

    async def _follow_node(self, node: GroupNode, lines: int | None) -> None:
        """Print one node's logs of one group as they grow."""
        logs = NodeLogs(self._library, node, self._selection, lines)
        search_at = 0.0
        while True:
            is_last = self._is_over(node.group)
            now = time.monotonic()
            if not logs.is_complete and (now >= search_at or not logs.is_node_gone):
                await logs.search()
                search_at = now + _SEARCH_EVERY_S
            await logs.show_more()
            if is_last or logs.is_node_gone:
                self._print_problems(logs)
            if is_last:
                logs.end()
                return
            await asyncio.sleep(_POLL_S)

    def _is_over(self, group: int) -> bool:
        """Whether a group's logs are complete, so that the next read is the last."""
        now = time.monotonic()
        if self._ended_at is not None:
            return self._library.is_closing or now >= self._ended_at + _END_WITHIN_S
        return now >= self._over_at.get(group, now + 1.0)

    def _print_problems(self, logs: NodeLogs) -> None:
        for problem in logs.problems():
            if problem not in self._printed_problems:
                self._printed_problems.add(problem)
                click.echo(f"elastic-agent: {problem}", err=True)
