"""The agent's standbys: when they become ranks, when they must not, and that none of their processes is left."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from structlog.testing import capture_logs
from waiting import has_ended, wait_for

from agent.core.events import Event, InventoryChanged, StandbyChanged, WorkerExited, WorkersGone
from agent.rehearse.cluster import LocalNode
from agent.workers import standbys
from agent.workers.launch_plan import Launch, RankCommand, StandbyCommand, StandbyPlan
from agent.workers.process import RankProcess
from agent.workers.snapshot_store import PieceSource, SnapshotStore
from agent.workers.worker_group import WorkerGroup
from trainer_runtime import contract
from trainer_runtime.standby import Imports

if TYPE_CHECKING:
    from conftest import Job

DEADLINE_S = 60
WARM_WITHIN_S = 240
"""Torch is imported beside ranks that train, with a fraction of their CPU share."""
SHOW = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(),
    "rank": os.environ.get("RANK"),
    "mine": os.environ.get("MINE"),
    "argv": sys.argv[1:],
    "oom": int(open("/proc/self/oom_score_adj").read()),
    "standby": [name for name in os.environ if "STANDBY" in name],
    "decimal": "decimal" in sys.modules,
}), flush=True)
"""
WAIT = "sys.stdin.close(); open('go').read()\n"


class Bench:
    """Local workers with standbys of one script, and their events.

    Standbys do not import torch, which takes seconds.
    """

    def __init__(self, tmp: Path, code: str = SHOW, ranks: int = 1, stdin: str | None = os.devnull, **env: str) -> None:
        self.tmp = tmp
        self.script = tmp / "script.py"
        self.script.write_text(code)
        self.env = {"PATH": os.environ["PATH"], "MINE": "x", **env}
        self.argv = (sys.executable, "-u", str(self.script), "one", "two")
        self.told: list[StandbyChanged] = []
        self.events: queue.Queue[Event] = queue.Queue()
        commands = tuple(StandbyCommand(rank, self.argv, self.env, tmp, stdin=stdin) for rank in range(ranks))
        self.workers = WorkerGroup(self._post, standbys=StandbyPlan("learned", commands))

    def _post(self, event: Event) -> None:
        if isinstance(event, StandbyChanged):
            self.told.append(event)
        else:
            self.events.put(event)

    def command(self, number: int, rank: int = 0, **changed: object) -> RankCommand:
        made = {
            "local_rank": rank,
            "rank": rank + 6,
            "argv": self.argv,
            "env": {**self.env, "RANK": str(rank + 6)},
            "cwd": self.tmp,
            "log_path": self.log(number, rank),
            "console_prefix": None,
        }
        return RankCommand(**made | changed)  # type: ignore[arg-type]

    def log(self, number: int, rank: int = 0) -> Path:
        return self.tmp / f"{number}-{rank}.log"

    def start(self, number: int, ranks: int = 1, **changed: object) -> None:
        self.workers.start(Launch(number, tuple(self.command(number, rank, **changed) for rank in range(ranks))))

    def end(self, ranks: int = 1) -> list[WorkerExited]:
        """Wait for the end of the group."""
        exits = [self.events.get(timeout=DEADLINE_S) for _ in range(ranks)]
        assert isinstance(self.events.get(timeout=DEADLINE_S), WorkersGone)
        return [event for event in exits if isinstance(event, WorkerExited)]

    def run(self, number: int, **changed: object) -> dict[str, object]:
        """Run a group of one rank that prints its environment."""
        self.start(number, **changed)
        (exited,) = self.end()
        assert exited.exit_code == 0, exited
        shown: dict[str, object] = json.loads(self.log(number).read_text().splitlines()[-1])
        return shown

    def wait_reported(self, text: str) -> StandbyChanged:
        wait_for(lambda: any(text in told.summary for told in self.told), f"{text!r}; there is {self.told}", DEADLINE_S)
        return next(told for told in reversed(self.told) if text in told.summary)

    def standby(self, rank: int = 0) -> int:
        """Return the process id of a warm standby."""
        slot = self.workers._standbys._slots[rank]
        found: list[standbys._Standby] = []

        def is_warm() -> bool:
            standby = slot.standby  # read once: another thread may change it
            found[:] = [standby] if standby and standby.warm else []
            return bool(found)

        wait_for(is_warm, f"a warm standby; there is {self.told}", DEADLINE_S)
        return found[0].watcher.process.worker_pid


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "DEFAULT_MODULES", ("decimal",))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Create benches; all processes that they started must be gone at the end."""
    made: list[Bench] = []

    def begin(*args: str, **env: str) -> Bench:
        made.append(Bench(tmp_path, *args, **env))
        return made[-1]

    yield begin
    for bench in made:
        bench.workers.close()
    assert not processes_of(tmp_path)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install modules, given by name and code, for an interpreter that the agent takes for its own."""
    venv.create(tmp_path / "venv")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (place,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")

    def install(name: str, code: str) -> None:
        path = place / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)

    return install


def processes_of(tmp: Path) -> list[list[str]]:
    found = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    return [words for words in found if words and any(str(tmp) in word for word in words)]


def own_oom_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def test_a_warm_standby_becomes_the_rank(make: Callable[..., Bench]) -> None:
    bench = make()
    pid = bench.standby()
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 1000, "the kernel would take it first"
    assert not list(bench.tmp.glob("*.log"))
    assert bench.run(1) == {
        "pid": pid,
        "rank": "6",
        "mine": "x",
        "argv": ["one", "two"],
        "oom": min(1000, own_oom_score() + 300),
        "standby": [],
        "decimal": True,
    }
    again = bench.run(2)
    assert again["pid"] != pid, "the script had ended before another was due"
    assert again["decimal"] is False


def test_a_standby_runs_the_newest_version_of_the_script(make: Callable[..., Bench]) -> None:
    bench = make("raise SystemExit(9)")
    pid = bench.standby()
    bench.script.write_text(SHOW)
    assert bench.run(1)["pid"] == pid


def test_an_adopted_standby_is_stopped_and_reported_like_any_rank(make: Callable[..., Bench]) -> None:
    bench = make("import time; print('up', flush=True); time.sleep(1000)", ranks=2)
    pids = {bench.standby(rank) for rank in (0, 1)}
    bench.start(1, ranks=2)
    wait_for(lambda: bench.log(1, 1).exists() and "up" in bench.log(1, 1).read_text(), "the second rank")
    bench.workers.terminate(1)
    exits = bench.end(2)
    assert {(event.local_rank, event.signal) for event in exits} == {(0, signal.SIGTERM), (1, signal.SIGTERM)}
    assert all(map(has_ended, pids))


READ = "import json, os, sys; print(json.dumps([os.getpid(), sys.stdin.readline()]), flush=True)"


@pytest.fixture
def _given_a_line() -> Iterator[None]:
    """Put a line on the standard input of this process."""
    saved, (read, write) = os.dup(0), os.pipe()
    os.write(write, b"given\n")
    os.close(write)
    os.dup2(read, 0)
    yield
    os.dup2(saved, 0)
    os.close(saved)
    os.close(read)


@pytest.mark.usefixtures("_given_a_line")
def test_the_standby_that_becomes_the_reader_gets_the_agent_s_input(make: Callable[..., Bench]) -> None:
    bench = make(READ, ranks=2, stdin=None)
    pids = [bench.standby(rank) for rank in (0, 1)]
    bench.workers.start(Launch(1, (bench.command(1, 0), bench.command(1, 1, stdin=None))))
    bench.end(2)
    assert [json.loads(bench.log(1, rank).read_text()) for rank in (0, 1)] == [[pids[0], ""], [pids[1], "given\n"]]


def test_output_of_imports_is_in_the_rank_s_log(
    make: Callable[..., Bench], library: Callable[[str, str], None], tmp_path: Path
) -> None:
    library("loud", "import sys; print('loaded'); print('really', file=sys.stderr)")
    bench = make("import loud, colorsys\nprint('script')\nopen('go').read()")
    os.mkfifo(tmp_path / "go")
    bench.standby()
    bench.start(1)
    learned(bench, "loud")
    bench.standby()
    (tmp_path / "go").write_text("")
    bench.end()
    bench.start(2)
    (tmp_path / "go").write_text("")
    bench.end()
    assert sorted(bench.log(2).read_text().splitlines()) == ["loaded", "really", "script"]


def learned(bench: Bench, name: str) -> None:
    """Wait until the next standbys are started with that module."""
    slot = bench.workers._standbys._slots[0]
    wait_for(
        lambda: (standby := slot.standby) is not None and name in standby.imports.modules,
        f"a standby with {name}; it is {slot.standby and slot.standby.imports}",
        DEADLINE_S,
    )


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"argv": (sys.executable, "-u", "script.py", "other")}, "its command"),
        ({"cwd": Path("/")}, "the directory"),
        ({"env": {"MINE": "y", "PATH": os.environ["PATH"], "RANK": "6"}}, "the environment (MINE)"),
        ({"env": {"MINE": "x", "NEW": "", "PATH": os.environ["PATH"], "RANK": "6"}}, "the environment (NEW)"),
    ],
)
def test_a_standby_that_was_started_otherwise_does_not_become_the_rank(
    make: Callable[..., Bench], changed: dict[str, object], what: str
) -> None:
    bench = make()
    pid = bench.standby()
    if changed.get("argv"):
        changed["argv"] = (sys.executable, "-u", str(bench.script), "other")
    with capture_logs() as said:
        shown = bench.run(1, **changed)
    assert shown["pid"] != pid
    assert shown["decimal"] is False
    assert [line["event"] for line in said] == [f"rank 6 starts cold: {what} changed after its standby was started"]
    wait_for(lambda: has_ended(pid), "its end")


def test_a_standby_does_not_become_the_rank_after_its_directory_was_replaced(make: Callable[..., Bench]) -> None:
    """The standby is in the old directory, which may have another script, or none."""
    bench = make()
    pid = bench.standby()
    bench.tmp.rename(bench.tmp.with_name("away"))
    shutil.copytree(bench.tmp.with_name("away"), bench.tmp)
    with capture_logs() as said:
        assert bench.run(1)["pid"] != pid
    assert "the directory changed" in said[0]["event"]


def test_a_standby_does_not_become_the_rank_after_packages_were_installed(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    pid = bench.standby()
    monkeypatch.setattr(standbys, "installation_state", lambda: ())
    with capture_logs() as said:
        assert bench.run(1)["pid"] != pid
    assert "the Python installation changed" in said[0]["event"]


def test_a_package_that_asks_for_the_rank_is_left_out_of_the_next_standby(
    make: Callable[..., Bench],
    library: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole package is excluded, with all packages above it: one standby is lost for it, and one line is logged."""
    library("by_rank/__init__", "import os\nRANK = os.environ.get('RANK')\nfrom by_rank import a, b, c\n")
    for name in "abc":
        library(f"by_rank/{name}", "")
        library(f"leads_{name}", f"import by_rank.{name}\n")
    lines = "import by_rank, leads_a, leads_b, leads_c, fractions, colorsys; assert by_rank.RANK == '6'\n"
    bench = make(SHOW + lines + WAIT)
    os.mkfifo(tmp_path / "go")
    bench.standby()
    pool = bench.workers._standbys
    started: list[object] = []
    start = pool._start
    monkeypatch.setattr(pool, "_start", lambda slot: (started.append(slot), start(slot)))
    with capture_logs() as said:
        bench.start(1)
        learned(bench, "fractions")
        wait_for(lambda: "by_rank" in pool._blamed, "it to be found out", DEADLINE_S)
        pid = bench.standby()
        (tmp_path / "go").write_text("")
        assert bench.end()[0].exit_code == 0
    assert [each["event"].partition(": by_rank, ")[2] for each in said] == ["leads_a, leads_b and 1 more"], said
    assert len(started) == 2
    bench.start(2)
    (tmp_path / "go").write_text("")
    assert bench.end()[0].exit_code == 0, "it knows its rank"
    assert json.loads(bench.log(2).read_text())["pid"] == pid


def test_a_failed_standby_is_replaced_until_three_have_failed(make: Callable[..., Bench]) -> None:
    bench = make()
    slot = bench.workers._standbys._slots[0]
    with capture_logs() as said:
        for _ in range(3):
            pid = bench.standby()
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: has_ended(pid), "its end")  # type: ignore[misc]
            wait_for(lambda pid=pid: pid_of(slot) != pid, "its end is seen")  # type: ignore[misc]
        bench.wait_reported("none: 3 failed in a row")
    assert len(said) == 1
    assert bench.run(1)["decimal"] is False


def pid_of(slot: standbys._StandbySlot) -> int:
    standby = slot.standby
    return standby.watcher.process.worker_pid if standby else 0


def test_a_standby_whose_guardian_is_killed_is_replaced_and_leaves_no_process(make: Callable[..., Bench]) -> None:
    bench = make()
    pid = bench.standby()
    slot = bench.workers._standbys._slots[0]
    assert slot.standby
    os.kill(slot.standby.watcher.process.guardian_pid, signal.SIGKILL)
    wait_for(lambda: has_ended(pid) and pid_of(slot) not in {0, pid}, "another")
    other = bench.standby()
    assert bench.run(1)["pid"] == other


@pytest.mark.parametrize("victim", ["worker", "guardian"])
@pytest.mark.parametrize("at", [(SnapshotStore, "begin"), (RankProcess, "adopt")], ids=["its memory", "its order"])
def test_a_standby_that_dies_while_it_is_adopted_is_a_rank_that_has_ended(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, at: tuple[type, str], victim: str
) -> None:
    """Another thread closes its descriptors, whose numbers may be reused at once."""
    bench = make(SHOW, **{contract.SNAPSHOT_OVERHEAD: "1"})
    pid = bench.standby()
    slot = bench.workers._standbys._slots[0]
    assert slot.standby
    process, go_on = slot.standby.watcher.process, getattr(*at)

    def kill_and_go_on(*args: object) -> None:
        os.kill(pid if victim == "worker" else process.guardian_pid, signal.SIGKILL)
        wait_for(lambda: has_ended(process.guardian_pid), "its end")
        wait_for(lambda: process.fileno() == -1 or bench.workers._lock.locked(), "that to be seen, where it can be")
        go_on(*args)

    with monkeypatch.context() as changed:
        changed.setattr(*at, kill_and_go_on)
        bench.workers.start(Launch(1, (bench.command(1),), PieceSource("us", 1)))
    told = [bench.events.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [type(event) for event in told] == [WorkerExited, InventoryChanged, WorkersGone]
    assert isinstance(told[0], WorkerExited)
    assert (told[0].exit_code, told[0].signal) == (None, signal.SIGKILL)
    assert bench.run(2)["pid"] != pid


def test_none_is_started_while_memory_is_short(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once, however often memory is checked."""
    looks: list[int] = []

    def look() -> int:
        looks.append(400_000_000 - (len(looks) << 20))
        return looks[-1]

    monkeypatch.setattr(standbys, "free_memory", look)
    monkeypatch.setattr(standbys, "_RETRY_S", 0.05)
    bench = make()
    wait_for(lambda: len(looks) > 5, "looks", DEADLINE_S)
    told = [each for each in bench.told if "memory" in each.summary]
    assert told == [StandbyChanged("none: memory is short (400 MB free, 1.3 GB wanted)", is_warming=False)]
    monkeypatch.setattr(standbys, "free_memory", lambda: 1 << 40)
    pid = bench.standby()
    assert "1 of 1 warm, " in bench.wait_reported("warm, ").summary
    assert bench.run(1)["pid"] == pid


@pytest.fixture
def gate(library: Callable[[str, str], None], tmp_path: Path) -> Path:
    """A file that a module named `gated` reads during its import. The import ends once the file is written."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    library("gated", f"open({str(gate)!r}).read()\n")
    return gate


def teach(bench: Bench, *modules: str) -> None:
    """Act as if a script had imported these modules by its first step."""
    pool = bench.workers._standbys
    bench.workers._reactor.call_soon(lambda: pool.refill(Imports(("decimal", *modules))))


def successor(bench: Bench, other_than: int = 0) -> int:
    """Return the process id of a successor that is still importing."""
    slot = bench.workers._standbys._slots[0]
    found = [0]

    def is_there() -> bool:
        standby = slot.successor
        found[0] = standby.watcher.process.worker_pid if standby else 0
        return found[0] not in {0, other_than}

    wait_for(is_there, f"a successor; there is {bench.told}", DEADLINE_S)
    return found[0]


def test_a_warm_standby_stays_until_its_successor_is_warm(make: Callable[..., Bench], gate: Path) -> None:
    bench = make()
    first = bench.standby()
    teach(bench, "gated")
    second = successor(bench)
    bench.wait_reported("; successors warming up")
    assert bench.standby() == first
    assert not has_ended(first)
    gate.write_text("")
    wait_for(lambda: has_ended(first), "the end of the one that was replaced")
    assert bench.standby() == second
    wait_for(lambda: "successors" not in bench.told[-1].summary, "that to be told")
    assert bench.run(1)["pid"] == second


def test_a_standby_is_taken_while_its_successor_warms_up_which_is_the_next(
    make: Callable[..., Bench], gate: Path
) -> None:
    bench = make()
    first = bench.standby()
    teach(bench, "gated")
    second = successor(bench)
    assert bench.run(1)["pid"] == first
    gate.write_text("")
    assert bench.standby() == second
    assert bench.run(2)["pid"] == second


def test_a_successor_that_dies_is_replaced_and_the_standby_stays(make: Callable[..., Bench], gate: Path) -> None:
    bench = make()
    first = bench.standby()
    teach(bench, "gated")
    second = successor(bench)
    os.kill(second, signal.SIGKILL)
    third = successor(bench, other_than=second)
    assert bench.standby() == first
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: pid_of(bench.workers._standbys._slots[0]) == third, "the successor to move up")
    gate.write_text("")
    assert bench.standby() == third


def test_an_outdated_successor_is_replaced(make: Callable[..., Bench], gate: Path) -> None:
    bench = make()
    first = bench.standby()
    teach(bench, "gated")
    second = successor(bench)
    teach(bench, "gated", "no_such_package")
    third = successor(bench, other_than=second)
    wait_for(lambda: has_ended(second), "its end")
    assert bench.standby() == first
    gate.write_text("")
    wait_for(lambda: has_ended(first), "the end of the one that was replaced")
    assert bench.standby() == third


@pytest.mark.usefixtures("gate")
def test_a_standby_that_is_never_warm_is_ended_and_counts_as_failed(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import waits forever."""
    monkeypatch.setattr(standbys, "DEFAULT_MODULES", ("gated",))
    monkeypatch.setattr(standbys, "_WARM_TIMEOUT_S", 0.3)
    bench = make()
    told = bench.wait_reported("failed in a row")
    assert told.summary == "none: 3 failed in a row (it was not warm within 0.3 s)"


def test_no_successor_is_started_while_memory_is_short_and_the_standby_stays(
    make: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module must exist for both."""
    monkeypatch.setattr(standbys, "_RETRY_S", 0.2)
    bench = make()
    first = bench.standby()
    monkeypatch.setattr(standbys, "free_memory", lambda: 1_000_000)
    teach(bench, "gated")
    told = bench.wait_reported("memory").summary
    assert told.startswith("1 of 1 warm, ")
    assert "; for better ones memory is short (1 MB free, " in told
    assert bench.standby() == first
    monkeypatch.setattr(standbys, "free_memory", lambda: 1 << 40)
    gate.write_text("")
    wait_for(lambda: has_ended(first), "its end")
    assert bench.run(1)["pid"] != first


def test_nobody_waits_without_end_for_the_first_ones(
    make: Callable[..., Bench], library: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library("endless", "import time; time.sleep(1000)")
    monkeypatch.setattr(standbys, "DEFAULT_MODULES", ("endless",))
    monkeypatch.setattr(standbys, "_PREPARING_S", 0.5)
    bench = make()
    wait_for(lambda: len(bench.told) == 2, "both to be told")
    assert bench.told == [StandbyChanged("warming up", is_warming=True), StandbyChanged("warming up", is_warming=False)]
    assert bench.run(1)["decimal"] is False, "a rank does not wait for it either"


def test_preparing_ends_once_the_first_standbys_are_warm(make: Callable[..., Bench]) -> None:
    bench = make(ranks=2)
    assert not bench.wait_reported("2 of 2 warm, ").is_warming
    assert bench.told[0] == StandbyChanged("warming up", is_warming=True)
    assert all(told.is_warming for told in bench.told[:-1])


def test_later_standbys_are_reported_until_they_are_warm(make: Callable[..., Bench]) -> None:
    """If the group grew meanwhile, its new ranks would be started cold."""
    bench = make("import time; time.sleep(1000)")
    bench.standby()
    bench.start(1)
    wait_for(lambda: len(bench.told) == 4, f"all to be told; there is {bench.told}", DEADLINE_S)
    assert [told.is_warming for told in bench.told] == [True, False, True, False]
    assert "1 of 1 warm" in bench.told[-1].summary


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (StandbyPlan("off"), "off"),
        (
            StandbyPlan("learned", (StandbyCommand(0, ("/bin/sleep", "1000"), {}, Path("/")),)),
            "none: the command is not this Python with a script or a module",
        ),
    ],
)
def test_impossible_standbys_are_reported(plan: StandbyPlan, told: str) -> None:
    events: queue.Queue[Event] = queue.Queue()
    workers = WorkerGroup(events.put, standbys=plan)
    assert events.get(timeout=DEADLINE_S) == StandbyChanged(told, is_warming=False)
    workers.close()
    assert events.empty()


def test_a_standby_that_closes_its_socket_is_killed(
    make: Callable[..., Bench], library: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would run the script as a rank that was not requested."""
    monkeypatch.setattr(standbys, "DEFAULT_MODULES", ("loose",))
    library("loose", "import os, time\nos.closerange(3, 1 << 16)\ntime.sleep(1000)\n")
    bench = make(
        "from pathlib import Path; Path(__file__).with_name('unasked').touch()",
    )
    bench.wait_reported("none: 3 failed in a row")
    assert not (tmp_path / "unasked").exists()


AGENT = """
import os, sys, threading
from pathlib import Path
from agent.workers import standbys
from agent.workers.worker_group import WorkerGroup
from agent.workers.launch_plan import StandbyCommand, StandbyPlan
standbys.DEFAULT_MODULES = ("decimal",)
tmp = Path(sys.argv[1])
argv = (sys.executable, str(tmp / "script.py"))
def tell(event):
    print(event, flush=True)
workers = WorkerGroup(tell, standbys=StandbyPlan("torch", (StandbyCommand(0, argv, dict(os.environ), tmp),)))
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_agent_dies_its_standbys_do(tmp_path: Path, number: int) -> None:
    (tmp_path / "script.py").write_text("open('unasked', 'w')")
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout
        wait_for(lambda: "1 of 1 warm" in agent.stdout.readline(), "a warm one", DEADLINE_S)
        assert len(processes_of(tmp_path)) == 2
        agent.send_signal(number)
        assert agent.wait(DEADLINE_S) == -number
    wait_for(lambda: not processes_of(tmp_path), "its end")
    assert not (tmp_path / "unasked").exists()


@pytest.mark.long("scripts/bench guard, test_gpu_check.py")
def test_a_killed_worker_is_replaced_by_its_standby(job: Callable[..., Job]) -> None:
    """A complete job of two nodes: both ranks of the next group are processes that were standbys."""
    digits = job("--standby=learned")
    del digits.environ["PYTHONPATH"]  # all of scikit-learn is to be learned
    digits.epochs, digits.step_time_s = 1000, 0.1
    nodes = [digits.join(name, "2") for name in ("a", "b")]
    group_number = digits.wait_for_step(5)
    wait_for(lambda: all(len(rank_processes(node)) == 2 for node in nodes), "the standbys of both", WARM_WITHIN_S)
    wait_for(lambda: all(map(has_learned, waiting(nodes))), "them to have what the script imports", WARM_WITHIN_S)
    wait_for(lambda: all(warm(node) for node in digits.status()["nodes"]), "them to be warm", WARM_WITHIN_S)
    waited = waiting(nodes)
    nodes[0].kill_worker()
    digits.wait_for_step(6, after_group=group_number)
    assert sorted(worker.pid for node in nodes for worker in node.workers()) == sorted(waited)


def waiting(nodes: list[LocalNode]) -> list[int]:
    """Return the processes that are no ranks."""
    return [pid for node in nodes for pid in rank_processes(node) if pid not in [w.pid for w in node.workers()]]


def has_learned(pid: int) -> bool:
    """Whether it has loaded more than torch.

    The first standbys load only torch, and are replaced after the first step.
    """
    with suppress(OSError):
        return "/sklearn/" in Path(f"/proc/{pid}/maps").read_text()
    return False


def warm(node: dict[str, str]) -> bool:
    return node["standby"].startswith("1 of 1 warm, ")


def rank_processes(node: LocalNode) -> list[int]:
    """Return the processes that are ranks or may become ranks."""
    found: list[int] = []
    for guardian in node.guardians():
        with suppress(psutil.NoSuchProcess):  # it may have been replaced by one that has learned
            found += [child.pid for child in guardian.children()]
    return found
