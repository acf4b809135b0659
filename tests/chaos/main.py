"""`scripts/chaos` and `scripts/soak`: what is broken, how often, and what came of it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from chaos import table
from chaos.checks import Reference, finish
from chaos.cluster import Cluster
from chaos.fault import Fault
from chaos.faults import FAULTS
from chaos.play import BREACHES, Outcome, play
from rich.console import Console

from agent.rehearse.cleanup import exit_on_signals

console = Console(highlight=False)

_OUT = Path(".cache/chaos")
_LONG = frozenset({"etcd-stopped", "etcd-two-killed"})
"""They last so long that a soak has few of them."""


def main() -> None:
    """Do what is asked for; the exit code is 1 if anything went wrong."""
    asked = _parse()
    exit_on_signals()
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="elastic-agent-chaos-") as directory:
        reference = Reference(Path(directory))
        outcomes: list[Outcome] = []
        began = time.time()
        try:
            for outcome in asked.play(asked, Path(directory), reference):
                outcomes.append(outcome)
                _tell(outcome)
                _write(asked.out, outcomes)
        finally:
            _show(asked, outcomes, time.time() - began)
    sys.exit(any(not outcome.is_right or outcome.late for outcome in outcomes))


def _parse() -> argparse.Namespace:
    words = sys.argv[1:]
    return _parse_soak(words[1:]) if words[:1] == ["soak"] else _parse_each(words)


def _parse_each(words: Sequence[str]) -> argparse.Namespace:
    known = ", ".join(FAULTS)
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="Each fault on a cluster of its own.")
    parser.set_defaults(play=_play_each)
    parser.add_argument("names", nargs="*", metavar="FAULT", help=f"of {known}")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--repeat", type=_count, default=1, metavar="N", help="so often [default: 1]")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="of the first time; the next has the next")
    _add_out(parser)
    asked = parser.parse_args(words)
    if asked.all == bool(asked.names) or not FAULTS.keys() >= set(asked.names):
        parser.error(f"wanted --all, or some of {known}")
    asked.faults = asked.repeat * len(asked.names or FAULTS)
    return asked


def _parse_soak(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Many faults on one cluster, drawn by chance.")
    parser.set_defaults(play=_soak)
    parser.add_argument("--faults", type=_count, default=50, metavar="N", help="[default: 50]")
    parser.add_argument("--every", type=float, default=0.0, metavar="S", help="let it train so long before each")
    parser.add_argument("--seed", type=int, default=0, metavar="K")
    _add_out(parser)
    return parser.parse_args(words)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"wanted a number from 1 on, got {text!r}")
    return int(text)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="the script does without state.run")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="DIR", help=f"for tables and logs [default: {_OUT}]")


def _play_each(asked: argparse.Namespace, directory: Path, reference: Reference) -> Iterator[Outcome]:
    chosen: Sequence[Fault] = list(FAULTS.values()) if asked.all else [FAULTS[name] for name in asked.names]
    for turn in range(asked.repeat):
        for fault in chosen:
            with Cluster(directory / f"{turn}-{fault.name}", is_plain=asked.plain) as cluster:
                outcome = play(cluster, fault, asked.seed + turn, reference)
                yield _kept(cluster, _checked(cluster, outcome, reference), asked.out)


def _soak(asked: argparse.Namespace, directory: Path, reference: Reference) -> Iterator[Outcome]:
    """One after the other; what is found wrong with the result at the end is told with the last one."""
    chance = Random(asked.seed)
    names = list(FAULTS)
    weights = [1 if name in _LONG else 5 for name in names]
    with Cluster(directory / "soak", is_plain=asked.plain) as cluster:
        for number in range(asked.faults):
            (name,) = chance.choices(names, weights)
            time.sleep(asked.every)  # the cluster trains undisturbed between two faults
            outcome = play(cluster, FAULTS[name], chance.randrange(2**32), reference)
            if number == asked.faults - 1:
                outcome = _checked(cluster, outcome, reference)
            yield _kept(cluster, outcome, asked.out)
            if not outcome.has_recovered:
                return


def _checked(cluster: Cluster, outcome: Outcome, reference: Reference) -> Outcome:
    """With what is wrong at the end of the training."""
    if not outcome.has_recovered:
        return outcome
    try:
        problems = finish(cluster, reference)
    except BREACHES as error:
        problems = [f"{type(error).__name__}: {error}"]
    return replace(outcome, problems=(*outcome.problems, *problems))


def _kept(cluster: Cluster, outcome: Outcome, out: Path) -> Outcome:
    """The same; what the cluster had to say is kept if anything went wrong, or took too long."""
    if outcome.problems or outcome.late:
        kept = out / f"{cluster.project}-{outcome.fault}-{outcome.seed}"
        shutil.copytree(cluster.directory, kept / "ledger", dirs_exist_ok=True)
        (kept / "log.txt").write_text(cluster.log_text(), encoding="utf-8")
        console.print(f"what it had to say: {kept}", soft_wrap=True)
    return outcome


def _tell(outcome: Outcome) -> None:
    pauses = ", ".join(f"{pause_s:.2f}" for pause_s in outcome.pauses_s) or "-"
    said = f"{outcome.fault:22} seed {outcome.seed:10}  pauses {pauses} s, back {outcome.back_s:.2f} s"
    said += f", {outcome.lost} steps lost, {outcome.groups} groups"
    console.print(f"{said}{''.join(f'; {each}' for each in (*outcome.late, *outcome.problems))}", soft_wrap=True)


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    found = [asdict(outcome) for outcome in outcomes]
    (out / "outcomes.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _show(asked: argparse.Namespace, outcomes: Sequence[Outcome], took_s: float) -> None:
    told = table.markdown(table.rows(outcomes))
    right = sum(outcome.is_right for outcome in outcomes)
    command = " ".join(sys.argv[1:] if sys.argv[1:2] == ["soak"] else ["chaos", *sys.argv[1:]])
    told += f"\n`scripts/{command}`, {time.strftime('%Y-%m-%d')}: {right} of {len(outcomes)} right, {took_s:.0f} s\n"
    if len(outcomes) < asked.faults:
        left = asked.faults - len(outcomes)
        told += f"\nIt ended {left} faults early; what a soak's training ends with is checked after the last one.\n"
    (asked.out / "table.md").write_text(told, encoding="utf-8")
    console.print(told, soft_wrap=True)


if __name__ == "__main__":
    main()
