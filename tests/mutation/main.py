"""Draw mutants of the core and play them; report those that nothing notices. See `scripts/mutate`."""

from __future__ import annotations

import argparse
import random
import sys
import time
import tomllib
from pathlib import Path

from mutation import runner, suite
from mutation.mutants import Mutant, mutants

_BOUNDS = Path(__file__).with_name("bounds.toml")
MODULES = (
    *(f"agent.core.{path.stem}" for path in sorted((suite.ROOT / "agent/core").glob("[!_]*.py"))),
    "agent.roles.core",
    "agent.roles.shards",
    "agent.roles.store",
    "agent.store.job_writer",
    "agent.observe.announcements",
    "agent.observe.incident_log",
    "agent.observe.incident_recorder",
    "agent.observe.stragglers",
)


def all_mutants(modules: tuple[str, ...]) -> list[Mutant]:
    """All mutants of these modules, in a fixed order."""
    return [each for name in modules for each in mutants(runner.path_of(name).read_text(encoding="utf-8"), name)]


def main() -> None:
    """Play what is asked for; exit with 1 if fewer are killed than the bound says."""
    parser = argparse.ArgumentParser(prog="scripts/mutate")
    parser.add_argument("--sample", type=int, default=300, help="how many are drawn; 0: all (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: 1)")
    parser.add_argument("--modules", default="", help="comma-separated (default: the core and its stores)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--mutant", default="", metavar="NAME", help="play this one alone")
    parser.add_argument("--verbose", action="store_true", help="print killed mutants too")
    asked = parser.parse_args()
    modules = tuple(asked.modules.split(",")) if asked.modules else MODULES
    found = [each for each in all_mutants(modules) if asked.mutant in {"", each.name}]
    if not found:
        sys.exit("mutate: there is no such mutant")
    if 0 < asked.sample < len(found):
        found = random.Random(asked.seed).sample(found, asked.sample)
    began = time.monotonic()
    reach = runner.measure(modules, suite.checks())
    print(
        f"{len(found)} mutants, {len(reach.seconds)} checks, measured in {time.monotonic() - began:.0f} s", flush=True
    )
    survived = 0
    for outcome in runner.run(found, reach, jobs=asked.jobs):
        survived += not outcome.killed_by
        if asked.verbose or not outcome.killed_by:
            print(_line(outcome), flush=True)
    share, least = 1 - survived / len(found), tomllib.loads(_BOUNDS.read_text(encoding="utf-8"))["killed"]
    counts = f"{len(found) - survived} of {len(found)} killed, {survived} survived, {share:.1%}"
    print(f"{counts}; at least {least:.1%} wanted; {time.monotonic() - began:.0f} s")
    sys.exit(share < least)


def _line(outcome: runner.Outcome) -> str:
    mutant = outcome.mutant
    path = runner.path_of(mutant.module).relative_to(suite.ROOT)
    survived = f"survived {outcome.checks} checks" if outcome.checks else "no check reaches it"
    verdict = f"killed by {outcome.killed_by}" if outcome.killed_by else survived
    return f"{path}:{mutant.line}: {mutant.before} -> {mutant.after} [{mutant.name}] {verdict}, {outcome.seconds:.1f} s"


if __name__ == "__main__":
    main()
