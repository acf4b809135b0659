"""`scripts/bench`: reads what is asked for, measures it, and writes it down."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from benchmarks import guard, losing, machine, meeting, micro, ps_faults, ps_wire, smoke, staying, tables, turns
from benchmarks.jobs import NotStartedError
from benchmarks.launchers import LAUNCHERS, Launcher
from benchmarks.recovery import Plan, Recovery, Sample
from benchmarks.scenarios import SCENARIOS, Scenario
from rich.console import Console

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.observe.log import configure
from agent.rehearse.cleanup import exit_on_signals
from agent.store.etcd import EtcdStore

_OUT = Path(".cache/bench")
_QUICK = ("ours", "torchrun-best")
_QUICK_PATIENCE_S = 30.0

_WIDTH = 150
"""Of what is no terminal, in characters."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def main() -> None:
    """Measure."""
    asked = _parse(sys.argv[1:])
    exit_on_signals()
    configure("bench")
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.smoke:
        asked.measure(asked)
        return
    try:
        written = asked.measure(asked)
    except (NotStartedError, TimeoutError, RuntimeError) as error:
        sys.exit(f"bench: {asked.word} --smoke failed: {error}")
    smoke.require_whole(asked.word, written)


def words() -> set[str]:
    """The first words of `scripts/bench`; recovery is what it measures without one."""
    parts = next(each for each in _build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return {"recovery", *parts.choices}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _build_parser()
    asked = parser.parse_args(argv)
    if asked.smoke:
        at = argv.index(asked.word) + 1 if asked.word in argv else 0
        asked = parser.parse_args([*argv[:at], *smoke.SIZES[asked.word], *argv[at:]])
    return asked


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.set_defaults(word="recovery", measure=_measure_recovery, smoke=False)
    _add_common(parser)
    parser.add_argument("--quick", action="store_true", help="one run, against torchrun at its best, in minutes")
    parser.add_argument("--scenarios", type=_names(SCENARIOS), help=f"[default: {','.join(SCENARIOS)}]")
    parser.add_argument("--launchers", type=_names(LAUNCHERS), help=f"[default: {','.join(LAUNCHERS)}]")
    parser.add_argument("--runs", type=int, help="of each scenario and launcher [default: 20; 1 with --quick]")
    parser.add_argument("--slow_runs", type=int, default=5, help="at most, of torchrun's defaults and ft_launcher")
    parser.add_argument("--calm_s", type=float, default=3.0, help="how long a job trains before its fault")
    parser.add_argument("--setup_s", type=float, default=0.0, help="how long its script sets up [default: 0]")
    parser.add_argument("--patience_s", type=float, help="no recovery by then is none [default: 100; 30 with --quick]")
    parts = parser.add_subparsers(metavar="", title="instead of recovery")
    _add_micro(parts)
    part = parts.add_parser("lost", help="steps that a killed worker costs, by the size of the State and of a step")
    part.set_defaults(word="lost", measure=_measure_lost)
    _add_common(part)
    cases = "1:0.02,1:0.2,300:0.2,1:1,1000:1,300:0.2:sharded,300:0.2:sharded:node"
    part.add_argument(
        "--cases",
        type=_cases,
        default=cases,
        help=f"MEGABYTES:SECONDS[:sharded][:node] of a step, ... [default: {cases}]",
    )
    part.add_argument("--calm_s", type=float, default=5.0, help="how long a job trains before its fault, at least [5]")
    part.add_argument("--runs", type=int, default=10)
    part = parts.add_parser("store", help="memory of a rank that saves and restores, on a disk and in an S3 server")
    part.set_defaults(word="store", measure=_measure_storing)
    _add_common(part)
    part.add_argument("--sizes_mb", type=_numbers, default=[1000], help="of what is saved [1000]")
    part.add_argument("--runs", type=int, default=3)
    part = parts.add_parser("meet", help="N agents that form one group, beside torch's rendezvous")
    part.set_defaults(word="meet", measure=_measure_meeting)
    _add_common(part)
    part.add_argument("--agents", type=_numbers, default=[8, 32, 64, 128, 256])
    part.add_argument("--rest_s", type=float, default=10.0, help="seconds at rest once they have met [10]")
    part.add_argument("--outage_s", type=float, default=0.0, help="then etcd is frozen for so many seconds [0]")
    part.add_argument("--torch_agents", type=_numbers, default=[8, 32, 64, 128])
    part.add_argument("--runs", type=int, default=3)
    part = parts.add_parser("turns", help="what an event costs the agent that leads, by the number of nodes")
    part.set_defaults(word="turns", measure=_measure_turns)
    _add_common(part)
    part.add_argument("--nodes", type=_numbers, default=[100, 1000, 5000, 10000])
    part.add_argument("--runs", type=int, default=100, help="of each kind of event [100]")
    _add_ps(parts)
    part = parts.add_parser("guard", help="ratios within one run, against the bounds in tests/benchmarks/bounds.toml")
    part.set_defaults(word="guard", measure=_measure_guard)
    _add_common(part)
    part.add_argument("--repetitions", type=int, default=3, help="of each ratio [3]")
    part.add_argument("--ratios", type=_names({name: name for name in guard.RATIOS}), help="[default: all]")
    part.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    return parser


def _add_micro(parts: Any) -> None:  # noqa: ANN401 - its type has no public name
    part = parts.add_parser("micro", help="commit(), saving, snapshots, and the agent's own cost")
    part.set_defaults(word="micro", measure=_measure_micro)
    _add_common(part)
    part.add_argument("--sizes_mb", type=_numbers, default=[1, 100, 1000], help="of what is saved [1,100,1000]")
    snapshots_mb = [1, 3, 10, 30, 100, 300, 1000]
    part.add_argument("--snapshots_mb", type=_numbers, default=snapshots_mb, help="of what is put into memory")
    part.add_argument("--snapshots", type=int, default=30, help="of each size [30]")
    sharded = "300:0.2,300:1,1000:1"
    part.add_argument("--sharded", type=_cases, default=sharded, help=f"MEGABYTES:SECONDS of a step, ... [{sharded}]")
    part.add_argument("--sharded_steps", type=int, default=100, help="of each sharded model [100]")
    part.add_argument("--idle_s", type=float, default=20.0, help="how long agents are watched that do nothing [20]")
    part.add_argument("--runs", type=int, default=5)


def _add_ps(parts: Any) -> None:  # noqa: ANN401 - its type has no public name
    part = parts.add_parser("ps", help="parameter servers: their wire beside torch's RPC and gRPC, their rate, faults")
    part.set_defaults(word="ps", measure=_measure_ps)
    _add_common(part)
    part.add_argument("--quick", action="store_true", help="a few of each, in some minutes")
    part.add_argument("--parts", type=_names(_PS_PARTS), help=f"[default: {','.join(_PS_PARTS)}]")
    part.add_argument("--sizes_kb", type=_numbers, help="of rows [default: 1,16,256,1024,4096; 1,256 with --quick]")
    part.add_argument("--runs", type=int, help="requests of each kind [default: 1000; 20 with --quick]")
    kinds = _names({kind: kind for kind in ps_faults.KILLS})
    part.add_argument(
        "--faults", type=kinds, default=[*ps_faults.KILLS], help=f"[default: {','.join(ps_faults.KILLS)}]"
    )
    part.add_argument("--kills", type=int, help="of each kind [default: 10; 1 with --quick]")
    part.add_argument("--dims", type=_numbers, default=[16, 64], help="of rows whose rate is measured [16,64]")
    part.add_argument("--calm_s", type=float, default=2.0, help="how long a job trains before each kill [2]")
    part.add_argument("--around_s", type=float, default=5.0, help="how long steps are watched before and after [5]")
    part.add_argument("--spare", type=int, default=1, help="servers and workers beyond the least number [1]")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=_OUT, metavar="DIR", help=f"[default: {_OUT}]")
    parser.add_argument(
        "--smoke",
        action="store_true",
        default=argparse.SUPPRESS,  # it may stand before a word and after it
        help="the smallest size, in seconds: shows that all of it runs; fails if a figure is missing",
    )


def _names(known: dict[str, Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are {', '.join(known)}")
        return [known[name] for name in text.split(",")]

    return parse


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _cases(text: str) -> list[losing.Case]:
    return [losing.parse_case(part) for part in text.split(",") if part]


def _measure_recovery(asked: argparse.Namespace) -> list[Path]:
    plan = _plan(asked)
    described = machine.describe()
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-bench-"))
    console.print(f"outputs of jobs that fail stay in {directory}", soft_wrap=True)
    samples: list[Sample] = []
    written = asked.out / "recovery.json"
    try:
        with EmbeddedEtcd(port=0) as etcd, closing(EtcdStore([etcd.endpoint])) as store:
            for sample in Recovery(plan, directory, store, etcd.endpoint).samples():
                samples.append(sample)
                _tell(sample)
                if not sample.note:
                    shutil.rmtree(directory / sample.directory)
                _write(written, described, patience_s=plan.patience_s, samples=map(asdict, samples))
    finally:  # what was measured until it was ended counts too
        _show_recovery(asked.out, samples, described, plan.patience_s)
    return [written]


def _plan(asked: argparse.Namespace) -> Plan:
    wanted: list[Launcher] = asked.launchers or [
        each for each in LAUNCHERS.values() if not asked.quick or each.name in _QUICK
    ]
    for launcher in wanted:
        if not launcher.is_there:
            console.print(f"skipped: {launcher.title} ({launcher.program} is not installed)")
    scenarios: list[Scenario] = asked.scenarios or list(SCENARIOS.values())
    return Plan(
        scenarios=scenarios,
        launchers=[launcher for launcher in wanted if launcher.is_there],
        runs=asked.runs or (1 if asked.quick else 20),
        slow_runs=asked.slow_runs,
        calm_s=asked.calm_s,
        patience_s=asked.patience_s or (_QUICK_PATIENCE_S if asked.quick else 100.0),
        setup_s=asked.setup_s,
    )


def _tell(sample: Sample) -> None:
    if sample.seconds is None:
        result = sample.note if sample.has_started else f"NOT STARTED: {sample.note}"
    else:
        result = f"{sample.seconds:.2f} s, pause {sample.pause_s:.2f} s, {sample.steps_lost} steps lost"
        result += "" if sample.back_pause_s is None else f"; back with a pause of {sample.back_pause_s:.2f} s"
    console.print(f"{sample.run + 1:3} {sample.scenario:10} {sample.launcher:13} {result}", soft_wrap=True)


def _show_recovery(out: Path, samples: Sequence[Sample], described: dict[str, Any], patience_s: float) -> None:
    summaries = tables.summarize(samples)
    _show(out / "recovery.md", "recovery", tables.HEADINGS, tables.rows(summaries), described)
    for sample in samples:
        if not sample.has_started:
            console.print(f"not counted: {sample.scenario}, {sample.launcher}: {sample.note}", soft_wrap=True)
    try:
        from benchmarks import chart  # noqa: PLC0415 - matplotlib is an extra
    except ModuleNotFoundError:
        console.print("no chart: matplotlib is not installed")
    else:
        chart.draw(summaries, patience_s, out / "recovery.png")


def _measure_micro(asked: argparse.Namespace) -> list[Path]:
    described = machine.describe()
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-bench-"))
    found = micro.measure(
        directory,
        micro.Sizes(asked.sizes_mb, asked.snapshots_mb, asked.sharded),
        snapshots=asked.snapshots,
        sharded_steps=asked.sharded_steps,
        idle_s=asked.idle_s,
        runs=asked.runs,
    )
    shutil.rmtree(directory)
    written = _write(asked.out / "micro.json", described, **found)
    _show(asked.out / "micro.md", "costs", micro.HEADINGS, micro.rows(found), described)
    return [written]


def _measure_lost(asked: argparse.Namespace) -> list[Path]:
    described = machine.describe()
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-bench-"))
    console.print(f"outputs of jobs that fail stay in {directory}", soft_wrap=True)
    found: dict[losing.Case, list[Sample]] = {case: [] for case in asked.cases}
    for case, sample in losing.measure(directory, asked.cases, asked.calm_s, asked.runs):
        console.print(f"{case}: {sample.steps_lost} steps lost, {sample.seconds or 0:.2f} s {sample.note}")
        found[case].append(sample)
    cases = [{**asdict(case), "samples": list(map(asdict, samples))} for case, samples in found.items()]
    written = _write(asked.out / "lost.json", described, cases=cases)
    _show(asked.out / "lost.md", "steps lost", losing.HEADINGS, losing.rows(found), described)
    return [written]


def _measure_storing(asked: argparse.Namespace) -> list[Path]:
    from benchmarks import storing  # noqa: PLC0415 - the S3 server takes a while to import

    described = machine.describe()
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-bench-"))
    found = storing.measure(directory, asked.sizes_mb, asked.runs)
    shutil.rmtree(directory)
    written = _write(asked.out / "store.json", described, runs=found)
    _show(asked.out / "store.md", "memory of saves", micro.HEADINGS, storing.rows(found), described)
    return [written]


def _measure_meeting(asked: argparse.Namespace) -> list[Path]:
    described = machine.describe()
    found, stays = meeting.measure(asked.agents, asked.torch_agents, asked.runs, asked.rest_s, asked.outage_s)
    written = _write(asked.out / "meet.json", described, meetings=found, stays=map(asdict, stays))
    _show(asked.out / "meet.md", "meeting", meeting.HEADINGS, meeting.rows(found), described)
    _show(asked.out / "stay.md", "agents that have met", staying.HEADINGS, staying.rows(stays), described)
    return [written]


def _measure_turns(asked: argparse.Namespace) -> list[Path]:
    described = machine.describe()
    found = turns.measure(asked.nodes, asked.runs)
    written = _write(asked.out / "turns.json", described, turns=map(asdict, found))
    _show(asked.out / "turns.md", "turns of the leader", turns.HEADINGS, turns.rows(found), described)
    return [written]


def _measure_ps(asked: argparse.Namespace) -> list[Path]:
    return [measure(asked, machine.describe()) for measure in asked.parts or _PS_PARTS.values()]


def _measure_ps_wire(asked: argparse.Namespace, described: dict[str, Any]) -> Path:
    sizes_kb = asked.sizes_kb or ([1, 256] if asked.quick else [1, 16, 256, 1024, 4096])
    found = ps_wire.measure_wire(sizes_kb, asked.runs or (20 if asked.quick else 1000))
    written = _write(asked.out / "ps_wire.json", described, requests=found)
    _show(asked.out / "ps_wire.md", "requests", ps_wire.HEADINGS, ps_wire.rows(found), described)
    return written


def _measure_ps_rates(asked: argparse.Namespace, described: dict[str, Any]) -> Path:
    runs, ids = asked.runs or (20 if asked.quick else 1000), 100_000 if asked.quick else 1_000_000
    found = ps_wire.measure_rates(runs, ids, asked.dims)
    written = _write(asked.out / "ps_rates.json", described, rates=found)
    _show(asked.out / "ps_rates.md", "rows a second", ps_wire.RATE_HEADINGS, ps_wire.rate_rows(found), described)
    return written


def _measure_ps_faults(asked: argparse.Namespace, described: dict[str, Any]) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-bench-"))
    size = ps_faults.Size(asked.kills or (1 if asked.quick else 10), asked.calm_s, asked.around_s, asked.spare)
    found = ps_faults.measure(directory, asked.faults, size)
    shutil.rmtree(directory)
    written = _write(asked.out / "ps_faults.json", described, **found)
    _show(asked.out / "ps_servers.md", "servers killed", ps_faults.HEADINGS, ps_faults.rows(found), described)
    if "worker" in found:
        cells = ps_faults.worker_rows(found["worker"])
        _show(asked.out / "ps_workers.md", "workers killed", ps_faults.WORKER_HEADINGS, cells, described)
    return written


_PS_PARTS = {"wire": _measure_ps_wire, "rates": _measure_ps_rates, "faults": _measure_ps_faults}


def _measure_guard(asked: argparse.Namespace) -> list[Path]:
    described = machine.describe()
    bounds = guard.read_bounds()
    names = asked.ratios or list(guard.RATIOS)
    measured = guard.measure(names, {} if asked.smoke else bounds, asked.repetitions)
    verdicts = guard.judge({name: each for name, each in bounds.items() if name in names or not asked.ratios}, measured)
    written = _write(asked.out / "guard.json", described, verdicts=map(asdict, verdicts))
    if asked.json:
        sys.stdout.write(written.read_text(encoding="utf-8"))
    else:
        _show(asked.out / "guard.md", "guard", guard.HEADINGS, guard.rows(verdicts), described)
    failed = [f"{each.name} {each.problem}" for each in verdicts if each.problem]
    if failed and not asked.smoke:
        sys.exit(f"bench: guard: {'; '.join(failed)}")
    return [written]


def _write(path: Path, described: dict[str, Any], **found: object) -> Path:
    content = msgspec.json.encode({"machine": described, **found}, enc_hook=list)
    path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    return path


def _show(
    path: Path, title: str, headings: Sequence[str], cells: Iterable[Sequence[str]], described: dict[str, Any]
) -> None:
    """Print a table, and write it for documents."""
    listed = list(cells)
    console.print(tables.text(headings, listed, title))
    console.print(machine.sentence(described), soft_wrap=True)
    path.write_text(f"{tables.markdown(headings, listed)}\n{machine.sentence(described)}\n", encoding="utf-8")
    console.print(f"all values: {path.with_suffix('.json')}; for documents: {path}")


if __name__ == "__main__":
    sys.exit(main())
