"""Plays random clusters, or an exported incident; prints a digest of all that happened. See `scripts/simulate`."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from simulation import roles
from simulation.random_clusters import play
from simulation.replay import read, replay


def main() -> None:
    """Play what is asked for."""
    parser = argparse.ArgumentParser(prog="scripts/simulate")
    parser.add_argument("--clusters", type=int, default=10000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="of elastic-agent incident export")
    parser.add_argument("--roles", action="store_true", help="parameter-server jobs")
    asked = parser.parse_args()
    if asked.roles:
        _play_roles(asked)
    elif asked.replay is not None:
        _replay(asked.replay)
    else:
        _play_random(asked)


def _replay(path: Path) -> None:
    """Play an incident; say by which scenario, and what happened. If something else came of it, that ends it."""
    try:
        situation = read(path)
    except (OSError, ValueError) as error:
        sys.exit(f"simulate: {path} is no exported incident: {error}")
    played = replay(situation)
    log = "\n".join(played.log)
    print(hashlib.blake2b(log.encode(), digest_size=16).hexdigest())
    print("\n".join(["# A scenario:", *played.story, "", "# What happened:", log, ""]), file=sys.stderr)
    print(f"The same came of it: {played.group.cause}: {played.group.reason}", file=sys.stderr)


def _play_roles(asked: argparse.Namespace) -> None:
    """Play so many parameter-server jobs, from the first seed on. A failure ends it with its seed."""
    digest, happened, began = hashlib.blake2b(digest_size=16), 0, time.monotonic()
    for seed in range(asked.first, asked.first + asked.clusters):
        world = roles.play(seed, 2 * asked.steps)
        digest.update(world.digest().encode())
        happened += world.events
    took_s = time.monotonic() - began
    print(digest.hexdigest())
    print(f"{asked.clusters} jobs, {happened} events: {happened / took_s:.0f} events a second", file=sys.stderr)


def _play_random(asked: argparse.Namespace) -> None:
    """Play so many clusters, from the first seed on. A failure ends it with its seed and story."""
    digest, happened, began = hashlib.blake2b(digest_size=16), 0, time.monotonic()
    for seed in range(asked.first, asked.first + asked.clusters):
        cluster = play(seed, steps=asked.steps, is_traced=True)
        digest.update(cluster.digest.encode())
        happened += cluster.steps
    took_s = time.monotonic() - began
    print(digest.hexdigest())
    rates = f"{asked.clusters * asked.steps / took_s:.0f} steps and {happened / took_s:.0f} events a second"
    print(f"{asked.clusters} clusters of {asked.steps} steps, {happened} events: {rates}", file=sys.stderr)


if __name__ == "__main__":
    main()
