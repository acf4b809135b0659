"""Simulates random clusters, or replays an incident, and prints a digest of the trace. Run by `scripts/simulate`."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from simulation import roles
from simulation.random_clusters import Size, play
from simulation.replay import read, replay

from agent.observe.messages import describe


def main() -> None:
    """Run the simulation that the arguments select."""
    parser = argparse.ArgumentParser(prog="scripts/simulate")
    parser.add_argument("--clusters", type=int, default=10000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=5, metavar="N", help="of each cluster [default: 5]")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="a file of elastic-agent incident export")
    parser.add_argument("--roles", action="store_true", help="parameter-server jobs")
    asked = parser.parse_args()
    if asked.roles:
        _play_roles(asked)
    elif asked.replay is not None:
        _replay(asked.replay)
    else:
        _play_random(asked)


def _replay(path: Path) -> None:
    """Replay an incident; print the scenario and its trace. Fails if the outcome differs from the recorded one."""
    try:
        situation = read(path)
    except (OSError, ValueError) as error:
        sys.exit(f"simulate: {path} is not an exported incident: {error}")
    played = replay(situation)
    log = "\n".join(played.log)
    print(hashlib.blake2b(log.encode(), digest_size=16).hexdigest())
    print("\n".join(["# A scenario:", *played.story, "", "# What happened:", log, ""]), file=sys.stderr)
    print(f"Same outcome: {played.group.cause}: {describe(played.group.reason)}", file=sys.stderr)


def _play_roles(asked: argparse.Namespace) -> None:
    """Simulate parameter-server jobs with consecutive seeds. A failure ends the run, and names its seed."""
    digest, happened, began = hashlib.blake2b(digest_size=16), 0, time.monotonic()
    for seed in range(asked.first, asked.first + asked.clusters):
        world = roles.play(seed, 2 * asked.steps)
        digest.update(world.digest().encode())
        happened += world.events
    took_s = time.monotonic() - began
    print(digest.hexdigest())
    print(f"{asked.clusters} jobs, {happened} events: {happened / took_s:.0f} events a second", file=sys.stderr)


def _play_random(asked: argparse.Namespace) -> None:
    """Simulate clusters with consecutive seeds. A failure ends the run, and names its seed and scenario."""
    digest, happened, began = hashlib.blake2b(digest_size=16), 0, time.monotonic()
    size = Size() if asked.nodes == len(Size().names) else Size.of(asked.nodes)
    for seed in range(asked.first, asked.first + asked.clusters):
        cluster = play(seed, steps=asked.steps, is_traced=True, size=size)
        digest.update(cluster.digest.encode())
        happened += cluster.steps
    took_s = time.monotonic() - began
    print(digest.hexdigest())
    rates = f"{asked.clusters * asked.steps / took_s:.0f} steps and {happened / took_s:.0f} events a second"
    print(f"{asked.clusters} clusters of {asked.steps} steps, {happened} events: {rates}", file=sys.stderr)


if __name__ == "__main__":
    main()
