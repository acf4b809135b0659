"""`elastic-agent rehearse` on real scripts: what a script leaves out of State is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cases import some
from waiting import has_ended, wait_for

from agent.cli.command_line import main
from agent.observe.stderr import standard_error
from agent.rehearse.command import rehearse as rehearse_script

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).parent / "rehearsal"
EXAMPLES = ROOT / "examples"


def rehearse(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in a directory of its own; return its exit code and its output."""
    argv = [sys.executable, "-m", "agent", "rehearse", *arguments]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=500, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


LEFT_OUT = [
    ("no_optimizer", "the optimizer (AdamW `opt`) is not in State", "state = tr.State(…, opt=opt)"),
    ("no_scheduler", "the scheduler (StepLR `sched`) is not in State", "state = tr.State(…, sched=sched)"),
    ("no_scaler", "the scaler (GradScaler `scaler`) is not in State", "state = tr.State(…, scaler=scaler)"),
    ("no_random_state", "the random state (Generator `noise`) is not in State", "state = tr.State(…, noise=noise)"),
    ("no_data_position", "the data position is not in State", "for batch in state.steps(batches):"),
    ("no_epoch", "the epoch is not in State", "for epoch in state.epochs(…):"),
    ("average", "the module (AveragedModel `ema`) is not in State", "state = tr.State(…, ema=ema)"),
]


@pytest.mark.parametrize(("script", "finding", "fix"), some(LEFT_OUT[:1], of=LEFT_OUT))
def test_an_object_left_out_of_state_is_reported(tmp_path: Path, script: str, finding: str, fix: str) -> None:
    """It is the only one, and the line that fixes it is printed."""
    code, text = rehearse(tmp_path, str(PLANTED / f"{script}.py"))
    found = [line for line in text.splitlines() if line.startswith("MISSING")]
    assert len(found) == 1, text
    assert finding in found[0]
    assert fix in text
    assert code == 1


@pytest.mark.parametrize(
    "script",
    some([], of=[EXAMPLES / "train_digits.py", PLANTED / "whole.py"]),
    ids=lambda path: path.stem,
)
def test_nothing_is_missing_in_a_script_that_saves_all(tmp_path: Path, script: Path) -> None:
    """After a worker kill, a node kill and two resizes; no file is left in the user's directory."""
    code, text = rehearse(tmp_path, str(script))
    assert "nothing is missing" in text, text
    for fault in ("worker killed", "node lost and replaced", "resize 2 -> 1", "resize 1 -> 2"):
        assert f"\n{fault}: at step" in text
    assert code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long("integration/test_rehearse_recording.py")
def test_two_optimizers_and_no_seed_give_no_false_alarm(tmp_path: Path) -> None:
    """A step is the time between two commits, and the rehearsal seeds what the script does not."""
    code, text = rehearse(tmp_path, str(PLANTED / "two_models.py"))
    assert "nothing is missing" in text, text
    assert "not seeded by the script: torch; the rehearsal seeds it" in text
    assert code == 0


@pytest.mark.long("integration/test_rehearse_recording.py")
def test_a_checkpoint_that_is_overwritten_in_place_is_reported(tmp_path: Path) -> None:
    """It is the only finding; the step that creates the optimizer's state does not count."""
    code, text = rehearse(tmp_path, str(PLANTED / "own_checkpoint.py"))
    assert "worker killed: at step 14, it resumed after step 10, 3 steps replayed" in text, text
    missing = [line for line in text.splitlines() if line.startswith("MISSING")]
    assert len(missing) == 1, text
    assert "checkpoint.pt is overwritten in place" in missing[0]
    assert code == 1


@pytest.mark.long("unit/test_rehearse_report.py")
def test_a_script_that_saves_nothing_gets_the_cost_of_each_fault(tmp_path: Path) -> None:
    """And the lines that would avoid it, with the script's own names."""
    code, text = rehearse(tmp_path, str(PLANTED / "plain.py"))
    assert "\nworker killed: at step 14, it started again at step 1, 13 steps replayed" in text
    assert "\nnode lost and replaced: at step 6, it started again at step 1, 5 steps replayed" in text
    assert "state = tr.State(net=net, optimizer=optimizer)" in text
    assert code == 1


@pytest.mark.long
def test_a_scripts_own_checkpoint_is_recognised(tmp_path: Path) -> None:
    """By the weights with which it resumes; it does not get into the user's directory."""
    code, text = rehearse(tmp_path, str(EXAMPLES / "plain_ddp.py"))
    assert "it resumed after step 30, 10 steps replayed" in text, text
    assert "nothing is missing, but steps are replayed" in text
    assert code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_is_not_deterministic_is_reported(tmp_path: Path) -> None:
    code, text = rehearse(tmp_path, str(PLANTED / "unseeded.py"))
    assert "Two undisturbed runs differ from step 1 on: the inputs of the model" in text
    assert "MISSING" not in text
    assert code == 1


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys\nsys.exit('no such data')\n", "the script fails by itself, undisturbed (exit code 1)"),
        ("print('no such data')\n", "the script ended without an optimizer step"),
    ],
    ids=["fails", "no step"],
)
def test_the_output_of_a_script_that_cannot_be_rehearsed_is_shown(tmp_path: Path, script: str, said: str) -> None:
    """The script is found by a path relative to the user's directory."""
    (tmp_path / "train.py").write_text(script)
    code, text = rehearse(tmp_path, "train.py")
    assert said in text
    assert "no such data" in text
    assert code == 1


def test_a_state_without_commits_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch, trainer_runtime as tr
tr.init()
net = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = tr.State(net=net, opt=opt)
for epoch in state.epochs(1):
    for _ in state.steps(range(20)):
        net(torch.ones(2, 1)).sum().backward()
        opt.step()
"""
    )
    code, text = rehearse(tmp_path, "train.py")
    assert "does not call state.commit() after each step" in text
    assert code == 1


def test_a_rehearsal_of_a_script_without_steps_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agent.rehearse.rehearsal.FIRST_STEP_S", 25.0)
    (tmp_path / "train.py").write_text("import time\nprint('thinking', flush=True)\ntime.sleep(300)\n")
    assert rehearse_script(("train.py",), 2, None) == 1
    text = capsys.readouterr().out
    assert "given up: no optimizer step by all of 2 ranks after group 0 within 25 s" in text
    assert "thinking" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rehearse"], "no script was given"),
        (["rehearse", "absent.py"], "no script 'absent.py' in"),
        (["rehearse", "--np=0", "x.py"], "Invalid value for '--np'"),
    ],
)
def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    standard_error().flush()
    assert said in capfd.readouterr().err


def living(mark: str) -> list[psutil.Process]:
    """Return the living processes with this value in their environment, which descendants inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().values() and not has_ended(process.pid):
                found.append(process)
    return found


@pytest.mark.parametrize("number", some([signal.SIGTERM], of=[signal.SIGTERM, signal.SIGHUP]))
@pytest.mark.parametrize("argv", [["-m", "agent", "rehearse", "train.py"], [str(ROOT / "scripts" / "demo.py")]])
def test_a_signal_ends_all_started_processes(tmp_path: Path, argv: list[str], number: signal.Signals) -> None:
    """Agents run in sessions of their own, and must end if a terminal is closed or a job is cancelled."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    environ = {**os.environ, "TEST_MARK": (mark := f"{tmp_path}-{uuid.uuid4()}"), "TMPDIR": str(tmp_path)}
    command = ["env", "--default-signal=HUP", sys.executable, *argv]  # under nohup it would be ignored, as it should be
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE) as process:
        wait_for(lambda: any("--node_id" in word for each in living(mark) for word in each.cmdline()), "an agent")
        process.send_signal(number)
        assert process.wait(120.0) == 128 + number
    assert [each.cmdline() for each in living(mark)] == []
