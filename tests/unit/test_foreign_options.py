"""Lines copied from the documentation of torchrun and Paddle: options that are accepted with a warning, or refused."""

from __future__ import annotations

from typing import Any

import click
import pytest

from agent.cli import command_line
from agent.cli.foreign_options import advice, apply_foreign_options
from agent.errors import ConfigError

Said = tuple[dict[str, Any], str]


def read(line: str, **environ: str) -> Said:
    """The options of a line, and the warning about it."""
    arguments = command_line.expand_prefixes(line.split())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with command_line.run.make_context("elastic-agent", list(arguments), obj=arguments) as context:
            return apply_foreign_options(dict(context.params), environ)


@pytest.mark.parametrize(
    ("line", "unused"),
    [
        ("--standalone --nnodes=1:1 train.py", []),
        ("--rdzv_backend c10d --rdzv_endpoint=localhost:0 train.py", ["--rdzv_backend", "--rdzv_endpoint"]),
        ("--nnodes=1 --rdzv_id=7 --rdzv-backend=c10d --rdzv-endpoint=h:1 t.py", ["--rdzv_backend", "--rdzv_endpoint"]),
        ("--master_port=29501 train.py --master_addr=x", ["--master_port"]),
        ("--nnodes=2 --ips=a,b --master_addr=a --master-port 1 --node-rank 1 t.py", ["--master_addr", "--master_port"]),
        ("--run-path --use_env --nproc-per 2 t.py", ["--run_path", "--use_env"]),
        ("--monitor-interval=5 --start-method spawn --rdzv-conf=timeout=9 t.py", ["--monitor_interval", "--rdzv_conf"]),
    ],
)
def test_what_changes_nothing_is_taken_with_one_warning(line: str, unused: list[str]) -> None:
    _, warning = read(line)
    assert all(name in warning for name in unused)
    assert bool(warning) == bool(unused)


def test_one_node_with_a_given_rendezvous_address_needs_no_etcd() -> None:
    options, _ = read("--nnodes=1 --rdzv_id=7 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 train.py")
    assert (options["standalone"], options["job_id"]) == (True, "7")
    options, _ = read("--rdzv_id=7 --elastic_server=e:2379 --rdzv_backend=c10d train.py")
    assert not options["standalone"]
    options, _ = read("--job_id=7 train.py", PET_RDZV_BACKEND="c10d")
    assert not options["standalone"], "it may be set for another program"
    options, _ = read("train.py", PET_RDZV_BACKEND="c10d", PET_RDZV_ID="7")
    assert (options["standalone"], options["job_id"]) == (True, "7")
    for name in ("PET_RDZV_ID", "PADDLE_JOB_ID"):
        options, _ = read("train.py", **{name: "7"})
        assert (options["standalone"], options["job_id"]) == (True, "7")
    options, _ = read("--rdzv-id=7 train.py")
    assert (options["standalone"], options["job_id"]) == (True, "7")
    for line in ("--job_id=7 train.py --rdzv_id=7", "--rdzv_id=7 --np=1:2 train.py", "--rdzv_id=7 --ips=a,b train.py"):
        options, _ = read(line)
        assert not options["standalone"], line
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}
    options, _ = read("--rdzv_backend=c10d train.py", **slurm)
    assert not options["standalone"], "Slurm tells the nodes"


def test_all_refused_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        read("--np=2 --rdzv-endpoint=a:1 --rdzv-backend c10d --shutdown-timeout=3 --logs-specs=x --selected_gpus=0 t")
    told = str(raised.value)
    assert "--logs_specs is another launcher's: use --log_dir" in told
    assert "--shutdown_timeout is another launcher's: use --stop_grace" in told
    assert "--selected_gpus is another launcher's: use --gpus" in told
    assert "--rdzv_backend, --rdzv_endpoint are another launcher's: agents meet in etcd: give --elastic_server" in told


def test_a_flag_of_paddle_that_has_no_effect_is_reported() -> None:
    _, warning = read("t.py", FLAGS_check_nan_inf="1")
    assert warning.startswith("not used: FLAGS_check_nan_inf (State(check_finite=True) looks at weights")
    assert read("t.py", FLAGS_check_nan_inf="0")[1] == ""


def test_the_same_goes_for_torchrun_s_variables() -> None:
    """Also for a misspelled one, which belongs to no option of torchrun."""
    _, warning = read("t.py", PET_MASTER_PORT="1", PET_RDZV_BACKEND="c10d", PET_NPROC_PER_NODE="2", PET_NPROC="2")
    assert warning == (
        "not used: PET_MASTER_PORT (a free one is taken for each group); PET_RDZV_BACKEND (agents meet in etcd); "
        "PET_NPROC (torchrun has no such option)"
    )
    with pytest.raises(ConfigError, match="PET_SHUTDOWN_TIMEOUT is another launcher's: use --stop_grace"):
        read("t.py", PET_SHUTDOWN_TIMEOUT="3")


def test_newer_names_of_paddle_s_launcher() -> None:
    options, warning = read("--server_num=1 --trainer_num=2 --gloo_port=7 --run_mode=ps --log_overwrite=1 t.py")
    assert (options["worker_num"], options["http_port"]) == (2, 7)
    assert "--run_mode (--servers or --server_num asks for parameter servers)" in warning
    assert read("--trainers=a,b t.py")[0]["workers"] == "a,b"
    with pytest.raises(ConfigError, match="--endpoints is another launcher's: use --servers"):
        read("--endpoints=a:1 t.py")
    options, warning = read(
        "t.py", PADDLE_NNODES="1", PADDLE_MAX_RESTART="3", PADDLE_LOG_DIR="l", PADDLE_JOB_ID="x", PADDLE_MASTER="h:1"
    )
    assert (options["np"], options["max_restarts"], options["log_dir"], options["job_id"]) == ("1", 3, "l", "x")
    assert (options["standalone"], warning) == (True, "not used: PADDLE_MASTER (agents meet in etcd)")
    with pytest.raises(ConfigError, match="PADDLE_MASTER is another launcher's: agents meet in etcd"):
        read("t.py", PADDLE_NNODES="2", PADDLE_MASTER="h:1")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("t.py --np=2", "--np=2 is passed to t.py; options of elastic-agent come before the script"),
        ("t.py --max-restarts 3 --np=2", "--max-restarts, --np=2 are passed to t.py; options of elastic-agent come"),
        ("--nnodes=1 t.py --np=2", ""),
        ("t.py --lr=1 --gpus=2 --tee=3", ""),
        ("t.py -- --np=2", ""),
        ("--no-python mpirun --np=2", ""),
    ],
)
def test_an_option_of_ours_behind_the_script_is_noted(line: str, found: str) -> None:
    with command_line.run.make_context("elastic-agent", line.split(), obj=line.split()) as context:
        passed = command_line._passed_to_script(context.params)
    assert passed.startswith(found)
    assert bool(passed) == bool(found)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--redirect=3 t.py", "redirects", "3"),
        ("--nproc-per 4 t.py", "nproc_per_node", "4"),
        ("--max-r=2 t.py", "max_restarts", 2),
        ("--standa t.py --standa", "standalone", True),
        ("--tee 3 --local-ranks=0 t.py", "local_ranks_filter", "0"),
    ],
)
def test_an_unambiguous_beginning_of_an_option_is_that_option(line: str, name: str, value: object) -> None:
    options, _ = read(line)
    assert options[name] == value


def test_an_ambiguous_one_is_asked_about() -> None:
    with pytest.raises(
        ConfigError, match="--rdzv may be --rdzv_backend or --rdzv_conf or --rdzv_endpoint or --rdzv_id"
    ):
        read("--rdzv=x t.py")
    with pytest.raises(click.NoSuchOption):
        read("--nonsense t.py")


def test_advice_is_by_any_spelling() -> None:
    assert advice("--shutdown-timeout") == advice("shutdown_timeout") == "use --stop_grace"
    assert advice("--np") is None


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        ("--elastic_server=h:1 --np=2 --job_id=x train.py", False),
        ("--ips=a,b train.py", True),
        ("--standalone --nproc-per-node=2 train.py --np=3", False),
        ("train.py", False),
    ],
)
def test_the_banner_is_printed_for_the_command_names_of_paddles_launcher(line: str, is_shown: bool) -> None:  # noqa: FBT001 - what is expected
    arguments = line.split()
    with command_line.run.make_context("elastic-agent", arguments, obj=line.split()) as context:
        assert command_line._has_paddle_names(context.params) == is_shown
