"""Why a worker ended, as its node reports it: real processes that end in every way that one machine can provoke."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from waiting import wait_for

from agent.core.events import Event, WorkerExited, WorkersGone
from agent.workers import process
from agent.workers.exit_causes import _KERNEL_LOG, _are_kernel_pids, memory_cgroups
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.worker_group import WorkerGroup

DEADLINE_S = 60
LIMIT_BYTES = 256 << 20


class Bench:
    """Ranks that run a Python script, and how they end."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers = WorkerGroup(self.events.put)

    @property
    def error_file(self) -> Path:
        return self.tmp / "rank.error.json"

    def start(self, *argv: str) -> None:
        env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(self.error_file), "PYTHONFAULTHANDLER": "1"}
        self.workers.start(Launch(1, (RankCommand(0, 0, argv, env, self.tmp, self.tmp / "rank.log", None),)))

    def script(self, source: str) -> None:
        path = self.tmp / "train.py"
        path.write_text(source)
        self.start(sys.executable, str(path))

    def exited(self) -> WorkerExited:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, WorkerExited)
        assert self.events.get(timeout=DEADLINE_S) == WorkersGone(1)
        return event

    def wait_log(self, text: str) -> None:
        path = self.tmp / "rank.log"
        wait_for(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}", DEADLINE_S)

    @property
    def worker_pid(self) -> int:
        rank = self.workers.ranks[0].process
        assert rank
        wait_for(lambda: rank.worker_pid, "the worker's pid")
        return rank.worker_pid


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.workers.close()


def test_an_exception_is_reported_on_one_line(bench: Bench) -> None:
    bench.script("print('step 1')\nraise ValueError('no such thing\\nmore of it')")
    event = bench.exited()
    assert (event.exit_code, event.error, event.why) == (1, "ValueError: no such thing", "")
    assert not event.traceback, "the tail has all of it"
    assert event.stderr_tail.endswith("ValueError: no such thing\nmore of it\n")


def test_a_traceback_longer_than_the_tail_is_reported_too(bench: Bench) -> None:
    lines = [f"def f{n}():\n    f{n + 1}()" for n in range(15)]
    bench.script("\n".join([*lines, "def f15():\n    raise KeyError('deep')", "f0()"]))
    event = bench.exited()
    assert event.error == "KeyError: 'deep'"
    assert "in f0" in event.traceback
    assert "in f0" not in event.stderr_tail
    assert len(event.stderr_tail.splitlines()) == 20


def test_of_chained_exceptions_the_last_one_is_reported(bench: Bench) -> None:
    bench.script("try:\n    {}['a']\nexcept KeyError as error:\n    raise RuntimeError('no data') from error")
    assert bench.exited().error == "RuntimeError: no data"


def test_an_end_without_an_exception_has_none(bench: Bench) -> None:
    bench.script("import sys; sys.exit('train.py: no data in /data')")
    event = bench.exited()
    assert (event.exit_code, event.error, event.traceback, event.why) == (1, "", "", "")
    assert event.stderr_tail == "train.py: no data in /data\n"


def test_without_an_exception_the_last_lines_are_of_both_streams(bench: Bench) -> None:
    bench.script("import sys; print('no such dataset: x', flush=True); sys.stderr.write('old api\\n'); sys.exit(3)")
    event = bench.exited()
    assert (event.exit_code, event.error) == (3, "")
    assert sorted(event.stderr_tail.splitlines()) == ["no such dataset: x", "old api"], "in the order of two pipes"


def test_a_missing_program_is_the_cause(bench: Bench) -> None:
    bench.start("/no/such/python", "train.py")
    event = bench.exited()
    assert (event.exit_code, event.error) == (127, "cannot run /no/such/python: No such file or directory")


def test_an_environment_that_was_removed_is_the_cause(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guardian runs in the agent's Python environment, and cannot be started without it."""
    monkeypatch.setattr(process.sys, "executable", "/gone/bin/python")
    bench.start(sys.executable, "train.py")
    event = bench.exited()
    assert event.error == (
        "cannot start /gone/bin/python, which no longer exists: restore the agent's Python environment"
    )


def test_a_successful_end_has_no_cause(bench: Bench) -> None:
    """Although it has handled and printed an exception."""
    bench.script("import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()")
    event = bench.exited()
    assert "ZeroDivisionError" in event.stderr_tail
    assert (event.exit_code, event.error, event.traceback, event.why) == (0, "", "", "")


def test_a_collective_that_times_out_is_the_fault_of_another_rank(bench: Bench) -> None:
    bench.script(
        "import datetime, os, time, torch, torch.distributed as dist\n"
        "rank = int(os.fork() == 0)\n"
        "store = dist.FileStore('store', 2)\n"
        "short = datetime.timedelta(seconds=5)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2, timeout=short)\n"
        "time.sleep(1000) if rank else dist.all_reduce(torch.ones(1))\n"
    )
    event = bench.exited()
    assert (event.exit_code, event.why) == (1, "another rank did not take part in a collective in time"), event


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
import os, sys
@record
def main():
    {before}
    raise ValueError("no such thing")
try:
    main()
finally:
    sys.stderr = open(os.devnull, "w")
"""


def test_torchs_record_is_read_if_standard_error_has_no_exception(bench: Bench) -> None:
    bench.script(RECORDED.format(before=""))
    event = bench.exited()
    assert bench.error_file.exists()
    assert (event.error, event.stderr_tail) == ("ValueError: no such thing", "")
    assert event.traceback.startswith("Traceback (most recent call last):")
    assert 'raise ValueError("no such thing")' in event.traceback


def test_standard_error_is_used_if_torch_cannot_record(bench: Bench) -> None:
    bench.error_file.mkdir()
    source = RECORDED.format(before="").replace('open(os.devnull, "w")', "sys.stderr")
    bench.script(source)
    event = bench.exited()
    assert "IsADirectoryError" in event.error, "what ended it: torch's own failure to write"
    assert "no such thing" in event.traceback + event.stderr_tail


def test_a_fifo_in_place_of_the_record_delays_nothing(bench: Bench) -> None:
    """It has no writer: opening it in the plain way would block forever."""
    os.mkfifo(bench.error_file)
    bench.script("raise ValueError('no such thing')")
    event = bench.exited()
    assert event.error == "ValueError: no such thing"
    assert time.time() - event.at < DEADLINE_S / 2


def test_a_kill_by_hand_has_no_cause(bench: Bench) -> None:
    """No exception either, although it had printed one that it survived."""
    bench.script(
        "import time, traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
        "print('ready', flush=True)\ntime.sleep(1000)"
    )
    bench.wait_log("ready")
    os.kill(bench.worker_pid, signal.SIGKILL)
    event = bench.exited()
    assert (event.exit_code, event.signal) == (None, signal.SIGKILL)
    assert (event.error, event.traceback, event.why) == ("", "", "")


@pytest.mark.parametrize(
    ("crash", "number", "words"),
    [
        ("ctypes.string_at(0)", signal.SIGSEGV, "Segmentation fault"),
        ("os.abort()", signal.SIGABRT, "Aborted"),
        ("os.kill(os.getpid(), signal.SIGFPE)", signal.SIGFPE, "Floating"),
        ("os.kill(os.getpid(), signal.SIGBUS)", signal.SIGBUS, "Bus error"),
    ],
)
def test_a_crash_leaves_the_python_stack(bench: Bench, crash: str, number: int, words: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    bench.script(f"import ctypes, os, signal\ndef here():\n    {crash}\nhere()")
    event = bench.exited()
    assert event.signal == number
    assert event.error.startswith(f"Fatal Python error: {words}")
    assert "in here" in event.stderr_tail


def test_the_signal_of_a_shells_child_is_found_by_the_shells_code(bench: Bench) -> None:
    bench.start("/bin/sh", "-c", f"{sys.executable} -c 'import os; os.abort()'; exit $?")
    event = bench.exited()
    assert event.exit_code == 128 + signal.SIGABRT
    assert event.error == "Fatal Python error: Aborted"


AGENT = """
import dataclasses, json, os, queue, sys
from pathlib import Path
{enter}
from agent.core.events import WorkerExited
from agent.workers import process
from agent.workers.worker_group import WorkerGroup
from agent.workers.launch_plan import Launch, RankCommand
tmp = Path(sys.argv[1])
events = queue.Queue()
workers = WorkerGroup(events.put)
def command(rank, script):
    return RankCommand(rank, rank, (sys.executable, "-c", script), os.environ, tmp, tmp / f"{{rank}}.log", None)
workers.start(Launch(1, tuple(command(*each) for each in enumerate(sys.argv[2:]))))
told = []
while isinstance(event := events.get(timeout=60), WorkerExited):
    told.append(dataclasses.asdict(event))
    workers.kill(1)
workers.close()
print(json.dumps(told))
"""
EAT = "data = []\nwhile True:\n    data.append(bytearray(b'x' * (8 << 20)))\n"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup below this one, with a limit."""
    levels = memory_cgroups()
    if not levels:
        pytest.skip("no memory cgroup is mounted here")
    own, is_v2 = Path(levels[0]._path), levels[0]._is_v2
    made = own / f"test-causes-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made below {own}: {error.strerror}")
    yield made
    wait_for(lambda: not (made / "cgroup.procs").read_text(), "the cgroup to be empty")
    made.rmdir()


def exits_of_an_agent(tmp: Path, enter: str, *scripts: str, within: tuple[str, ...] = ()) -> list[WorkerExited]:
    """Run an agent with ranks that run these scripts. Return its output; the first rank to end ends the others."""
    command = [*within, sys.executable, "-c", AGENT.format(enter=enter), str(tmp), *scripts]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=2 * DEADLINE_S, check=True)
    return [WorkerExited(**each) for each in json.loads(done.stdout)]


def entering(cgroup: Path) -> str:
    return f"Path({str(cgroup / 'cgroup.procs')!r}).write_text(str(os.getpid()))"


@pytest.mark.parametrize("is_log_hidden", [False, True])
def test_a_worker_that_hits_its_containers_limit_is_reported_so(
    tmp_path: Path, cgroup: Path, *, is_log_hidden: bool
) -> None:
    """Found in the kernel's log or, if that is hidden, by the cgroup's counter.

    The rank that the agent kills has no cause.
    """
    enter = entering(cgroup) + (hiding_the_log(tmp_path / "guardian.py") if is_log_hidden else "")
    event, other = exits_of_an_agent(tmp_path, enter, EAT, "import time; time.sleep(1000)")
    assert (event.local_rank, event.exit_code, event.signal, event.error) == (0, None, signal.SIGKILL, "")
    assert event.why == "out of memory: its cgroup's limit of 256 MiB killed it"
    assert (other.signal, other.why) == (signal.SIGKILL, "")


def hiding_the_log(guardian: Path) -> str:
    """A guardian that finds no kernel log, as in a container."""
    place = Path(process.__file__).parent
    guardian.write_text(
        f"import runpy, sys\nsys.path.append({str(place)!r})\nimport exit_causes\nexit_causes._KERNEL_LOG = '/no/log'\n"
        f"runpy.run_path({str(place / 'guardian.py')!r}, run_name='__main__')\n"
    )
    return f"\nimport agent.workers.process as p\np._GUARDIAN = Path({str(guardian)!r})"


def test_a_kill_in_the_workers_own_cgroup_is_found_in_the_kernels_log(bench: Bench, cgroup: Path) -> None:
    if not (_are_kernel_pids() and os.access(_KERNEL_LOG, os.R_OK)):
        pytest.skip("the kernel's log cannot be read here, or counts other pids")
    bench.script(f"import os\nfrom pathlib import Path\n{entering(cgroup)}\n{EAT}")
    assert bench.exited().why == "out of memory: its cgroup's limit of 256 MiB killed it"


def test_a_kill_by_hand_in_a_container_with_a_limit_has_no_cause(tmp_path: Path, cgroup: Path) -> None:
    (event,) = exits_of_an_agent(tmp_path, entering(cgroup), "import os; os.kill(os.getpid(), 9)")
    assert (event.signal, event.why) == (signal.SIGKILL, "")


def test_a_bus_error_with_full_shared_memory_is_explained(tmp_path: Path) -> None:
    script = (
        "import mmap\nopen('/dev/shm/other', 'wb').write(b'x' * (1 << 20))\n"
        "file = open('/dev/shm/mine', 'w+b')\nfile.truncate(8 << 20)\n"
        "memory = mmap.mmap(file.fileno(), 8 << 20)\n"
        "for at in range(0, 8 << 20, 4096):\n    memory[at] = 1\n"
    )
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    (event,) = exits_of_an_agent(tmp_path, "os.environ['PYTHONFAULTHANDLER'] = '1'", script, within=mount)
    assert event.signal == signal.SIGBUS
    assert event.error == "Fatal Python error: Bus error"
    assert event.why == "out of shared memory: /dev/shm is full (4 MiB)"


def test_a_cause_can_be_written_to_records(bench: Bench) -> None:
    """Whatever characters a script prints, and up to the size limit: causes are written to records."""
    recorded = {"message": {"message": "E: \ud800\0", "extraInfo": {"py_callstack": "\0" * 20_000}}}
    bench.error_file.write_text(json.dumps(recorded))
    bench.script("import os\nos.write(2, (b'\\1' * 250 + b'\\n') * 20)\nos._exit(1)")
    event = bench.exited()
    assert event.error.startswith("E: ")
    assert len(event.traceback) > 8000 > len(event.stderr_tail.encode()) > 4000
    json.dumps(asdict(event), ensure_ascii=False).encode()


def test_the_report_of_an_end_is_quick(bench: Bench) -> None:
    """Counters, log and file are read within milliseconds: recovery waits for the report."""
    took = []
    for _ in range(5):
        bench.start("/bin/sh", "-c", "kill -9 $$")
        event = bench.exited()
        took.append(time.time() - event.at)
    assert min(took) < 0.5
