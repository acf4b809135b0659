"""One end of a transport: `ps_end.py serve TRANSPORT PORT DIM ROWS`, or `ask` with a worker's number after it.

A server prints "ready" and runs until its input ends. A client reads lines of JSON, `[what, rows, times, unmeasured]`,
and answers each with the monotonic times of its requests, `[[began, seconds], ...]`.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from benchmarks.ps_transports import PEERS, SERVE, Peer

_DIFFERENT = 16


def main() -> None:
    """Run as a server or a client."""
    torch.set_num_threads(1)
    part, transport, *numbers = sys.argv[1:]
    port, dim, rows, *worker = map(int, numbers)
    if part == "serve":
        held = SERVE[transport](port, dim, rows)
        tell("ready")
        sys.stdin.read()
        del held
        return
    peer = PEERS[transport](port, dim, *worker)
    tell("ready")
    asking = Asking(peer, dim, rows, worker[0])
    for line in sys.stdin:
        tell(json.dumps(asking.times(*json.loads(line))))


class Asking:
    """Sends requests with different ids."""

    def __init__(self, peer: Peer, dim: int, rows: int, worker: int) -> None:
        self._peer = peer
        self._dim = dim
        self._rows = rows
        self._chance = torch.Generator().manual_seed(worker)
        self._batches: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def times(self, what: str, rows: int, times: int, unmeasured: int) -> list[tuple[float, float]]:
        """Return the start and the duration of each request, in seconds."""
        if rows not in self._batches:
            self._batches[rows] = [self._batch(rows) for _ in range(_DIFFERENT)]
        found = []
        for number in range(unmeasured + times):
            ids, values = self._batches[rows][number % _DIFFERENT]
            began = time.monotonic()
            if what == "pull":
                self._peer.pull(ids)
            else:
                self._peer.push(ids, values)
            found.append((began, time.monotonic() - began))
        return found[unmeasured:]

    def _batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randperm(self._rows, generator=self._chance)[:rows].sort().values
        return ids, torch.randn(rows, self._dim, generator=self._chance)


def tell(line: str) -> None:
    """Write a line to the parent process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
