"""What a step, an epoch and a phase are to State: what runs again, where it leaves, and what it refuses."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import FakeAgent, agent_of_this_process, control_page, start_without_agent
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import agent_channel, contract, phases
from trainer_runtime import state as state_
from trainer_runtime.checkpoint_files import write_state
from trainer_runtime.live_metrics import LiveMetrics
from trainer_runtime.manifest import stem_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUND_S = 60.0


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without an agent's variables."""
    start_without_agent(monkeypatch)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[contract.ControlPage]:
    monkeypatch.setattr(phases, "_phases", phases._Phases())
    with control_page(monkeypatch) as page:
        yield page


@pytest.fixture
def agent(tmp_path: Path, page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """An agent that this process is a worker of."""
    monkeypatch.setenv(contract.HANDOFF_WAIT_S, "60")
    monkeypatch.setattr(state_, "restart_at_exit", lambda: None)  # it would end the tests
    assert page.step == 0
    with agent_of_this_process(tmp_path, monkeypatch) as agent:
        yield agent


def test_a_phase_is_shown_to_the_agent_as_long_as_the_outermost_lasts(page: contract.ControlPage) -> None:
    seen = [page.phase]
    with tr.phase("eval"):
        seen.append(page.phase)
        with contextlib.suppress(ZeroDivisionError), tr.phase("metrics"):
            seen.append(page.phase)
            raise ZeroDivisionError
        seen.append(page.phase)
    assert [*seen, page.phase] == [0, 1, 1, 1, 0]


def test_without_an_agent_a_phase_is_nothing_special() -> None:
    with tr.phase("eval"):
        pass


def test_what_comes_after_the_last_commit_of_an_epoch_runs_again_if_it_did_not_finish(tmp_path: Path) -> None:
    done: list[str] = []

    def train(*, dies: bool) -> None:
        state = tr.State(checkpoint_dir=tmp_path, save_every=1, best=0.0)
        for epoch in state.epochs(2):
            for item in state.steps(range(2)):
                done.append(f"{epoch}.{item}")
                state.commit()
            with tr.phase("eval"):
                done.append(f"eval {epoch}")
                if dies:
                    assert state._saver
                    assert state._saver.writer
                    state._saver.writer.finish()
                    raise KeyboardInterrupt
                done.append(f"finished {epoch}")

    with pytest.raises(KeyboardInterrupt):
        train(dies=True)
    train(dies=False)
    assert done == ["0.0", "0.1", "eval 0", "eval 0", "finished 0", "1.0", "1.1", "eval 1", "finished 1"]


def train_until_asked(state: tr.State, page: contract.ControlPage, at: int) -> None:
    state.restore()
    for step in range(1, 10):
        if step == at:
            page.handoff = 4
        state.commit()
        if state.should_stop:
            return


def test_a_handoff_saves_and_leaves_for_a_restart(agent: FakeAgent, page: contract.ControlPage) -> None:
    state = tr.State(save_every=100, best=0.0)
    with pytest.raises(SystemExit) as left:
        train_until_asked(state, page, at=3)
    assert (left.value.code, state.step, page.quiesced) == (contract.EXIT_RESTART, 3, 4)
    assert [(asked["name"], asked["handoff"]) for asked in agent.asked] == [(stem_of("us", 3, 3), 4)]


def test_a_framework_is_asked_to_stop_instead(agent: FakeAgent, page: contract.ControlPage) -> None:
    state = tr.State(save_every=100, leave_on_handoff=False, best=0.0)
    train_until_asked(state, page, at=3)
    assert (state.should_stop, state.step, len(agent.asked)) == (True, 3, 1)


def test_without_a_next_group_training_goes_on(
    agent: FakeAgent, page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one request stops it only once."""
    monkeypatch.setenv(contract.HANDOFF_WAIT_S, "0.2")
    agent.is_over = False
    state = tr.State(save_every=100, best=0.0)
    train_until_asked(state, page, at=3)
    assert (state.step, state.should_stop, page.quiesced) == (9, False, 0)
    wait_for(lambda: agent.asked != [], "the agent is asked", BOUND_S)  # which is not waited for
    assert [asked["copy"]["step"] for asked in agent.asked] == [3]


def test_every_nth_step_is_logged_once_with_its_metrics_as_numbers(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    state = tr.State(checkpoint_dir=tmp_path, save_every=7, best=0.0)
    state.on_commit(lambda step, metrics: logged.append((step, metrics)), every=3)
    state.restore()
    for step in range(1, 11):
        state.commit(loss=torch.tensor(float(step)), rate=float("inf"))
    assert logged == [(step, {"loss": float(step), "rate": float("inf")}) for step in (3, 6, 9)]


def test_the_agent_gets_the_metrics_at_hand_of_the_step_after_it_asked(page: contract.ControlPage) -> None:
    state = tr.State(save_every=100, leave_on_handoff=False, best=0.0)
    state.restore()
    long_name = "validation accuracy of the second head"
    for step in range(1, 9):
        if step == 5:
            page.metrics_asked += 1
        metrics = {"loss": torch.tensor(0.5 * step), "lr": 0.1, long_name: 1}
        state.commit(**metrics, many=2, too_many=3)
    assert page.metrics_step == 5
    assert page.metrics == {
        "loss": 2.5,
        "lr": pytest.approx(0.1),
        long_name[: contract.METRIC_NAME_BYTES]: 1.0,
        "many": 2.0,
    }
    page.begin_group()
    assert page.metrics_step == 0


def test_the_agent_also_gets_metrics_that_are_read_anyway(page: contract.ControlPage) -> None:
    state = tr.State(save_every=100, leave_on_handoff=False, best=0.0)
    state.on_commit(lambda _step, _metrics: None, every=3)
    state.restore()
    for step in range(1, 6):
        state.commit(loss=float(step), rate=float("nan"))
    assert page.metrics_step == 3
    assert page.metrics["loss"] == 3.0
    assert math.isnan(page.metrics["rate"])


def test_a_metric_on_a_device_is_not_waited_for_and_one_that_is_no_number_is_left_out(
    page: contract.ControlPage,
) -> None:
    """The next save reads the one, and reports the other."""
    live = LiveMetrics(page)
    given = {"loss": 1.5, "word": "x", "list": torch.ones(3), "complex": torch.ones((), dtype=torch.cfloat)}
    huge = 10**400
    live.answer(1, 5, {**given, "on a device": torch.ones((), device="meta"), "huge": huge})  # type: ignore[dict-item]
    assert (page.metrics_step, page.metrics) == (5, {"loss": 1.5})
    live.answer(2, 6, {"surrogate \ud800": 2.5})
    assert (page.metrics_step, page.metrics) == (6, {"surrogate ?": 2.5})


def test_a_log_that_is_registered_later_begins_there(tmp_path: Path) -> None:
    logged: list[int] = []
    state = tr.State(checkpoint_dir=tmp_path, save_every=100, best=0.0)
    state.restore()
    for step in range(1, 11):
        if step == 5:
            state.on_commit(lambda step, _metrics: logged.append(step), every=2)
        state.commit()
    assert logged == [6, 8, 10]


def test_a_script_that_commits_nothing_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tr.State(checkpoint_dir=tmp_path, save_every=100, best=0.0)
    for _ in state.epochs(3):
        for _ in state.steps(range(4)):
            pass
    said = capsys.readouterr().err
    assert said.count("4 items were drawn from state.steps(), and none was committed: call state.commit()") == 1


def test_a_log_that_fails_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tr.State(checkpoint_dir=tmp_path, save_every=100, best=0.0)
    logged: list[int] = []

    @state.on_commit
    def fail(_step: int, _metrics: dict[str, float]) -> None:
        raise OSError("no space")

    state.on_commit(lambda step, _metrics: logged.append(step))
    state.restore()
    for _ in range(20):
        state.commit()
    assert (state.step, logged) == (20, [10, 20])
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1
    assert printed.count("and training goes on: no space\n") == 2


def test_a_log_wants_at_least_one_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wanted every of at least 1, got 0"):
        tr.State(checkpoint_dir=tmp_path, best=0.0).on_commit(print, every=0)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_step_that_is_saved_for_a_handoff_is_logged_before_once(
    agent: FakeAgent, page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    """Nobody makes that step again, so nobody else would log it."""
    agent.is_over = is_over
    if not is_over:
        monkeypatch.setenv(contract.HANDOFF_WAIT_S, "0.2")
    state = tr.State(save_every=100, leave_on_handoff=False, best=0.0)
    logged: list[tuple[int, int]] = []
    state.on_commit(lambda step, _metrics: logged.append((step, len(agent.asked))), every=3)
    train_until_asked(state, page, at=3)
    assert logged[0] == (3, 0)
    assert [step for step, _ in logged] == ([3] if is_over else [3, 6, 9])


@pytest.mark.usefixtures("agent")
def test_under_an_agent_a_second_state_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has one record of what was saved, and a restart would come to the same line again."""
    monkeypatch.setattr(tr.State, "_restored", set())
    tr.State(best=0.0).restore()
    with pytest.raises(SystemExit) as left:
        tr.State(checkpoint_dir="elsewhere", best=0.0).restore()
    assert left.value.code == contract.EXIT_NO_RESTART
    assert re.search(r"and a job has one: .* run as jobs of their own$", capsys.readouterr().err.strip())


@pytest.mark.usefixtures("agent")
def test_so_does_one_in_another_process_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where each fold of a cross-validation is trained in a child process, which has the page and the channel."""
    monkeypatch.setattr(tr.State, "_restored", set())
    tr.State(best=0.0).restore()
    monkeypatch.setattr(tr.State, "_restored", set())
    with pytest.raises(SystemExit) as left:
        tr.State(best=0.0).restore()
    assert left.value.code == contract.EXIT_NO_RESTART
    assert "another process of this rank has restored a State already" in capsys.readouterr().err


def test_a_child_that_did_not_inherit_the_page_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "anything").open("wb+") as file:
        file.truncate(1 << 16)
        monkeypatch.setenv(contract.CONTROL_FD, str(file.fileno()))
        with pytest.raises(RuntimeError, match=r"which is not the agent's page here: .* start that process without"):
            tr.State(best=0.0)


def test_without_one_so_is_one_that_would_begin_with_what_another_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tr.State, "_restored", set())
    first, second, other = (tr.State(checkpoint_dir=tmp_path / name, best=0.0) for name in ("a", "a", "b"))
    first.restore()
    first.restore()
    with pytest.raises(RuntimeError, match=r"or give each State a checkpoint_dir of its own$"):
        second.restore()
    other.restore()


@pytest.mark.parametrize(("save_every", "asked"), [(2, [0, 0]), (100, [4, 0])], ids=["the one before", "its own"])
def test_a_handoff_does_not_wait_for_a_verdict(
    agent: FakeAgent, page: contract.ControlPage, save_every: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Etcd is away: neither the checkpoint before it nor its own is waited for."""
    monkeypatch.setenv(contract.HANDOFF_WAIT_S, "0.2")
    is_back = threading.Event()
    agent.on_publish = lambda _asked: is_back.wait(60)
    state = tr.State(save_every=save_every, best=0.0)
    train_until_asked(state, page, at=3)
    assert (state.step, state.should_stop) == (9, False)
    is_back.set()
    state.save()
    assert [each["handoff"] for each in agent.asked] == asked


def test_a_handoff_at_a_full_disk_trains_on(
    agent: FakeAgent, page: contract.ControlPage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tr.State(checkpoint_dir=tmp_path / "place", save_every=100, best=0.0)
    state.restore()
    (tmp_path / "place").touch()  # nothing can be written below it
    train_until_asked(state, page, at=3)
    assert (state.step, page.quiesced, agent.asked) == (9, 0, [])
    assert "step 3 was NOT saved in" in capsys.readouterr().err


def answer_to(agent: FakeAgent) -> str:
    """Wait for what the agent is told; it gives no answer to that."""
    wait_for(lambda: agent.unreadable, "the report", BOUND_S)
    return agent.unreadable[0]


def test_a_checkpoint_that_cannot_be_read_is_reported_to_the_agent(
    agent: FakeAgent, page: contract.ControlPage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It knows what to do: another node may have it, or it comes back."""
    state = tr.State(save_every=1, best=0.0)
    state.restore()
    state.commit()
    state.save()
    (tmp_path / stem_of("us", 3, 1)).rename(tmp_path / "elsewhere")
    page.restored = 0  # a new process has a new page
    with pytest.raises(SystemExit) as left:
        tr.State(best=0.0).restore()
    assert left.value.code == 1
    sentence = answer_to(agent)
    assert sentence.startswith(f"the checkpoint in {tmp_path}: wanted the committed checkpoint")
    assert capsys.readouterr().err.splitlines()[-1] == f"trainer_runtime: cannot read {sentence}"


def test_a_read_error_is_reported_too(agent: FakeAgent, tmp_path: Path) -> None:
    tmp_path.joinpath("loop").symlink_to("loop")
    with pytest.raises(SystemExit):
        tr.State(checkpoint_dir=tmp_path / "loop", best=0.0).restore()
    assert "Too many levels of symbolic links" in answer_to(agent)


def test_one_node_goes_on_with_the_record_that_names_it(
    agent: FakeAgent, page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody else there, a probe can tell nothing."""
    named = []
    for own in ("", "node-b", "node-c"):
        monkeypatch.setenv(contract.NODE_ID, own)
        state = tr.State(save_every=1, best=0.0)
        state.restore()
        state.commit()
        state.save()
        assert agent.committed
        named.append(agent.committed["node"])
        agent.committed |= {"node": "node-b"}
        taken = agent_channel.open_channel()
        assert taken
        taken._restore_point, page.restored = None, 0  # as in a new process
    assert named == ["", "node-b", ""]


def test_a_checkpoint_of_an_older_version_is_refused_by_a_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_old(place: Path, content: dict[str, Any]) -> object:
        return write_state(place, content | {"v": 1})

    state = tr.State(checkpoint_dir=tmp_path, best=0.0)
    state.restore()
    state.commit()
    with monkeypatch.context() as patch:
        patch.setattr("trainer_runtime.writer.write_state", write_old)
        state.save()
    with pytest.raises(tr.CheckpointError, match="wanted a checkpoint of version 3, got 1: another version"):
        tr.State(checkpoint_dir=tmp_path, best=0.0).restore()


@pytest.mark.parametrize(("first", "then", "saved"), [(None, None, 77), (5, None, 5), (None, 6, 6), (5, 6, 6)])
def test_the_seed_is_torchs_unless_one_is_given_and_stays(
    tmp_path: Path, first: int | None, then: int | None, saved: int
) -> None:
    for group, seed in enumerate((first, then), start=1):
        torch.manual_seed(77 if group == 1 else 78)
        state = tr.State(checkpoint_dir=tmp_path, seed=seed, best=0.0)
        state.restore()
        state.commit()
        state.save()
    content = torch.load(tmp_path / stem_of("local", 2, 2) / "state.pt", weights_only=True)
    assert content["seed"] == saved


def loader(**options: Any) -> tr.DataLoader:  # noqa: ANN401 - passed on
    return tr.DataLoader(torch.arange(10), global_batch=4, **options)


def test_our_own_loader_begins_after_the_samples_committed(tmp_path: Path) -> None:
    """Nothing is drawn and dropped, and the cut into batches may have changed."""

    def train(stop_at: int | None) -> list[int]:
        data = loader()
        state = tr.State(checkpoint_dir=tmp_path, save_every=1, data=data)
        samples = []
        for _ in state.epochs(2):
            for batch in state.steps(data):
                if state.step == stop_at:
                    state.save()
                    return samples
                samples += batch.tolist()
                state.commit()
        return samples

    undisturbed = [index for epoch in range(2) for batch in loader().begin(epoch, 0) for index in batch.tolist()]
    before = train(stop_at=4)
    content = torch.load(tmp_path / stem_of("local", 1, 4) / "state.pt", weights_only=True)
    assert content["position"] == {"step": 4, "epoch": 1, "items": 1, "samples": 4, "save": 0, "item": ""}
    assert before + train(stop_at=None) == undisturbed


def test_a_commit_inside_a_step_is_refused(tmp_path: Path) -> None:
    data = loader(micro_batch=3)
    state = tr.State(checkpoint_dir=tmp_path, data=data)
    state.restore()
    batches = state.steps(data)
    next(batches)
    with pytest.raises(RuntimeError, match="commit\\(\\) was called within a step"):
        state.commit()
    assert state.step == 0
    next(batches)
    state.commit()
    assert state.step == 1


class Stream:
    """Items that know themselves how far they are, like torchdata's loader."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_state_saves_goes_on_by_itself(tmp_path: Path) -> None:
    """Its items are not dropped a second time."""
    stream = Stream()
    state = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
    state.restore()
    for item in state.steps(stream):
        state.commit()
        if item == 2:
            state.save()
            break
    stream = Stream()
    again = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
    again.restore()
    assert list(again.steps(stream)) == [3, 4, 5, 6]


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_an_order_drawn_in_the_body_of_an_epoch_is_the_same_after_a_restart(tmp_path: Path, stop_at: int) -> None:
    """Each sample is committed once an epoch, although every step draws from the same random state."""

    def run(directory: Path, stop_at: int | None) -> list[tuple[int, int, float]]:
        torch.manual_seed(0)
        state = tr.State(checkpoint_dir=directory, save_every=1000)
        drawn = []
        for epoch in state.epochs(2):
            for sample in state.steps(torch.randperm(4).tolist()):
                drawn.append((epoch, sample, torch.rand(1).item()))
                state.commit()
                if state.step == stop_at:
                    state.save()
                    return drawn
        return drawn

    whole = run(tmp_path / "whole", None)
    assert run(tmp_path / "cut", stop_at) + run(tmp_path / "cut", None) == whole
