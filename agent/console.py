"""What of a rank's output the agent's console shows; its log has all of it in any case.

`--console_ranks` chooses ranks of the world. torchrun's options choose among the local ranks of each node, and may
tell a rank's two streams apart: 1 is standard output, 2 standard error, 3 both, 0 none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent.errors import ConfigError

BOTH = 3


@dataclass(frozen=True)
class Streams:
    """For each local rank, which of its streams."""

    of_all: int = 0
    of_some: tuple[tuple[int, int], ...] = ()
    """(local rank, streams): the others have none."""

    def of(self, local_rank: int) -> int:
        """0, 1, 2 or 3."""
        return dict(self.of_some).get(local_rank, self.of_all)


@dataclass(frozen=True)
class ConsoleConfig:
    """What is shown, and how it is marked."""

    ranks: frozenset[int] | None = frozenset({0})
    """None: all."""
    local_ranks: frozenset[int] | None = None
    """Whatever else is said, only these of each node. None: all."""
    redirects: Streams = Streams()
    """Not shown, though it is one of those."""
    tee: Streams = Streams()
    """Shown, though it is none of those."""
    prefix: str = "[rank${rank}]:"
    """Before each line, with a space after it: a template as torchrun's; torch marks its own lines like this one."""

    def streams(self, rank: int, local_rank: int) -> tuple[int, ...]:
        """Which of a rank's streams are shown: 1, 2, both or none."""
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return ()
        is_one = self.ranks is None or rank in self.ranks
        shown = (BOTH if is_one else 0) & ~self.redirects.of(local_rank) | self.tee.of(local_rank)
        return tuple(stream for stream in (1, 2) if shown & stream)


def parse_streams(option: str, text: str | None) -> Streams:
    """`3` or `0:3,1:1`, as torchrun takes it. Raises `ConfigError`."""
    if text is None:
        return Streams()
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(
            f"{option} must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or that for some local ranks, as 0:3,1:1, "
            f"not {text!r}"
        )
    pairs = (part.split(":") for part in text.split(","))
    return Streams(of_some=tuple((int(local_rank), int(streams)) for local_rank, streams in pairs))


def parse_ranks(option: str, text: str) -> frozenset[int] | None:
    """`0,1`, `none`, or `all`, which is None. Raises `ConfigError`."""
    if text in {"all", "none"}:
        return None if text == "all" else frozenset()
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be ranks like 0,1 or all or none, not {text!r}") from None
