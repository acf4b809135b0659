"""Plays stories on a core of which one line was changed, each in a process of its own.

A process that has imported what all of them need reads a JSON list a line (module, code, instead, story), plays each
in a fork of itself, and answers with a JSON string: empty if the story fails then, as it should, else what happened.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[2]
_STORIES = (
    "simulation.scenario",
    "simulation.random_clusters",
    "simulation.roles",
    "simulation.test_stories",
    "simulation.test_edges",
    "unit.test_roles",
    "unit.test_stalls",
)
_OWN = frozenset({"agent", "trainer_runtime", "simulation", "unit"})
_WITHIN_S = 500
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


def warm_up() -> None:
    """Import what stories need, and forget what is ours: it is imported anew, with a change."""
    for name in _STORIES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] in _OWN]:
        del sys.modules[name]


def attempt(module: str, code: str, instead: str, story: str) -> str:
    """What is wrong with this guard; empty: nothing."""
    signal.alarm(_WITHIN_S)  # it ends this process, whatever that does
    change(module, code, instead)
    try:
        play(story)
    except AssertionError:
        return ""
    except BaseException:  # noqa: BLE001 - whatever it is, it is told
        return traceback.format_exc()
    return "the story goes on as if nothing were missing"


def in_a_fork(asked: list[str]) -> str:
    """What is wrong, as a process found that ends with that."""
    ours, its_own = os.pipe()
    pid = os.fork()
    if pid == 0:
        with redirect_stdout(sys.stderr):
            said = attempt(*asked)
        with os.fdopen(its_own, "w") as pipe:
            pipe.write(f"said:{said}")
        os._exit(0)
    os.close(its_own)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return said.removeprefix("said:") if said else f"it ended with {os.waitstatus_to_exitcode(status)} and no word"


def main() -> None:
    """Serve until the end of the input."""
    warm_up()
    for line in sys.stdin:
        print(json.dumps(in_a_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
