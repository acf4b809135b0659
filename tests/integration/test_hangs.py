"""Real ranks that hang: what is reported of each, when, and what never counts as a hang."""

from __future__ import annotations

import os
import queue
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ports import free_port
from waiting import wait_for

from agent import clock
from agent.config import HangConfig
from agent.core.events import Event, RanksStalled, RanksStarted, RestorePointAsked, StepTimeChanged, WorkerExited
from agent.core.saved_states import RestorePoint
from agent.diagnose import stacks, step_watch
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.worker_group import WorkerGroup
from trainer_runtime import contract

DEADLINE_S = 180.0
QUICK = HangConfig(floor_s=10.0, first_s=10.0)
"""A rank or its monitor may be stopped for some seconds: far less than the limit, or than half of it."""

TRAIN = """
import ctypes, os, time
import torch
import trainer_runtime as tr
from torch.nn.parallel import DistributedDataParallel

def load(rank, step):
    HANG

tr.init()
rank = tr.rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
state = tr.State(model=model, opt=opt, save_every=1000)
for epoch in state.epochs(1):
    for step in state.steps(range(STEPS)):
        load(rank, step)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        state.commit()
        time.sleep(0.05)
"""
"""Trains with two ranks; each test defines `load`."""
BACKWARD, LOAD = "train.py:19 in <module>", "train.py:8 in load"


class Bench:
    """Local workers of one group, and the events that they post."""

    def __init__(self, tmp: Path, hang: HangConfig) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers = WorkerGroup(self._post, hang)

    def _post(self, event: Event) -> None:
        if isinstance(event, RestorePointAsked):
            self.workers.send_restore_point(RestorePoint(group=event.group, copy=None, lineage=(), checkpoint=None))
        self.events.put(event)

    def train(self, hang: str, *, steps: int = 100_000) -> None:
        """Train with two ranks, of which one behaves differently."""
        script = textwrap.dedent(TRAIN).replace("STEPS", str(steps))
        self.run(script.replace("HANG", textwrap.indent(textwrap.dedent(hang), "    ").strip()), ranks=2)

    def run(self, script: str, *, ranks: int) -> None:
        path = self.tmp / "train.py"
        path.write_text(script)
        port = free_port()
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        common |= {contract.RUN_ID: "us", contract.GROUP: "1", contract.CHECKPOINT_DIR: str(self.tmp / "checkpoints")}
        common |= {"PYTHONPATH": str(Path.cwd())}
        commands = tuple(
            RankCommand(
                local_rank=rank,
                rank=rank,
                argv=(sys.executable, str(path)),
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=self.tmp,
                log_path=self.log(rank),
                console_prefix=None,
            )
            for rank in range(ranks)
        )
        self.workers.start(Launch(1, commands))

    def log(self, rank: int) -> Path:
        return self.tmp / f"{rank}.log"

    def pid(self, rank: int) -> int:
        process = self.workers.ranks[rank].process
        assert process
        return process.worker_pid

    def step(self, rank: int) -> int:
        return self.workers.ranks[rank].step

    def until(self, is_wanted: Callable[[Event], bool], what: str) -> list[Event]:
        """Return all events up to the one that is wanted."""
        seen: list[Event] = []
        give_up_at = clock.now() + DEADLINE_S
        while True:
            try:
                seen.append(self.events.get(timeout=max(0.0, give_up_at - clock.now())))
            except queue.Empty:
                logs = [self.log(rank).read_text()[-1500:] for rank in range(2) if self.log(rank).exists()]
                raise AssertionError(f"not in time: {what}; seen: {seen}; {logs}") from None
            assert not isinstance(seen[-1], WorkerExited) or is_wanted(seen[-1]) or not seen[-1].exit_code, seen
            if is_wanted(seen[-1]):
                return seen

    def stalls(self, stage: str = "certain") -> list[RanksStalled]:
        """Return all reports of a standstill up to this stage."""
        seen = self.until(lambda event: isinstance(event, RanksStalled) and event.stage == stage, f"stage {stage}")
        return [event for event in seen if isinstance(event, RanksStalled)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Create local workers; all are killed at the end. A rank has time to write its stacks.

    The limit that follows from the first steps, which are slow on a busy machine, is short enough for a test.
    """
    monkeypatch.setattr(step_watch, "_UNLEARNED_FACTOR", 10.0)
    monkeypatch.setattr(stacks, "_WRITTEN_WITHIN_S", 30.0)
    monkeypatch.setattr(stacks, "_PY_SPY_WITHIN_S", 60.0)
    with ExitStack() as stack:

        def make(hang: HangConfig = QUICK) -> Bench:
            made = Bench(tmp_path, hang)
            stack.callback(made.workers.close)
            return made

        yield make


def check(stall: RanksStalled, *wanted: tuple[str, str]) -> None:
    """Check what each rank does, and where (the function, or the text of the line)."""
    for rank, (told, (doing, where)) in enumerate(zip(stall.ranks, wanted, strict=True)):
        assert told.rank == rank
        assert (told.doing, where in told.where) == (doing, True), (told, stall)
        assert len(told.stack) <= 4096


def test_a_hang_in_user_code_and_the_rank_that_waits_for_it(bench: Callable[..., Bench]) -> None:
    """Suspicious at the limit; "still" at 1.5 times the limit, because no rank moves; certain at twice the limit."""
    made = bench()
    made.train("if (rank, step) == (1, 30): time.sleep(1000)")
    suspicious, still, certain = made.stalls()
    assert [suspicious.stage, still.stage, certain.stage] == ["suspicious", "still", "certain"]
    for stall in (suspicious, still, certain):
        check(stall, ("waits", BACKWARD), ("sleeps", LOAD))
        assert [told.step for told in stall.ranks] == [30, 30]
        assert stall.limit_s >= QUICK.floor_s, "and more on a busy machine, where steps take longer"
    assert "_engine_run_backward" in suspicious.ranks[0].stack.splitlines()[1], "the innermost frame comes first"
    assert suspicious.limit_s <= suspicious.for_s < 1.5 * suspicious.limit_s
    assert certain.for_s >= 2 * certain.limit_s


@pytest.mark.long("test_a_stalled_rank_is_named_although_all_stall in integration/test_incidents.py")
def test_ranks_that_wait_for_each_other_in_different_places(bench: Callable[..., Bench]) -> None:
    """One skips a collective that the other waits for, and waits for one that the other never enters."""
    made = bench()
    made.train("if (rank, step) == (1, 30): torch.distributed.recv(torch.ones(1), 0)")
    [suspicious] = made.stalls("suspicious")
    check(suspicious, ("waits", BACKWARD), ("waits", LOAD))


def test_c_code_that_holds_the_interpreters_lock(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.train("if (rank, step) == (1, 30): ctypes.PyDLL(None).sleep(1000)")
    [suspicious] = made.stalls("suspicious")
    check(suspicious, ("waits", BACKWARD), ("sleeps", LOAD))


@pytest.mark.long("test_c_code_that_holds_the_interpreters_lock")
def test_c_code_that_holds_the_lock_and_computes(bench: Callable[..., Bench]) -> None:
    """It uses the processor, so it is not "still": only time makes the hang certain."""
    made = bench()
    made.train("if (rank, step) == (1, 30): sum(range(10 ** 14))")
    stalls = made.stalls()
    assert [stall.stage for stall in stalls] == ["suspicious", "certain"]
    check(stalls[-1], ("waits", BACKWARD), ("runs", LOAD))


@pytest.mark.parametrize("pause", ["time.sleep(0.01)", "pass"], ids=["asleep", "at work"])
def test_a_rank_that_waits_for_a_collective_in_its_own_code(bench: Callable[..., Bench], pause: str) -> None:
    """As with NCCL, where it waits in `loss.item()`: the other rank has not begun that collective."""
    made = bench()
    made.train(
        f"""
        if step == 30:
            if rank == 1: time.sleep(1000)
            work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
            while not work.is_completed(): {pause}
        """
    )
    [suspicious] = made.stalls("suspicious")
    check(suspicious, ("waits", LOAD[:8]), ("sleeps", LOAD[:8]))


def test_a_rank_that_hangs_while_it_has_a_collective_under_way_in_another_group(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.train(
        """
        if step == 30:
            other = torch.distributed.new_group()
            if rank == 1:
                torch.distributed.all_reduce(torch.ones(1), group=other, async_op=True)
                time.sleep(1000)
        """
    )
    [suspicious] = made.stalls("suspicious")
    check(suspicious, ("waits", "in <module>"), ("waits", "in load"))
    assert [rank.stack_shows for rank in suspicious.ranks] == [None, "sleeps"], "so that the second is named"


def test_a_rank_that_is_stopped(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.train("pass")
    wait_for(lambda: made.step(1) >= 30, "steps", DEADLINE_S)
    os.kill(made.pid(1), signal.SIGSTOP)
    [suspicious, still] = made.stalls("still")
    check(suspicious, ("waits", BACKWARD), ("stopped", ""))
    check(still, ("waits", BACKWARD), ("stopped", ""))
    os.kill(made.pid(1), signal.SIGCONT)
    *_, over = made.stalls("over")
    assert over.for_s < over.limit_s


@pytest.mark.long("unit/test_hangs.py; test_a_rank_that_is_stopped")
def test_a_rank_that_has_ended_while_the_other_continues(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.train("os._exit(0) if (rank, step) == (0, 30) else time.sleep(1000 if step == 30 else 0)")
    *_, certain = made.stalls()
    check(certain, ("exited", ""), ("sleeps", "load"))


@pytest.mark.long("unit/test_workers_watch.py")
def test_a_phase_protects_all_ranks_of_the_node(bench: Callable[..., Bench]) -> None:
    made = bench(HangConfig(floor_s=6.0, factor=1.0, first_s=60.0))
    made.train(
        """
        if (rank, step) == (1, 30):
            with tr.phase("eval"):
                time.sleep(18)
        if (rank, step) == (0, 60): time.sleep(1000)
        """
    )
    wait_for(lambda: made.step(1) == 30, "the evaluation", DEADLINE_S)
    wait_for(lambda: made.step(1) == 60, "what comes after it", DEADLINE_S)
    assert not [event for event in made.events.queue if isinstance(event, RanksStalled)]
    made.stalls("suspicious")


@pytest.mark.long("unit/test_runtime_watched.py: no steps are expected after it")
def test_nothing_is_a_hang_after_the_last_epoch(bench: Callable[..., Bench]) -> None:
    made = bench(HangConfig(floor_s=6.0, factor=1.0, first_s=60.0))
    script = textwrap.dedent(TRAIN).replace("STEPS", "30").replace("HANG", "pass")
    made.run(f"{script}\ntime.sleep(18)\n", ranks=2)
    seen = made.until(lambda event: isinstance(event, WorkerExited), "the end")
    assert not [event for event in seen if isinstance(event, RanksStalled)]


def test_with_a_timeout_any_program_is_judged_by_its_output(bench: Callable[..., Bench]) -> None:
    script = textwrap.dedent("""
        import time
        def wait_for_nothing():
            time.sleep(1000)
        for number in range(24):
            print(number, flush=True)
            time.sleep(0.5)
        wait_for_nothing()
    """)
    made = bench(HangConfig(timeout_s=8.0))
    began = clock.now()
    made.run(script, ranks=1)
    [suspicious] = made.stalls("suspicious")
    assert clock.now() - began > 12, "not while it said something"
    check(suspicious, ("sleeps", "train.py:4 in wait_for_nothing"))
    assert suspicious.limit_s == 8.0


def test_without_a_timeout_a_program_without_the_runtime_is_not_judged(bench: Callable[..., Bench]) -> None:
    made = bench(HangConfig(floor_s=0.2, factor=1.0, first_s=0.2))
    made.run("import time; time.sleep(3)", ranks=1)
    [exited] = made.until(lambda event: isinstance(event, WorkerExited), "the end")
    assert isinstance(exited, WorkerExited)


def test_the_first_step_of_all_ranks_is_posted_once(bench: Callable[..., Bench]) -> None:
    made = bench()
    started = clock.now()
    made.train("pass", steps=3)
    seen = made.until(lambda event: isinstance(event, WorkerExited), "the end")
    [began] = [event for event in seen if isinstance(event, RanksStarted)]
    assert (began.group, began.step) == (1, 1)
    times = [started, began.entered, began.joined, began.set_up, began.loaded, began.stepped, clock.now()]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "slow",
    [
        "if rank == 1: time.sleep(0.1)",
        "model.module.register_forward_pre_hook(SLOW) if (rank, step) == (1, 0) else None",
    ],
    ids=["its data", "its forward pass"],
)
def test_of_two_ranks_the_slow_one_is_reported(bench: Callable[..., Bench], slow: str) -> None:
    """At the latest once a short stop of one rank hardly counts any more: own times are a mean of many steps."""
    made = bench()
    made.train(slow.replace("SLOW", "lambda *_: time.sleep(0.1)"))

    def is_right(event: Event) -> bool:
        if not isinstance(event, StepTimeChanged) or len(event.own_s) != 2:
            return False
        fast_s, slow_s = event.own_s
        return slow_s > 0.14 and slow_s - fast_s > 0.05 and event.step_s == pytest.approx(slow_s, rel=0.3)

    made.until(is_right, "a pace that tells the slow one")
