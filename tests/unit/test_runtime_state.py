"""State in a world of 1: what it counts, saves, restores and refuses."""

from __future__ import annotations

import json
import os
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

import trainer_runtime as tr
from trainer_runtime import contract, writer
from trainer_runtime.manifest import stem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> None:
    tr.init()


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without an agent's variables."""
    for name in (contract.RUN_ID, contract.GROUP, contract.FRESH, contract.CONTROL_FD, contract.CHECKPOINT_DIR):
        monkeypatch.delenv(name, raising=False)


def new_state(directory: Path, **options: Any) -> tr.State:  # noqa: ANN401 - passed on
    options = {"save_every": 1, "best": 0.0} | options
    return tr.State(checkpoint_dir=directory, **options)


def settle(state: tr.State) -> None:
    """Wait for what is being written in the background."""
    assert state._saver
    assert state._saver.writer
    state._saver.writer.finish()


def settle_failed(state: tr.State) -> None:
    """Wait for it, and leave its error to whoever asks next."""
    assert state._saver
    assert state._saver.writer
    assert state._saver.writer._thread
    state._saver.writer._thread.join()


def train(state: tr.State, steps: int) -> None:
    state.restore()
    for _ in range(steps):
        state.commit()
    settle(state)


def steps_saved(directory: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["step"] for path in directory.glob("*/manifest.json"))


def test_values_are_attributes_and_come_back(tmp_path: Path) -> None:
    state = new_state(tmp_path, history=[], table=torch.zeros(2))
    state.restore()
    state.best = 0.5
    state.history.append(("a", 1))
    state.table += 1
    state.commit()
    settle(state)
    again = new_state(tmp_path, history=[], table=torch.zeros(2))
    again.restore()
    assert (again.best, again.history, again.table.tolist(), again.step) == (0.5, [("a", 1)], [1.0, 1.0], 1)


def test_lists_dicts_and_tensors_come_back_in_the_scripts_own_objects(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        average = {"weight": torch.zeros(2), "best": {"loss": 1.0}}
        return {"average": average, "losses": [], "table": torch.zeros(3), "pair": (torch.zeros(1), "x"), "kept": None}

    one = parts()
    state = new_state(tmp_path, **one)
    state.restore()
    one["average"]["weight"] += 1
    one["average"]["best"]["loss"] = 0.5
    one["average"]["late"] = torch.ones(1)
    one["losses"] += [3.0, {"a": 1}]
    one["table"] += 2
    one["pair"][0].fill_(7)
    state.kept = [1]
    state.commit()
    settle(state)
    two = parts()
    weight, best = two["average"]["weight"], two["average"]["best"]
    again = new_state(tmp_path, **two)
    again.restore()
    assert again.average is two["average"]
    assert (again.average["weight"] is weight, again.average["best"] is best) == (True, True)
    assert (weight.tolist(), best, two["average"]["late"].tolist()) == ([1.0, 1.0], {"loss": 0.5}, [1.0])
    assert again.losses is two["losses"]
    assert two["losses"] == [3.0, {"a": 1}]
    assert again.table is two["table"]
    assert two["table"].tolist() == [2.0, 2.0, 2.0]
    assert again.pair[0] is two["pair"][0]
    assert (again.pair[0].item(), again.kept) == (7.0, [1])


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(2),
            r"holds a tensor of shape \(3,\) and float32, the script gave a tensor of shape",
        ),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "and float64; give State the same type"),
        ([1], {}, "holds a list, the script gave a dict"),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(2)}, r"cannot restore value\['a'\] in place"),
    ],
)
def test_a_value_of_another_kind_is_refused(tmp_path: Path, saved: object, given: object, message: str) -> None:
    train(new_state(tmp_path, value=saved), 1)
    with pytest.raises(ValueError, match=message):
        new_state(tmp_path, value=given).restore()


def test_sets_and_bytes_come_back_in_the_scripts_own_objects(tmp_path: Path) -> None:
    seen, raw = set[int](), bytearray()
    state = new_state(tmp_path, seen=seen, raw=raw)
    state.restore()
    seen.add(3)
    raw += b"ab"
    state.commit()
    settle(state)
    seen, raw = set(), bytearray()
    again = new_state(tmp_path, seen=seen, raw=raw)
    again.restore()
    assert (again.seen is seen, again.raw is raw, seen, raw) == (True, True, {3}, b"ab")


def test_what_was_one_object_at_the_start_and_is_several_in_the_checkpoint_comes_back_as_several(
    tmp_path: Path,
) -> None:
    """Each was given several times and replaced later, so none may be restored into the others' memory."""

    def parts() -> dict[str, Any]:
        net, zero = torch.nn.Linear(1, 1, bias=False), torch.zeros(2)
        torch.nn.init.zeros_(net.weight)
        best = dict(net.state_dict())
        return {"net": net, "best": best, "hidden": [zero] * 2, "last": zero, "lists": [[]] * 2, "dicts": ({},) * 2}

    one = parts()
    state = new_state(tmp_path, **one)
    state.restore()
    one["best"]["weight"] = torch.full((1, 1), 7.0)
    torch.nn.init.ones_(one["net"].weight)
    one["hidden"][:] = [torch.full((2,), 1.0), torch.full((2,), 2.0)]
    state.last = torch.full((2,), torch.nan)
    one["lists"][1] = [1]
    state.dicts = ({}, {"a": 1})
    state.commit()
    settle(state)
    two = parts()
    again = new_state(tmp_path, **two)
    again.restore()
    assert (two["net"].weight.item(), again.best["weight"].item(), again.best is two["best"]) == (1.0, 7.0, True)
    assert [each.tolist() for each in again.hidden] == [[1.0, 1.0], [2.0, 2.0]]
    assert again.last.isnan().all()
    assert (again.lists, again.dicts) == ([[], [1]], ({}, {"a": 1}))


def test_views_of_one_memory_come_back_in_place(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        table, net = torch.zeros(4, 4), torch.nn.Linear(2, 1)
        return {"column": table[:, 1], "table": table, "left": table[0, :2], "net": net, "weight": net.weight}

    one = parts()
    state = new_state(tmp_path, **one)
    state.restore()
    one["table"] += torch.arange(16).view(4, 4)
    state.commit()
    settle(state)
    two = parts()
    again = new_state(tmp_path, **two)
    again.restore()
    assert torch.equal(two["table"], one["table"])
    assert torch.equal(two["net"].weight, one["net"].weight)
    assert all(getattr(again, name) is two[name] for name in two)


def test_a_value_that_could_not_be_restored_in_place_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    state = new_state(tmp_path, bank=torch.zeros(0, 2), sums={"a": [torch.zeros(1)]})
    state.restore()
    state.commit()
    state.sums["a"].append(torch.zeros(3))
    state.commit()
    state.sums["a"][0] = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"cannot save sums\['a'\]\[0\]: .* shape \(1,\) and float32, .* and int64 now"):
        state.commit()
    state.sums["a"] = []
    state.bank = torch.zeros(1, 2)
    with pytest.raises(TypeError, match=r"cannot save bank: the script gave a tensor of shape \(0, 2\) and float32"):
        state.commit()


def test_objects_come_back_by_their_state(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
            "scaler": torch.amp.GradScaler("cpu"),
        }

    one = parts()
    state = new_state(tmp_path, **one)
    state.restore()
    one["model"](torch.ones(2)).backward()
    one["optimizer"].step()
    one["schedule"].step()
    state.commit()
    settle(state)
    two = parts()
    new_state(tmp_path, **two).restore()
    assert torch.equal(two["model"].weight, one["model"].weight)
    assert two["optimizer"].state_dict()["param_groups"] == one["optimizer"].state_dict()["param_groups"]
    assert two["schedule"].state_dict() == one["schedule"].state_dict()


def test_a_checkpoint_opens_in_a_notebook(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    train(new_state(tmp_path, model=torch.nn.parallel.DistributedDataParallel(model)), 1)
    saved = torch.load(next(tmp_path.glob("*/state.pt")), weights_only=True)
    torch.nn.Linear(2, 1).load_state_dict(saved["objects"]["model"])


def test_names_that_were_not_declared_are_refused(tmp_path: Path) -> None:
    state = new_state(tmp_path, model=torch.nn.Linear(1, 1))
    with pytest.raises(AttributeError, match=r"no 'bset'; pass it to the constructor: State\(bset=...\)"):
        state.bset = 1.0
    with pytest.raises(AttributeError, match="no 'bset'"):
        state.bset  # noqa: B018
    with pytest.raises(AttributeError, match=r"saves 'model' by its own state"):
        state.model = torch.nn.Linear(1, 1)
    with pytest.raises(AttributeError, match="no 'step'"):
        state.step = 3  # type: ignore[misc]


@pytest.mark.parametrize("options", [{"step": 1}, {"_x": 1}, {"commit": 1}, {"save_every": 0}, {"keep": 0}])
def test_names_and_numbers_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"choose another|of at least 1"):
        new_state(tmp_path, **options)


def _of_deepspeed(name: str, base: type) -> type:
    return type(name, (base,), {"__module__": "deepspeed.runtime.engine"})


def _zero3() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.weight.ds_id = 0  # type: ignore[assignment] - as `deepspeed.zero` marks a parameter of which it keeps a part
    return module


@pytest.mark.parametrize(
    "make",
    [
        _of_deepspeed("DeepSpeedZeroOptimizer", _of_deepspeed("DeepSpeedOptimizer", object)),
        lambda: torch.nn.ModuleList([_of_deepspeed("DeepSpeedEngine", torch.nn.Module)()]),
        lambda: tr.PerRank(_of_deepspeed("DeepSpeedOptimizer", torch.nn.Module)()),
        _zero3,
    ],
    ids=["optimizer", "engine in a module", "of each rank", "module"],
)
def test_a_part_of_deepspeeds_engine_is_refused_by_its_name(tmp_path: Path, make: Callable[[], object]) -> None:
    """DeepSpeed is not installed for tests: these have the names and marks of its own (0.19.8)."""
    with pytest.raises(ValueError, match=r"State cannot save net: got .* of DeepSpeed; give State the engine itself"):
        tr.State(checkpoint_dir=tmp_path, net=make())


def test_what_could_not_be_loaded_is_refused_at_the_first_commit(tmp_path: Path) -> None:
    state = new_state(tmp_path, save_every=1000, paths={"data": tmp_path})
    state.restore()
    with pytest.raises(TypeError, match=r"State cannot save paths\['data'\]"):
        state.commit()


def test_what_could_not_be_loaded_is_refused_at_a_later_save_too(tmp_path: Path) -> None:
    state = new_state(tmp_path)
    train(state, 1)
    state.best = tmp_path
    with pytest.raises(TypeError, match="State cannot save best"):
        state.commit()
    assert steps_saved(tmp_path) == [1]


def test_steps_need_a_restore_first(tmp_path: Path) -> None:
    """Else training would start silently from step 0."""
    with pytest.raises(RuntimeError, match="without looking for a checkpoint"):
        new_state(tmp_path).commit()
    with pytest.raises(RuntimeError, match="without looking for a checkpoint"):
        next(new_state(tmp_path).steps([1]))


@pytest.mark.parametrize(("save_every", "saved"), [(1, [10, 10]), (4, [8, 10]), (5, [10, 10]), (100, [10])])
def test_saves_are_due_by_step_count_and_at_the_end(tmp_path: Path, save_every: int, saved: list[int]) -> None:
    state = new_state(tmp_path, save_every=save_every)
    for _ in state.epochs(2):
        for _ in state.steps(range(5)):
            state.commit()
    assert (steps_saved(tmp_path), state.epoch, state.step) == (saved, 2, 10)


BODIES = {
    "at its end": lambda state, rest: (rest(), state.save()),
    "and more": lambda state, rest: (rest(), state.save(), state.save()),
}


@pytest.mark.parametrize("save_every", [1, 3, 1000])
@pytest.mark.parametrize("body", ["at its end", "and more"])
@pytest.mark.parametrize("killed_in", [0, 1, 2])
def test_a_save_after_the_last_item_closes_the_epoch(
    tmp_path: Path, save_every: int, body: str, killed_in: int
) -> None:
    """What the script did since the last commit is in it, and is not done again; each epoch's end is done once."""

    def run(directory: Path, killed_in: int | None) -> tuple[float, list[int], list[int]]:
        net = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        state = new_state(directory, net=net, opt=opt, schedule=schedule, history=[], save_every=save_every)
        drawn = []
        for epoch in state.epochs(3):
            for item in state.steps(range(3)):
                drawn.append(item)
                opt.step()
                state.commit()

            def rest(epoch: int = epoch) -> None:
                schedule.step()
                state.history = [*state.history, epoch]

            BODIES[body](state, rest)
            if epoch == killed_in:
                break
        return opt.param_groups[0]["lr"], state.history, drawn

    whole = run(tmp_path / "whole", None)
    assert whole[:2] == (0.125, [0, 1, 2])
    before = run(tmp_path / "cut", killed_in)
    after = run(tmp_path / "cut", None)
    assert (after[:2], before[2] + after[2]) == (whole[:2], whole[2])


def test_what_the_last_epochs_body_does_after_its_last_step_is_saved_in_the_end(tmp_path: Path) -> None:
    """Although that step was saved before."""
    state = new_state(tmp_path, save_every=2)
    for _ in state.epochs(1):
        for _ in state.steps(range(4)):
            state.commit()
        settle(state)
        state.best = 0.75
    again = new_state(tmp_path)
    assert list(again.epochs(1)) == []
    assert (again.step, again.best) == (4, 0.75)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [stem_of("local", 1, 4), stem_of("local", 1, 4, 1)]


def test_a_job_that_has_finished_is_not_saved_again(tmp_path: Path) -> None:
    train(new_state(tmp_path), 2)
    for _ in range(2):
        assert list(new_state(tmp_path).epochs(0)) == []
    before = sorted(tmp_path.iterdir())
    again = new_state(tmp_path)
    assert list(again.epochs(again.epoch)) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_save_within_the_loop_or_while_an_error_is_on_its_way_does_not_close_the_epoch(tmp_path: Path) -> None:
    """The step under way may have changed the weights, and the rest of the body may not be done."""
    state = new_state(tmp_path, save_every=1000)

    def train() -> None:
        for _ in state.epochs(2):
            for _ in state.steps(range(3)):
                state.commit()
                state.save()
            try:
                raise ZeroDivisionError
            finally:
                state.save()

    with pytest.raises(ZeroDivisionError):
        train()
    again = new_state(tmp_path)
    again.restore()
    assert (again.step, again.epoch, list(again.steps(range(3)))) == (3, 0, [])


@pytest.mark.parametrize("save_every", [1, 1000])
def test_a_save_within_the_loop_has_what_was_changed_since_the_commit(tmp_path: Path, save_every: int) -> None:
    """Also if that commit has saved the step. Without a change nothing is written again."""
    net = torch.nn.Linear(1, 1)
    state = new_state(tmp_path, save_every=save_every, keep=9, net=net, best_of=[])
    for _ in islice(state.epochs(1), 1):
        for item in islice(state.steps(range(9)), 4):
            state.commit()
            if item == 1:
                state.best = 0.5
                state.save()
            if item == 2:
                state.best_of.append(item)
                state.save()
                with torch.no_grad():
                    net.weight.fill_(3)
            state.save()
            state.save()
    wanted = [1, 2, 3, 3, 4] if save_every > 1 else [1, 2, 2, 3, 3, 3, 4]
    assert steps_saved(tmp_path) == wanted
    again = new_state(tmp_path, net=torch.nn.Linear(1, 1), best_of=[])
    again.restore()
    assert (again.best, again.best_of, again.net.weight.item(), again.step) == (0.5, [2], 3.0, 4)
    assert list(again.steps(range(9))) == [4, 5, 6, 7, 8]


def test_a_large_value_that_was_changed_in_place_or_replaced_is_saved_again(tmp_path: Path) -> None:
    """Large tensors are not read to see that: the same object with the same version is unchanged."""
    state = new_state(tmp_path, save_every=1, keep=9, weights={"w": torch.zeros(100_000)})
    for _ in islice(state.epochs(1), 1):
        for item in islice(state.steps(range(9)), 3):
            state.commit()
            if item == 1:
                state.weights["w"].add_(1.0)
            if item == 2:
                state.weights = {"w": torch.full((100_000,), 5.0)}
            state.save()
            state.save()
    assert steps_saved(tmp_path) == [1, 2, 2, 3, 3]
    again = new_state(tmp_path, weights={"w": torch.zeros(100_000)})
    again.restore()
    assert (again.step, again.weights["w"].unique().tolist()) == (3, [5.0])


def test_a_save_within_the_next_step_leaves_the_saved_one_as_it_is(tmp_path: Path) -> None:
    """That step may have changed the weights."""
    state = new_state(tmp_path, keep=9)
    for _ in islice(state.epochs(1), 1):
        for item in state.steps(range(3)):
            state.best = item
            if item == 2:
                state.save()
                break
            state.commit()
            try:
                _ = 1 / 0
            except ZeroDivisionError:
                state.best = -1.0
                state.save()
    assert steps_saved(tmp_path) == [1, 2]


def test_leaving_early_saves_only_on_request(tmp_path: Path) -> None:
    state = new_state(tmp_path, save_every=100)
    for _ in state.epochs(2):
        state.commit()
        break
    assert steps_saved(tmp_path) == []
    state.save()
    assert steps_saved(tmp_path) == [1]


def run_until(state: tr.State, stop_at: int | None) -> list[tuple[int, int]]:
    """Train 2 epochs of 4 items; return what was drawn; stop with the item of step `stop_at` not committed."""
    drawn = []
    for epoch in state.epochs(2):
        for item in state.steps(iter(range(4))):
            drawn.append((epoch, item))
            if state.step == stop_at:
                settle(state)
                return drawn
            state.commit()
    return drawn


@pytest.mark.parametrize("stop_at", range(9))
def test_after_a_restart_each_item_is_committed_once(tmp_path: Path, stop_at: int) -> None:
    first = run_until(new_state(tmp_path), stop_at)[:stop_at]
    rest = run_until(new_state(tmp_path), None)
    assert first + rest == [(epoch, item) for epoch in range(2) for item in range(4)]


def in_disguise(loader: tr.DataLoader) -> Iterator[Any]:
    """As tqdm does."""
    yield from loader


WRAPPED: dict[str, Callable[[tr.DataLoader], Iterable[Any]]] = {
    "enumerate": enumerate,
    "zip": lambda loader: zip(loader, range(4), strict=True),
    "islice": lambda loader: islice(loader, 4),
    "generator": in_disguise,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("stop_at", range(9))
def test_so_is_each_item_of_a_loader_that_is_wrapped(
    tmp_path: Path, wrap: Callable[[tr.DataLoader], Iterable[Any]], stop_at: int
) -> None:
    """It begins with the order of the epoch at which training is, not with that of its first one."""

    def run(directory: Path, stop_at: int | None) -> list[str]:
        loader, drawn = tr.DataLoader(range(4), global_batch=1), []  # type: ignore[arg-type] # it has what is needed
        state = new_state(directory, data=loader)
        for epoch in state.epochs(2):
            for item in state.steps(wrap(loader)):
                drawn.append(f"{epoch} {item}")
                if state.step == stop_at:
                    settle(state)
                    return drawn
                state.commit()
        return drawn

    whole = run(tmp_path / "whole", None)
    assert [line[1:] for line in whole[:4]] != [line[1:] for line in whole[4:]], "else it would not show"
    assert run(tmp_path / "cut", stop_at)[:stop_at] + run(tmp_path / "cut", None) == whole


def test_several_items_in_one_step_are_committed_together(tmp_path: Path) -> None:
    state = new_state(tmp_path)
    state.restore()
    for item in state.steps(range(10)):
        if item in (1, 3):
            state.commit()
        if item == 4:
            break
    settle(state)
    again = new_state(tmp_path)
    again.restore()
    assert (again.step, list(again.steps(range(10)))) == (2, [4, 5, 6, 7, 8, 9])


def test_what_the_body_does_to_the_state_before_its_steps_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The body of an interrupted epoch begins again, but its state is that of the last commit."""

    def train(directory: Path, stop_at: int = 0) -> tuple[object, ...]:
        net = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        sums: list[int] = []
        state = new_state(directory, net=net, opt=opt, schedule=schedule, heat=1.0, running=0, sums=sums, net_seen={0})
        for epoch in state.epochs(3):
            opt.step()
            schedule.step()
            state.heat *= 0.5
            state.running = 0
            state.net_seen.add(epoch)
            for item in state.steps(range(4)):
                state.running += item
                state.commit()
                if state.step == stop_at:
                    settle(state)
                    return ()
            sums.append(state.running)
        return state.heat, sums, opt.param_groups[0]["lr"], state.net_seen

    wanted = train(tmp_path / "whole")
    capsys.readouterr()
    assert wanted == (0.125, [6, 6, 6], 0.125, {0, 1, 2})
    train(tmp_path / "again", 6)
    assert train(tmp_path / "again", 7) == ()
    assert "epoch 1 changed State's opt, schedule, heat, running before state.steps()" in capsys.readouterr().err
    assert train(tmp_path / "again") == wanted


def test_a_commit_without_an_item_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a restart between the two commits of an item the item counts as done. So does one that was drawn ahead."""
    state = new_state(tmp_path)
    for _ in state.epochs(2):
        for item in state.steps(range(4)):
            if item != 1:  # two items for a step are fine
                state.commit()
    assert "commit()" not in capsys.readouterr().err
    state = new_state(tmp_path / "twice")
    for _ in state.epochs(1):
        for _ in state.steps(range(4)):
            state.commit()
            state.commit()
    assert capsys.readouterr().err.count("no item was drawn from state.steps() since") == 1


@pytest.mark.parametrize("way", ["before", "after", "saved", "weights"])
def test_what_changes_after_the_first_commit_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """A restart at that commit leaves it out."""
    net = torch.nn.Linear(1, 1)
    state = new_state(tmp_path, seen=0, net=net, save_every=1000)
    for _ in state.epochs(1):
        for _ in state.steps(range(3)):
            if way == "before":
                state.seen += 1
            state.commit()
            if way in ("after", "saved"):
                state.seen += 1
            if way == "saved":
                state.save()
            if way == "weights":
                with torch.no_grad():
                    net.weight.clamp_(-1, 1)
    said = {"after": "State's seen changed between commit()", "weights": "State's net changed between commit()"}
    err = capsys.readouterr().err
    assert err.count("between commit() and the next item") == (way in said)
    assert said.get(way, "") in err


def test_a_source_that_has_become_shorter_than_what_is_committed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = new_state(tmp_path)
    for _ in islice(state.epochs(1), 1):
        for _ in islice(state.steps(range(5)), 4):
            state.commit()
    settle(state)
    again = new_state(tmp_path)
    again.restore()
    assert list(again.steps(range(3))) == []
    assert "a range of 3 items in an epoch of which 4 are committed" in capsys.readouterr().err


def test_steps_is_used_once_per_epoch(tmp_path: Path) -> None:
    state = new_state(tmp_path)
    for _ in state.epochs(2):
        list(state.steps(range(2)))
        with pytest.raises(RuntimeError, match="already used in epoch"):
            next(state.steps(range(2)))


def test_a_loop_over_epochs_within_another_one_is_refused(tmp_path: Path) -> None:
    """Both would count the same epochs, and the outer one end early."""
    state = new_state(tmp_path)
    for _ in state.epochs(2):
        with pytest.raises(RuntimeError, match="within a loop over it"):
            next(state.epochs(3))
        break
    assert next(state.epochs(3)) == 0


def test_a_finished_training_takes_no_further_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_until(new_state(tmp_path), None)
    assert "no step is left to make" not in capsys.readouterr().err
    assert run_until(new_state(tmp_path), None) == []
    assert "no step is left to make: all 2 epochs are trained already, in 8 steps" in capsys.readouterr().err


def test_hooks_write_and_read_next_to_the_checkpoint(tmp_path: Path) -> None:
    state, loaded = new_state(tmp_path), []

    @state.on_save
    def save_words(path: Path) -> None:
        (path / "words.txt").write_text("hello")

    train(state, 1)
    again = new_state(tmp_path)

    @again.on_load
    def load_words(path: Path) -> None:
        loaded.append((path.relative_to(tmp_path).as_posix(), (path / "words.txt").read_text(), again.step))

    again.restore()
    again.restore()
    assert loaded == [("local-g000001-s000000001/extra", "hello", 1)]
    with pytest.raises(RuntimeError, match="on_load comes too late"):
        again.on_load(load_words)


def test_on_load_is_not_called_where_nothing_was_written(tmp_path: Path) -> None:
    train(new_state(tmp_path), 1)
    again, called = new_state(tmp_path), []
    again.on_load(called.append)
    again.restore()
    assert (again.step, called) == (1, [])


def test_a_state_made_of_other_things_is_refused(tmp_path: Path) -> None:
    train(new_state(tmp_path), 1)
    with pytest.raises(ValueError, match=r"holds \['best'\], this State is made of \['best', 'more'\]"):
        new_state(tmp_path, more=1).restore()


def test_a_failing_disk_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    state = new_state(tmp_path)
    train(state, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        state.commit()
        settle_failed(state)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"step 2 was NOT saved in {tmp_path}: [Errno 28] No space left on device; what was saved" in line
        with pytest.raises(OSError, match="No space left"):
            state.save()
    assert steps_saved(tmp_path) == [1]
    state.commit()
    settle(state)
    assert steps_saved(tmp_path) == [1, 3]


def test_the_agents_variables_name_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.RUN_ID, "r1")
    monkeypatch.setenv(contract.GROUP, "12")
    monkeypatch.setenv(contract.CHECKPOINT_DIR, str(tmp_path))
    state = tr.State(save_every=1)
    train(state, 1)
    assert state.group == 12
    assert (tmp_path / "r1-g000012-s000000001" / "manifest.json").exists()


def test_a_fresh_start_leaves_other_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(new_state(tmp_path), 3)
    monkeypatch.setenv(contract.RUN_ID, "new")
    monkeypatch.setenv(contract.FRESH, "1")
    fresh = new_state(tmp_path)
    train(fresh, 1)
    assert (fresh.step, steps_saved(tmp_path)) == (1, [1, 2, 3])


def test_the_control_page_shows_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, descriptor = contract.ControlPage.create("test")
    monkeypatch.setenv(contract.CONTROL_FD, str(descriptor))
    state = new_state(tmp_path)
    train(state, 2)
    assert page.step == 2
    again = new_state(tmp_path)
    page.step = 0
    again.restore()
    assert page.step == 0  # nothing committed in this group yet
    again.commit()
    assert page.step == 3
    os.close(descriptor)


def test_a_control_page_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("elastic-agent:page")
    os.ftruncate(descriptor, contract.PAGE_BYTES)
    monkeypatch.setenv(contract.CONTROL_FD, str(descriptor))
    with pytest.raises(RuntimeError, match="the agent made version 0; install the same"):
        new_state(tmp_path)
    os.close(descriptor)


def test_a_commit_with_nothing_due_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = new_state(tmp_path, save_every=100)
    train(state, 1)
    monkeypatch.setattr(writer.Writer, "write", None)
    monkeypatch.setattr(torch, "save", None)
    for _ in range(98):
        state.commit(loss=torch.ones(1))
    assert state.step == 99
