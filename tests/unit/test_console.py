"""Which output of the ranks the console shows, by our option and by torchrun's."""

from __future__ import annotations

import pytest

from agent.console import ConsoleConfig, Streams, parse_ranks, parse_streams
from agent.errors import ConfigError

BOTH = (1, 2)


def shown(config: ConsoleConfig, nproc: int = 2, nodes: int = 2) -> list[tuple[int, ...]]:
    """The streams that are shown, by rank."""
    return [config.streams(rank, rank % nproc) for rank in range(nproc * nodes)]


def test_by_default_rank_0_is_shown() -> None:
    assert shown(ConsoleConfig()) == [BOTH, (), (), ()]


def test_ranks_are_of_the_world_and_local_ranks_of_each_node() -> None:
    assert shown(ConsoleConfig(ranks=frozenset({1, 2}))) == [(), BOTH, BOTH, ()]
    assert shown(ConsoleConfig(ranks=None, local_ranks=frozenset({1}))) == [(), BOTH, (), BOTH]


@pytest.mark.parametrize(
    ("tee", "expected"),
    [
        ("3", [BOTH, BOTH, BOTH, BOTH]),
        ("1", [(1,), (1,), (1,), (1,)]),
        ("0:2", [(2,), (), (2,), ()]),
        ("0:1,1:3", [(1,), BOTH, (1,), BOTH]),
        ("0", [(), (), (), ()]),
    ],
)
def test_tee_shows_what_else_is_only_in_the_log(tee: str, expected: list[tuple[int, ...]]) -> None:
    assert shown(ConsoleConfig(ranks=frozenset(), tee=parse_streams("--tee", tee))) == expected


def test_the_filter_has_the_last_word() -> None:
    """As in torchrun."""
    assert shown(ConsoleConfig(local_ranks=frozenset({0}), tee=parse_streams("--tee", "3"))) == [BOTH, (), BOTH, ()]


def test_redirects_keep_from_the_console_what_else_is_shown() -> None:
    assert shown(ConsoleConfig(ranks=None, redirects=parse_streams("-r", "1:1")))[:2] == [BOTH, (2,)]
    both = ConsoleConfig(ranks=None, redirects=parse_streams("-r", "3"), tee=parse_streams("-t", "0:3"))
    assert shown(both) == [BOTH, (), BOTH, ()]


@pytest.mark.parametrize("text", ["4", "x", "", "0:", "0:4", "0:1,", "0:1;1:1", "-1", "13"])
def test_streams_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tee must be 0 \(none\), 1 \(stdout\).*not"):
        parse_streams("--tee", text)


def test_nothing_given_is_nothing_chosen() -> None:
    assert parse_streams("--tee", None) == Streams()


def test_ranks_as_text() -> None:
    assert parse_ranks("--console_ranks", "0,2") == frozenset({0, 2})
    assert parse_ranks("--console_ranks", "none") == frozenset()
    assert parse_ranks("--console_ranks", "all") is None
    with pytest.raises(ConfigError, match="--console_ranks must be ranks like 0,1 or all or none, not 'first'"):
        parse_ranks("--console_ranks", "first")
