"""Plays random clusters; prints a digest of all that happened, and how fast it was. See `scripts/simulate`."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time

from simulation.random_clusters import play


def main() -> None:
    """Play so many clusters, from the first seed on. A failure ends it with its seed and story."""
    parser = argparse.ArgumentParser(prog="scripts/simulate")
    parser.add_argument("--clusters", type=int, default=10000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    asked = parser.parse_args()
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
