"""`scripts/gpu-check`: what one GPU can show in about eight minutes, as a table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch
from gpu_check import communicator, compile_cache, elastic, faults, memory, snapshots, starts
from gpu_check.results import Options, Result
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.observe.log import configure
from agent.rehearse.cleanup import exit_on_signals

ROWS: dict[int, tuple[str, Callable[[Options], Iterator[Result]]]] = {
    1: ("two nodes on one GPU", elastic.check),
    2: ("memory after SIGKILL", memory.check),
    3: ("start to first step", starts.check),
    4: ("a new communicator in place", communicator.check),
    5: ("snapshots", snapshots.check),
    6: ("compile cache", compile_cache.check),
    7: ("faults of a kernel", faults.check),
}
ORDER = (1, 7, 2, 4, 5, 3, 6)
"""What matters most comes first, in case the time runs out."""
WITHOUT_GPU = (1, 3, 7)
"""The rows that the smoke size runs on the CPU."""

console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def main() -> None:
    """Run the rows, print the table, and write it to a file. The exit code is 1 if a row is not fine."""
    asked = _parse(sys.argv[1:])
    exit_on_signals()
    configure("gpu-check")
    if asked.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        sys.exit("gpu-check: torch finds no GPU; run it on a machine that has one (--smoke needs none)")
    asked.out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-gpu-check-"))
    options = Options(device="cpu" if asked.smoke else "cuda", is_smoke=asked.smoke, directory=directory)
    machine = "no GPU" if asked.smoke else torch.cuda.get_device_name()
    title = f"{machine}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    console.print(f"{title}; outputs, logs and checkpoints: {directory}", soft_wrap=True)
    results: list[tuple[int, Result]] = []
    for row in (row for row in ORDER if row in asked.rows):
        for result in _run(row, options):
            console.print(f"row {row}: {result.what}: {result.figures}", soft_wrap=True)
            results.append((row, result))
            _write(asked.out, title, results)
    console.print(_table(title, results))
    sys.exit(not all(result.is_fine for _, result in results))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--rows", type=_rows, help="for example 1,2,7 [default: all]")
    parser.add_argument("--smoke", action="store_true", help="rows 1, 3 and 7 at the smallest size, on the CPU")
    parser.add_argument("--out", type=Path, default=Path(".cache/gpu-check"), help="directory for the table")
    asked = parser.parse_args(argv)
    asked.rows = asked.rows or (WITHOUT_GPU if asked.smoke else ORDER)
    if asked.smoke and not set(asked.rows) <= set(WITHOUT_GPU):
        parser.error(f"--smoke has the rows {WITHOUT_GPU}, not {asked.rows}")
    return asked


def _rows(text: str) -> tuple[int, ...]:
    rows = tuple(int(part) for part in text.split(","))
    if not set(rows) <= set(ROWS):
        raise argparse.ArgumentTypeError(f"there are the rows {', '.join(map(str, ROWS))}, not {text}")
    return rows


def _run(row: int, options: Options) -> Iterator[Result]:
    name, check = ROWS[row]
    began = time.monotonic()
    try:
        yield from check(options)
    except Exception as error:  # noqa: BLE001 - the other rows can still be checked
        yield Result(what=name, figures=f"failed after {time.monotonic() - began:.0f} s: {error}", is_fine=False)


def _table(title: str, results: list[tuple[int, Result]]) -> Table:
    table = Table("row", "what", "result", title=title)
    for row, result in results:
        figures = result.figures if result.is_fine else f"NOT FINE: {result.figures}"
        table.add_row(str(row), Text(result.what), Text(figures))
    return table


def _write(out: Path, title: str, results: list[tuple[int, Result]]) -> None:
    lines = [f"{title}\n", "| row | what | result |", "| --- | --- | --- |"]
    lines += [
        f"| {row} | {result.what} | {'' if result.is_fine else 'NOT FINE: '}{result.figures} |"
        for row, result in results
    ]
    (out / "gpu-check.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = [{"row": row, **asdict(result)} for row, result in results]
    (out / "gpu-check.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
