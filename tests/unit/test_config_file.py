"""`--config`: options of the command line from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from agent.cli.command_line import COMMANDS, run
from agent.cli.commands import scale, status
from agent.errors import ConfigError

JOB = """
job_id = "resnet"
elastic-server = "etcd:2379"
np = 2
detect_within = 7.5
fresh = true
ips = ["10.0.0.1", "10.0.0.2"]
rdzv_id = "other"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace('rdzv_id = "other"\n', ""))
    return path


def given(command: click.Command, *arguments: str) -> dict[str, Any]:
    return command.make_context(command.name, list(arguments)).params


def test_options_are_read_from_the_file_as_from_the_command_line(file: Path) -> None:
    options = given(run, f"--config={file}", "train.py", "--np=7")
    assert options["command"] == ("train.py", "--np=7")
    assert (options["job_id"], options["elastic_server"], options["np"]) == ("resnet", "etcd:2379", "2")
    assert (options["detect_within"], options["fresh"], options["ips"]) == (7.5, True, "10.0.0.1,10.0.0.2")
    assert options["max_restarts"] == 10, "its own default"


def test_the_command_line_and_variables_win(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_NP", "3")
    options = given(run, f"--config={file}", "--job_id=mine", "train.py")
    assert (options["job_id"], options["np"], options["elastic_server"]) == ("mine", "3", "etcd:2379")


def test_the_file_may_be_named_by_a_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_CONFIG", str(file))
    assert given(run, "train.py")["job_id"] == "resnet"


def test_a_command_about_a_job_takes_only_which_job_it_is(file: Path) -> None:
    """The np of the file is the one that the job began with: no wish to change it."""
    assert given(status, f"--config={file}")["job_id"] == "resnet"
    options = given(scale, f"--config={file}")
    assert (options["elastic_server"], options["np"]) == ("etcd:2379", None)
    assert "config" in {parameter.name for parameter in COMMANDS["doctor"].params}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('max_restart = "2"', "max_restart is no option: did you mean max_restarts"),
        ("what_is_this = 1", "what_is_this is no option: see elastic-agent help all"),
        ('config = "other.toml"', "config is no option"),
        ("np = ", "cannot be read: .*; wanted TOML as in: np = 2"),
        ("[job]\nnp = 2", r"options stand at the top level, not in a table: \[job\]"),
        ("[np]\nmin = 2", "np must be a text, a number, true, false or a list of texts, not {'min': 2}"),
        (JOB, "rdzv_id and another line set the same option: keep one"),
        ('job_id = ""', "--job_id is empty"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        given(run, f"--config={path}", "train.py")
    assert "\n" not in str(caught.value).strip()


def test_a_wrong_value_is_refused_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for value, shown in (('"many"', "many"), ("1.5", "1.5")):
        path.write_text(f"max_restarts = {value}")
        with pytest.raises(click.BadParameter, match=f"'{shown}' is not a valid integer"):
            given(run, f"--config={path}", "train.py")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file or directory"):
        given(run, f"--config={tmp_path}/none.toml", "train.py")
    with pytest.raises(ConfigError, match="--config is empty"):
        given(run, "--config=", "train.py")
