"""Roles in the environment, and arguments of the functions for scripts, are validated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_runtime import ps
from trainer_runtime.ps.roles import role_of

ROOT = Path(__file__).parents[2]
WORKER = {"TRAINING_ROLE": "TRAINER", "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6170", "PADDLE_TRAINERS_NUM": "2"}


def test_a_worker_index_is_below_the_number_of_workers() -> None:
    assert role_of({**WORKER, "PADDLE_TRAINER_ID": "1"}).index == 1
    with pytest.raises(RuntimeError, match="PADDLE_TRAINER_ID must be from 0 to 1, as PADDLE_TRAINERS_NUM is 2, not 2"):
        role_of({**WORKER, "PADDLE_TRAINER_ID": "2"})


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    described = {**WORKER, "PADDLE_TRAINER_ID": "0"}
    assert role_of({**described, "ELASTIC_AGENT_PS_SECRET": "0123456789abcdef"}).secret == b"0123456789abcdef"
    assert role_of({**described, "ELASTIC_AGENT_PS_SECRET": ""}).secret == b"", "an empty secret counts as not set"
    with pytest.raises(RuntimeError, match="ELASTIC_AGENT_PS_SECRET must have 16 characters or more, not 6") as refused:
        role_of({**described, "ELASTIC_AGENT_PS_SECRET": "hunter"})
    assert "hunter" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_process_with_a_short_secret_ends_with_one_line(tmp_path: Path) -> None:
    """The secret is set by hand, where no agent starts the processes."""
    script = "from trainer_runtime import ps\nps.init()\n"
    variables = {**WORKER, "PADDLE_TRAINER_ID": "0", "ELASTIC_AGENT_PS_SECRET": "hunter", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    [line] = done.stderr.splitlines()
    assert "ELASTIC_AGENT_PS_SECRET must have 16 characters or more, not 6" in line
    assert (done.returncode, done.stdout, "hunter" in line) == (2, "", False)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda: next(ps.data_parts(10.0)), TypeError),
        (lambda: next(ps.data_parts("10")), TypeError),
        (lambda: next(ps.data_parts(-1)), ValueError),
        (lambda: next(ps.data_parts(1 << 25)), ValueError),
        (lambda: next(ps.data_parts(3, name=5)), TypeError),
        (lambda: ps.shrink(86400.0), TypeError),
        (lambda: ps.shrink(-1), ValueError),
        (lambda: ps.shrink(1 << 63), ValueError),
    ],
)
def test_invalid_arguments_are_not_sent(ask: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"must be"):
        ask()
