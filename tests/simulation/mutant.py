"""Plays a story on a core of which one line was changed. Ends with 0 if the story fails then, as it should."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SURVIVED = 3
_SEEDS = 100
"""So many are tried: a change of the core moves what happens in each."""


class _Changed(importlib.machinery.SourceFileLoader):
    """Loads a module with one piece of its code replaced."""

    def __init__(self, name: str, path: Path, code: str, instead: str) -> None:
        super().__init__(name, str(path))
        self._code, self._instead = code, instead

    def path_stats(self, path: str) -> dict[str, int]:
        raise OSError(path)  # no byte code of it is kept, and none is used

    def get_data(self, path: str) -> bytes:
        source = Path(path).read_text(encoding="utf-8")
        return source.replace(self._code, self._instead).encode()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, code: str, instead: str) -> None:
        self._name, self._code, self._instead = name, code, instead

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        path = ROOT / Path(*fullname.split(".")).with_suffix(".py")
        loader = _Changed(fullname, path, self._code, self._instead)
        return importlib.util.spec_from_file_location(fullname, path, loader=loader)


def change(module: str, code: str, instead: str) -> None:
    """From now on this module is imported with that change."""
    sys.meta_path.insert(0, _Finder(module, code, instead))


def play(story: str) -> None:
    """Let a story happen. Raises AssertionError if it does not end as it should."""
    kind, _, rest = story.partition(" ")
    if kind == "scenario":
        from simulation import scenario  # noqa: PLC0415 - after the change

        told, expected = scenario.read(ROOT / "tests/simulation/scenarios" / f"{rest}.txt")
        assert scenario.play(told) == expected
    elif kind == "seed":
        from simulation import random_clusters  # noqa: PLC0415

        for seed in range(int(rest), int(rest) + _SEEDS):  # the first one did when it was written down
            random_clusters.play(seed, steps=200)
    elif kind in {"roles", "emptied"}:
        from simulation import roles  # noqa: PLC0415

        for seed in range(int(rest), int(rest) + _SEEDS):
            roles.play(seed, wipes=kind == "emptied")
    elif kind == "story":
        from simulation import test_stories  # noqa: PLC0415

        name, _, seed = rest.partition(" ")
        getattr(test_stories, name)(int(seed))
    elif kind == "post":
        from unit import test_roles  # noqa: PLC0415

        name, _, argument = rest.partition(" ")
        getattr(test_roles, name)(*([argument] if argument else []))
    elif kind == "table":
        from unit import test_stalls  # noqa: PLC0415

        getattr(test_stalls, rest)()
    else:
        from simulation import test_edges  # noqa: PLC0415

        getattr(test_edges, rest)()


def main() -> int:
    """Arguments: module, code, instead, story."""
    module, code, instead, story = sys.argv[1:]
    change(module, code, instead)
    try:
        play(story)
    except AssertionError:
        return 0
    return SURVIVED


if __name__ == "__main__":
    sys.exit(main())
