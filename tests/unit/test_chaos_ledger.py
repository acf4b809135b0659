"""The rules that ranks' ledgers have to keep: each breach of one is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.ledger import STEPS_PER_EPOCH, Ledger, Line, faults_in, lost_after, lost_steps, replayed_steps
from chaos.training import GLOBAL_BATCH, SAMPLES

Lines = list[Line]
STEPS = 2 * STEPS_PER_EPOCH


def take(group: int, steps: Iterable[int], *, world: int = 2, at: float = 0.0, commits_last: bool = True) -> Lines:
    """A group's steps, a second each, in which its ranks share the samples."""
    lines = []
    steps = list(steps)
    for step in steps:
        epoch, place = divmod(step - 1, STEPS_PER_EPOCH)
        samples = range(SAMPLES)[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH]
        for rank in range(world):
            line = Line(at + step, group, rank, f"host-{rank}", 10 * group + rank, world, step)
            lines.append(replace(line, epoch=epoch, samples=tuple(samples[rank::world])))
            if commits_last or step != steps[-1]:
                lines.append(replace(line, t=line.t + 0.5))
    return lines


def whole() -> Lines:
    """A group is lost after step 4, and the next one begins with step 4 again; a third one resizes."""
    return [*take(1, range(1, 5)), *take(2, range(4, 8), at=10.0), *take(3, range(8, STEPS + 1), world=3, at=20.0)]


def test_what_keeps_the_rules() -> None:
    assert faults_in(whole(), STEPS) == []
    assert lost_steps(whole()) == {1: 0, 2: 1, 3: 0}


def test_a_step_that_was_not_seen_to_end_may_be_where_the_next_group_begins() -> None:
    """The rank was killed between its commit and its last word."""
    lines = [*take(1, range(1, 5), commits_last=False), *take(2, range(5, STEPS + 1), at=10.0)]
    assert faults_in(lines, STEPS) == []
    assert lost_steps(lines) == {1: 0, 2: 0}


def test_a_step_whose_commit_had_begun_counts_as_repeated() -> None:
    """At a handoff a rank's commit does not return: that step is saved, and may not be done again."""
    lines = [*take(1, range(1, 5), commits_last=False), *take(2, range(4, STEPS + 1), at=10.0)]
    assert lost_steps(lines) == {1: 0, 2: 0}
    assert replayed_steps(lines) == {1: 0, 2: 1}


def test_steps_lost_twice_are_counted_once_for_each_time() -> None:
    lines = [*take(1, range(1, 6)), *take(2, range(3, 5), at=10.0), *take(3, range(3, STEPS + 1), at=20.0)]
    assert lost_steps(lines) == {1: 0, 2: 3, 3: 2}
    assert [lost_after(lines, group) for group in (0, 1, 2, 3)] == [5, 5, 2, 0]


def without_step_6(lines: Lines) -> Lines:
    return [line for line in lines if line.step != 6]


def with_a_sample_twice(lines: Lines) -> Lines:
    at = next(index for index, line in enumerate(lines) if line.group == 3 and line.samples)
    first, *others = lines[at].samples
    return [*lines[:at], replace(lines[at], samples=(first, first, *others[1:])), *lines[at + 1 :]]


def with_two_of_a_rank(lines: Lines) -> Lines:
    return [*lines, replace(lines[-1], host="another")]


def with_worlds_that_differ(lines: Lines) -> Lines:
    return [*lines[:-1], replace(lines[-1], world=4)]


def with_a_group_too_far(lines: Lines) -> Lines:
    return [*lines, *take(4, [STEPS + 2], at=30.0)]


def with_an_old_group_that_comes_back(lines: Lines) -> Lines:
    return [replace(line, t=line.t + 100) if line.group == 2 else line for line in lines]


def with_a_host_in_two_groups(lines: Lines) -> Lines:
    late = [replace(line, t=line.t + 14) for line in lines if line.group == 1 and line.rank == 1]
    return [line for line in lines if line.group > 1 or line.rank == 0] + late


def with_a_rank_missing(lines: Lines) -> Lines:
    return [line for line in lines if (line.group, line.rank) != (3, 2)]


def with_a_step_after_the_end(lines: Lines) -> Lines:
    return [*lines, *take(3, [STEPS + 1], world=3, at=30.0)]


def with_a_commit_left_out(lines: Lines) -> Lines:
    return [line for line in lines if not (line.is_committed and (line.group, line.rank, line.step) == (2, 1, 5))]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (without_step_6, "steps [6] are in no ledger"),
        (with_a_sample_twice, "did not take each sample once"),
        (with_two_of_a_rank, "rank 2 of group 3 was"),
        (with_worlds_that_differ, "group 3 was of [3, 4] ranks"),
        (with_a_group_too_far, "group 4 began with step 12, and only 10 were done"),
        (with_an_old_group_that_comes_back, "group 3 took a step before the one ahead of it"),
        (with_a_host_in_two_groups, "host-1 took a step of group 1 after one of group 2"),
        (with_a_rank_missing, "has 2 of 3 ranks in the ledger"),
        (with_a_step_after_the_end, "step 11 was taken, and the result is of 10"),
        (with_a_commit_left_out, "rank 1 of group 2 committed [4, 6, 7]..., not one step after the other"),
    ],
)
def test_each_breach_is_seen(broken: Callable[[Lines], Lines], told: str) -> None:
    assert [found for found in faults_in(broken(whole()), STEPS) if told in found]


def test_files_are_followed_up_to_their_last_whole_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert (ledger.follow(), ledger.newest_group) == ([], 0)
    told = {"t": 1.0, "host": "a", "pid": 7, "world": 1, "step": 1}
    begun, done = json.dumps({**told, "epoch": 0, "samples": [2, 0]}), json.dumps({**told, "t": 2.5})
    (tmp_path / "12.0").write_text(f"{begun}\n{done[:9]}")
    (tmp_path / "eat.host").symlink_to("gone")  # as what is looked at once it is gone
    assert ledger.follow() == [Line(1.0, 12, 0, "a", 7, 1, 1, epoch=0, samples=(2, 0))]
    assert ledger.newest_group == 0, "nothing is committed"
    (tmp_path / "12.0").write_text(f"{begun}\n{done}\n")
    assert [line.is_committed for line in ledger.follow()] == [True]
    assert ledger.newest_group == 12
    assert ledger.pids() == {0: ("a", 7)}
    assert ledger.longest_pause_s(0.0, 3.0) == 2.5
