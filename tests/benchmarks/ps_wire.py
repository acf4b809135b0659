"""Measure the time of a pull and a push, compared with torch's RPC and gRPC, and the rows per second of a server.

Each transport has two processes of its own, which are stopped while it is not their turn, because some poll busily. In
each turn each transport gets a few requests, one at a time, so that other load of the machine affects all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.nodes import free_port

_END = Path(__file__).with_name("ps_end.py")
_DIM = 64
_ROW_BYTES = 4 * _DIM
_ROWS = 100_000
_ROWS_AT_ONCE = 10
_WARM = 30
_UNMEASURED = 2
"""Requests of a turn that are not measured, since they find the caches of another transport."""
_BATCH = 4096
_QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Suppresses warnings of torch's RPC about itself and about each process that exits."""
_TITLES = {
    "ours": "elastic-agent",
    "torch-rpc": "torch RPC",
    "torch-rpc-shm": "torch RPC, shared memory",
    "grpc": "gRPC",
}
TRANSPORTS = tuple(_TITLES)

_SHARES = (10, 50, 99)
HEADINGS = ("what", "of", "by", "n", *(f"p{share} ms" for share in _SHARES), *(f"p{share} ratio" for share in _SHARES))
RATE_HEADINGS = ("what", "dim", "workers", "n", "rows a second", "median ms", "p99 ms")


class Pair:
    """A server of one transport and its workers. Leaving the context ends them."""

    def __init__(self, transport: str, dim: int, rows: int, workers: int = 1) -> None:
        self._stack = ExitStack()
        self._ends: list[subprocess.Popen[str]] = []
        port = free_port()
        where = [transport, str(port), str(dim), str(rows)]
        with self._stack:
            self._start("serve", *where, waits=not transport.startswith("torch"))
            self._asking = [self._start("ask", *where, str(worker)) for worker in range(workers)]
            self._signal(signal.SIGSTOP)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        """All processes are ready."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, *arguments: str, waits: bool = True) -> subprocess.Popen[str]:
        argv = [sys.executable, str(_END), *arguments]
        environ = {**os.environ, **_QUIET}
        end = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)
        self._ends.append(end)
        self._stack.enter_context(end)
        self._stack.callback(end.kill)
        if waits:  # ends of torch's RPC wait for each other
            assert _line(end) == "ready\n"
        return end

    def ask(self, what: str, rows: int, times: int, unmeasured: int = _UNMEASURED) -> list[list[tuple[float, float]]]:
        """Let all workers send so many requests at once; return start and duration of each request, by worker."""
        self._signal(signal.SIGCONT)
        for end in self._asking:
            assert end.stdin is not None
            end.stdin.write(json.dumps([what, rows, times, unmeasured]) + "\n")
            end.stdin.flush()
        answers = [json.loads(_line(end)) for end in self._asking]
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: int) -> None:
        for end in self._ends:
            end.send_signal(number)


def _line(end: subprocess.Popen[str]) -> str:
    assert end.stdout is not None
    line = end.stdout.readline()
    if not line:
        raise RuntimeError(f"{end.args!r} has ended")
    return line


def measure_wire(sizes_kb: Sequence[int], runs: int, transports: Sequence[str] = TRANSPORTS) -> list[dict[str, Any]]:
    """Return the duration of each request, in seconds."""
    found = []
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair(name, _DIM, _ROWS)) for name in transports}
        for size_kb in sizes_kb:
            rows = size_kb * 1024 // _ROW_BYTES
            for what in ("pull", "push"):
                seconds: dict[str, list[float]] = {name: [] for name in transports}
                for pair in pairs.values():
                    pair.ask(what, rows, 0, _WARM)
                while len(seconds[transports[0]]) < runs:
                    for name, pair in pairs.items():
                        [asked] = pair.ask(what, rows, min(_ROWS_AT_ONCE, runs))
                        seconds[name] += [took_s for _, took_s in asked]
                found += [
                    {"what": what, "kb": size_kb, "by": name, "seconds": took_s} for name, took_s in seconds.items()
                ]
    return found


def measure_rates(runs: int, ids: int, dims: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows per second of one server with so many ids, by row length, with one worker and with two."""
    found = []
    for dim, workers in itertools.product(dims, (1, 2)):
        with Pair("ours", dim, ids, workers) as pair:
            for what in ("pull", "push"):
                pair.ask(what, _BATCH, 0, _WARM)
                found.append({"what": what, "dim": dim, "workers": workers, **_rate(pair.ask(what, _BATCH, runs))})
    return found


def _rate(asked: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return the rate during the time in which all workers send requests."""
    begin = max(one[0][0] for one in asked)
    end = min(sum(one[-1]) for one in asked)
    seconds = [took_s for one in asked for began, took_s in one if begin <= began and began + took_s <= end]
    if not seconds:
        raise RuntimeError("there is no time in which all workers sent requests: give more --runs")
    return {"rows_per_s": len(seconds) * _BATCH / (end - begin), "seconds": seconds}


def percentile(values: Sequence[float], share: int) -> float:
    """Return the smallest value that so many percent of the values do not exceed."""
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table with `HEADINGS`."""
    ours = {(each["what"], each["kb"]): each["seconds"] for each in found if each["by"] == "ours"}
    return [_row(each, ours[each["what"], each["kb"]]) for each in found]


def _row(each: Mapping[str, Any], ours: Sequence[float]) -> tuple[str, ...]:
    seconds = each["seconds"]
    figures = [percentile(seconds, share) for share in _SHARES]
    ratios = [figure / percentile(ours, share) for figure, share in zip(figures, _SHARES, strict=True)]
    return (
        each["what"],
        f"{each['kb']} KB",
        _TITLES[each["by"]],
        str(len(seconds)),
        *(f"{figure * 1e3:.3f}" for figure in figures),
        *("" if seconds is ours else f"{ratio:.2f}" for ratio in ratios),
    )


def rate_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table with `RATE_HEADINGS`."""
    return [
        (
            each["what"],
            str(each["dim"]),
            str(each["workers"]),
            str(len(each["seconds"])),
            f"{each['rows_per_s']:,.0f}",
            f"{statistics.median(each['seconds']) * 1e3:.2f}",
            f"{percentile(each['seconds'], 99) * 1e3:.2f}",
        )
        for each in found
    ]
