"""Which output of the ranks the agent's console shows. The log of a rank always has all of its output.

`--console_ranks` selects ranks of the world. torchrun's options select local ranks of each node, and can select one
stream of a rank only: 1 is standard output, 2 standard error, 3 both, 0 none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent.errors import ConfigError

BOTH = 3


@dataclass(frozen=True)
class Streams:
    """The selected streams of each local rank."""

    of_all: int = 0
    of_some: tuple[tuple[int, int], ...] = ()
    """Pairs of local rank and streams. For all other ranks no stream is selected."""

    def of(self, local_rank: int) -> int:
        """The selected streams of one local rank: 0, 1, 2 or 3."""
        return dict(self.of_some).get(local_rank, self.of_all)


@dataclass(frozen=True)
class ConsoleConfig:
    """Which output is shown, and with which prefix."""

    ranks: frozenset[int] | None = frozenset({0})
    """None: all."""
    local_ranks: frozenset[int] | None = None
    """Only these local ranks of each node are shown, whatever the other fields select. None: all."""
    redirects: Streams = Streams()
    """Streams of the selected ranks that are not shown."""
    tee: Streams = Streams()
    """Streams of other ranks that are shown."""
    prefix: str = "[rank${rank}]: "
    """Template of the prefix of each line, as in torchrun. torch's own lines have the same one."""

    def streams(self, rank: int, local_rank: int) -> tuple[int, ...]:
        """The streams of a rank that are shown: 1, 2, both or none."""
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return ()
        is_selected = self.ranks is None or rank in self.ranks
        shown = (BOTH if is_selected else 0) & ~self.redirects.of(local_rank) | self.tee.of(local_rank)
        return tuple(stream for stream in (1, 2) if shown & stream)


def parse_streams(option: str, text: str | None) -> Streams:
    """Parse `3` or `0:3,1:1`, as torchrun does. Raises `ConfigError`."""
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
    """Parse `0,1`, `none` or `all`; `all` is None. Raises `ConfigError`."""
    if text in {"all", "none"}:
        return None if text == "all" else frozenset()
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be ranks like 0,1 or all or none, not {text!r}") from None
