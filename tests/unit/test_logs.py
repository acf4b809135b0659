"""Following logs across changes of group, groups that were never observed, and the end of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from reasons import LOST

from agent.core.model import Group, Member, Result, Spec
from agent.core.reasons import Requested
from agent.core.records import Stored
from agent.core.view import ClusterView
from agent.operate import logs
from agent.operate.log_sources import LogLibrary
from agent.operate.logs import LogTail
from agent.operate.node_logs import LogSelection
from agent.workers.rank_logs import LogArchive, group_dir, log_path

RUN = "0a"


def _member(node_id: str) -> Member:
    return Member(node_id=node_id, incarnation="1", address="127.0.0.1", nproc=1, port=1, link=1)


def _view(group: int, nodes: str, *, run: str = RUN, result: str = "") -> ClusterView:
    spec = Spec(run=run, np_min=1, np_max=9, secret="s", changed_by="", changed_at=0.0)
    members = tuple(map(_member, nodes))
    record = Group(
        run=run, number=group, members=members, cause="start", reason=LOST, restarts=0, step=0, reached=len(members)
    )
    ended = Result(run=run, group=group, succeeded=True, exit_code=0, reason=Requested(what="stop", by=result))
    return ClusterView(
        revision=1,
        is_whole=True,
        spec=Stored(spec, 1, 1),
        group=Stored(record, 1, 1),
        result=Stored(ended, 1, 1) if result else None,
    )


class ScriptedFollower:
    """A follower that returns one view at a time, and runs actions in between."""

    def __init__(self, *steps: ClusterView | Callable[[], object]) -> None:
        self._steps = list(steps)

    def next(self, _timeout_s: float) -> ClusterView | None:
        step = self._steps.pop(0) if self._steps else None
        if step is None or isinstance(step, ClusterView):
            return step
        step()
        return None


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Follow a scripted job to its end; the logs are in a local directory."""
    monkeypatch.setattr(logs, "_POLL_S", 0.01)
    monkeypatch.setattr(logs, "_SEARCH_EVERY_S", 0.0)

    def run(script: ScriptedFollower, rank: int | None = None, lines: int | None = None) -> None:
        wanted = LogSelection(rank, None, lines, is_followed=True, log_dir=tmp_path, as_json=False)
        library = LogLibrary(RUN, "s", LogArchive(tmp_path, "job"))

        async def bounded() -> None:
            async with asyncio.timeout(60.0):
                await LogTail(library, wanted, RUN).run(script, lines)  # type: ignore[arg-type]

        asyncio.run(bounded())

    return run


@pytest.fixture
def say(tmp_path: Path) -> Callable[..., Callable[[], None]]:
    """Return an action that appends to a rank's log."""

    def make(group: int, rank: int, node_id: str, text: str) -> Callable[[], None]:
        def write() -> None:
            path = log_path(group_dir(tmp_path, "job", RUN, group), node_id, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as log:
                log.write(text)

        return write

    return make


Say = Callable[..., Callable[[], None]]
Follow = Callable[..., None]
NOTHING: list[Callable[[], object]] = [lambda: None] * 20
"""Enough turns for the follower to poll."""


def test_existing_logs_begin_with_their_last_lines_and_later_groups_are_complete(
    follow: Follow, say: Say, capfd: pytest.CaptureFixture[str]
) -> None:
    say(1, 0, "a", "old\nnew\n")()
    follow(
        ScriptedFollower(
            _view(1, "a"),
            *NOTHING,
            say(1, 0, "a", "newer\n"),
            say(2, 0, "a", "first\nsecond\n"),
            _view(2, "a"),
            _view(2, "a", result="ann"),
        ),
        lines=1,
    )
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        "[rank 0 a group 1] new",
        "[rank 0 a group 1] newer",
        "[rank 0 a group 2] first",
        "[rank 0 a group 2] second",
    ]
    assert err == "elastic-agent: the job has ended: stopped by ann\n"


def test_late_output_of_a_previous_group_is_shown(follow: Follow, say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    say(1, 0, "a", "before\n")()
    say(2, 0, "a", "after\n")()
    late = say(1, 0, "a", "as it was stopped")
    follow(ScriptedFollower(_view(1, "a"), _view(2, "a"), late, _view(2, "a", result="ann")))
    assert "[rank 0 a group 1] as it was stopped\n" in capfd.readouterr().out


def test_a_rank_is_followed_from_node_to_node(follow: Follow, say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    for group, rank, node_id in ((1, 0, "a"), (1, 1, "b"), (2, 0, "b"), (2, 1, "a")):
        say(group, rank, node_id, f"{node_id}\n")()
    follow(ScriptedFollower(_view(1, "ab"), _view(2, "ba"), _view(2, "ba", result="ann")), rank=1)
    assert capfd.readouterr().out.splitlines() == ["[rank 1 b group 1] b", "[rank 1 a group 2] a"]


def test_a_group_that_came_and_went_between_two_views_is_shown(
    follow: Follow, say: Say, capfd: pytest.CaptureFixture[str]
) -> None:
    for group in (1, 2, 3):
        say(group, 0, "a", f"in group {group}\n")()
    follow(ScriptedFollower(_view(1, "ab"), _view(3, "a"), _view(3, "a", result="ann")))
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[rank 0 a group {group}] in group {group}" for group in (1, 2, 3)]


def test_a_missing_log_of_a_node_that_is_gone_is_reported_once(
    follow: Follow, say: Say, capfd: pytest.CaptureFixture[str]
) -> None:
    say(1, 0, "a", "here\n")()
    follow(ScriptedFollower(_view(1, "ab"), *NOTHING, _view(1, "ab", result="ann")))
    told = [line for line in capfd.readouterr().err.splitlines() if "rank 1" in line]
    assert told == ["elastic-agent: no log of rank 1 in group 1: b is gone; the log was there, under its --log_dir"]


def test_following_ends_when_another_run_begins(follow: Follow, say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    say(1, 0, "a", "here\n")()
    say(2, 0, "a", "never\n")()
    follow(ScriptedFollower(_view(1, "a"), _view(2, "a", run="0b")))
    out, err = capfd.readouterr()
    assert out == "[rank 0 a group 1] here\n"
    assert "another run has begun" in err
