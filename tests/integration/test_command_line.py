"""The command line as users type it: Paddle's lines literally, and what a mistake is answered with."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cases import some
from integration.conftest import PATIENCE_S

from agent.children import at_parents_end
from agent.cli.command_line import run
from agent.rehearse.cluster import wait_for

BIN = Path(sys.executable).parent
TRAIN = """
import os, sys, time
print("args", sys.argv[1:], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if "--wait" in sys.argv:
    while not os.path.exists("stop"):
        time.sleep(0.01)
"""

CALM = {"ELASTIC_AGENT_DETECT_WITHIN": "20", "ELASTIC_AGENT_SETTLE": "1"}
"""A node that a busy machine stops for some seconds is not lost."""

# A literal 127.0.0.1:2379 needs that port: each such test has a network of its own, with nothing but loopback in it.
UNSHARE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]


class Host:
    """A network namespace with an etcd on 127.0.0.1:2379, and a directory with the scripts."""

    def __init__(self, directory: Path, stack: ExitStack, etcd_command: str) -> None:
        self.directory = directory
        self.stack = stack
        # Where jobs of this machine with an etcd of their own would be found.
        self.places = dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR"), stack.enter_context(TemporaryDirectory(dir="/tmp")))
        self.keeper = self._popen([*UNSHARE, "sh", "-c", f"ip link set lo up && exec {etcd_command}"], {})

    def _popen(self, argv: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "ELASTIC_AGENT_", "POD_IP"))}
        process = subprocess.Popen(
            argv,
            cwd=self.directory,
            env={**plain, "PATH": f"{BIN}:{plain['PATH']}", **self.places, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=at_parents_end(signal.SIGKILL),  # noqa: PLW1509 - it calls nothing that takes a lock
        )
        self.stack.callback(_end, process)
        return process

    def start(self, line: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command line, as typed, in this network."""
        enter = ["nsenter", f"--target={self.keeper.pid}", "--net"]
        if os.geteuid() != 0:
            enter[1:1] = ["--user", "--preserve-credentials"]
        return self._popen([*enter, "--", *shlex.split(line)], environ)

    def run(self, line: str, **environ: str) -> tuple[int, str]:
        """Run a command line to its end; return its exit code and all that it printed."""
        process = self.start(line, **environ)
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def wait_for_etcd(self) -> None:
        assert self.keeper.stdout is not None
        for line in self.keeper.stdout:  # it prints its endpoint once it answers
            if line.strip() == "127.0.0.1:2379":
                return
        raise AssertionError("etcd did not start in a network of its own")

    def stop_training(self) -> None:
        (self.directory / "stop").touch()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def a_host(directory: Path) -> Iterator[Host]:
    for name in ("train.py", "train_fleet_dygraph_ckpt.py"):
        (directory / name).write_text(TRAIN)
    with ExitStack() as stack:
        etcd = f"{shlex.quote(sys.executable)} -m agent.local_etcd.embedded --port 2379 --data_dir {directory}/etcd"
        host = Host(directory, stack, etcd)
        host.wait_for_etcd()
        yield host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path) as running:
        yield running


def status(host: Host, **environ: str) -> dict[str, object]:
    code, output = host.run("elastic-agent status --json", **environ)
    found: dict[str, object] = json.loads(output) if code == 0 else {}
    return found


def wait_for_training(host: Host, world_size: int, **environ: str) -> None:
    wait_for(lambda: status(host, **environ).get("world_size") == world_size, PATIENCE_S, f"a world of {world_size}")


def test_the_two_lines_of_the_readme(host: Host) -> None:
    """Two terminals with one line, then `scale` with nothing but np."""
    line = "elastic-agent --elastic_server=127.0.0.1:2379 --np=2 --job_id=X train.py --wait"
    agents = [host.start(line, **CALM), host.start(line, **CALM)]
    wait_for_training(host, 2)
    assert host.run("elastic-agent scale --np=4") == (0, "job X: np 2 -> 4 (2 nodes there; 2 more needed)\n")
    agents += [host.start(line, **CALM), host.start(line, **CALM)]
    wait_for_training(host, 4)
    host.stop_training()
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * 4
    assert any("[rank0]: args ['--wait'] rank 0 of 4" in output for output in outputs)


@pytest.mark.long("test_an_example_of_the_docs, test_a_line_for_one_machine in test_launcher.py")
def test_paddle_s_lines_literally(host: Host) -> None:
    """paddle_elastic.txt, with elastic-agent in place of its launcher."""
    run = "elastic-agent --elastic_server=127.0.0.1:2379 --np=2 --job_id=XXXXXX train_fleet_dygraph_ckpt.py --wait"
    agents = [host.start(run, **CALM), host.start(run, **CALM)]
    wait_for_training(host, 2)
    code, output = host.run("elastic-agent --elastic_server=127.0.0.1:2379 --np=4 --job_id=XXXXXX scale")
    assert (code, output) == (0, "job XXXXXX: np 2 -> 4 (2 nodes there; 2 more needed)\n")
    run4 = "elastic-agent --elastic_server=127.0.0.1:2379 --np=4 --job_id=XXXXXX train_fleet_dygraph_ckpt.py --wait"
    agents += [host.start(run4, **CALM), host.start(run4, **CALM)]
    wait_for_training(host, 4)
    as_module = "python -m agent.elastic --elastic_server=127.0.0.1:2379 --np=3 --job_id=XXXXXX scale"
    assert host.run(as_module) == (0, "job XXXXXX: np 4 -> 3 (4 nodes there)\n")
    wait_for_training(host, 3)
    host.stop_training()
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0] * 4


@pytest.mark.long("test_paddle_s_lines_literally")
@pytest.mark.parametrize(
    "level",
    some(
        ["PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"],
        of=["PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"],
    ),
)
def test_paddle_s_environment(host: Host, level: str) -> None:
    environ = {
        "PADDLE_ELASTIC_SERVER": "127.0.0.1:2379",
        "PADDLE_ELASTIC_JOB_ID": "XXXXXX",
        "PADDLE_ELASTIC_NP": "2",
        "PADDLE_ELASTIC_TIMEOUT": "60",
        "POD_IP": "127.0.0.9",
        level: "1",
        **CALM,
    }
    agents = [host.start("elastic-agent train.py --wait", **environ) for _ in range(2)]
    wait_for_training(host, 2, **environ)
    found = status(host, **environ)
    assert found["job_id"] == "XXXXXX"
    assert {node["address"] for node in found["nodes"]} == {"127.0.0.9"}  # type: ignore[attr-defined]
    assert host.run("elastic-agent scale --np=1", **environ)[0] == 0, "the command line beats the environment"
    wait_for_training(host, 1, **environ)
    host.stop_training()
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0, 0]


def test_a_module_and_a_program_can_be_run(host: Host) -> None:
    (host.directory / "tool.py").write_text(TRAIN)
    code, output = host.run("elastic-agent run --job-id=m --nproc-per-node=2 --console_ranks=all -m tool --lr 3")
    assert code == 0
    for rank in range(2):
        assert f"[rank{rank}]: args ['--lr', '3'] rank {rank} of 2" in output
    code, output = host.run("elastic-agent --job_id=p --no-python sh -c 'echo I am $RANK'")
    assert code == 0
    assert "[rank0]: I am 0" in output


@pytest.mark.long("finished.txt")
def test_a_finished_job_stays_finished(host: Host) -> None:
    assert host.run("elastic-agent --job_id=X train.py")[0] == 0
    code, output = host.run("elastic-agent --job_id=X train.py")
    assert (code, "--fresh starts it over" in output) == (0, True)
    code, output = host.run("elastic-agent --job_id=X --fresh train.py")
    assert (code, "rank 0 of 1" in output) == (0, True)


def test_an_ended_job_can_be_reset_and_a_live_one_cannot(host: Host) -> None:
    """After it the same command line begins a new run, under group numbers that go on."""
    agent = host.start("elastic-agent --job_id=X train.py --wait", **CALM)
    wait_for_training(host, 1)
    code, output = host.run("elastic-agent reset")
    assert (code, output.count("\n"), "'X' is running: stop it first with elastic-agent stop (nodes: " in output) == (
        2,
        1,
        True,
    ), output
    host.stop_training()
    assert agent.wait(PATIENCE_S) == 0
    number = status(host, ELASTIC_AGENT_JOB_ID="X")["group"]
    code, output = host.run("elastic-agent reset --job_id=X --yes")
    assert (code, output.startswith("job X: reset")) == (0, True), output
    code, output = host.run("elastic-agent --job_id=X train.py")
    assert (code, "rank 0 of 1" in output) == (0, True), output
    assert status(host, ELASTIC_AGENT_JOB_ID="X")["group"] == int(str(number)) + 2, "the reset's, and the new one"


@pytest.mark.long("paused-job.txt")
def test_a_paused_job_trains_on_and_changes_nothing(host: Host) -> None:
    first = host.start("elastic-agent --job_id=X --np=1:2 --node_id=a train.py --wait", **CALM)
    wait_for_training(host, 1)
    assert host.run("elastic-agent pause")[0] == 0
    second = host.start("elastic-agent --job_id=X --np=1:2 --node_id=b train.py --wait", **CALM)
    wait_for(lambda: len(list(status(host).get("nodes", []))) == 2, PATIENCE_S, "two nodes")  # type: ignore[call-overload]
    found = status(host)
    assert (found["group"], "paused by" in str(found["reason"])) == (1, True), str(found)
    assert host.run("elastic-agent resume")[0] == 0
    wait_for_training(host, 2)
    host.stop_training()
    assert [agent.wait(PATIENCE_S) for agent in (first, second)] == [0, 0]


def test_status_shows_the_durations_in_effect(host: Host) -> None:
    agent = host.start("elastic-agent --job_id=X --detect_within=10 --lease=6 train.py --wait")
    wait_for_training(host, 1)
    _, output = host.run("elastic-agent status")
    shown = "a loss is noticed within 10 s  lease 6 s  link heartbeat 1 s  settle window 2 s"
    assert shown in output, output
    host.stop_training()
    assert agent.wait(PATIENCE_S) == 0


@pytest.mark.long("integration/test_handoffs.py")
def test_a_node_that_is_asked_to_leave_is_not_a_lost_one(host: Host) -> None:
    """SIGTERM to one of two: the other goes on in a group that was planned."""
    line = "elastic-agent --job_id=X --np=1:2 --node_id={} train.py --wait"
    agents = {name: host.start(line.format(name), **CALM) for name in "ab"}
    wait_for_training(host, 2)
    agents["b"].terminate()
    assert agents["b"].wait(PATIENCE_S) == 0
    wait_for_training(host, 1)
    assert status(host)["cause"] == "drain: b was asked to leave"
    host.stop_training()
    assert agents["a"].wait(PATIENCE_S) == 0


def test_a_failing_script_ends_the_job_with_its_own_code(host: Host) -> None:
    (host.directory / "bad.py").write_text("import sys; sys.exit(7)")
    assert host.run("elastic-agent --job_id=a --max_restarts=0 bad.py")[0] == 7
    code, output = host.run("elastic-agent --job_id=b --max_restarts=2 bad.py")
    assert code == 76
    # Two restarts, a group without members, and the end; unless the machine is that slow, the pause before the second.
    assert output.count("exited with code 7") in {4, 5}, output
    (host.directory / "argparse.py").write_text("import sys; sys.exit(2)")
    assert host.run("elastic-agent --job_id=c --max_restarts=0 argparse.py")[0] == 1, "2 means usage"
    (host.directory / "never.py").write_text("import sys; sys.exit(93)")
    assert host.run("elastic-agent --job_id=d never.py")[0] == 93, "which tells a scheduler the same"


@pytest.mark.long("no other test; it starts two jobs for one question")
def test_scale_asks_which_job_if_there_are_several(host: Host) -> None:
    agents = [host.start(f"elastic-agent --job_id={job} train.py --wait") for job in ("job", "job2", "job.1")]
    wait_for(
        lambda: all(host.run(f"elastic-agent status --job_id={j}")[0] == 0 for j in ("job", "job2", "job.1")),
        PATIENCE_S,
        "3",
    )
    code, output = host.run("elastic-agent scale --np=2")
    assert code == 2
    assert "several jobs at 127.0.0.1:2379: job, job.1, job2; choose one with --job_id" in output
    host.stop_training()
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0, 0, 0]
    code, output = host.run("elastic-agent --job_id=job --np=3 scale")
    assert (code, "has ended" in output) == (2, True)


MISTAKES = [
    ("scale --np=2", 2, "no live job at 127.0.0.1:2379"),
    ("scale --np=2 --job_id=nope", 2, "no job 'nope' at 127.0.0.1:2379; jobs there: none"),
    ("scale --job_id=X", 2, "scale needs the new number of nodes"),
    ("scale 2 --job_id=X", 2, "scale takes the number of nodes as an option: elastic-agent scale --np=2"),
    ("scale --np=0", 2, "--np must be N or MIN:MAX with 1 <= MIN <= MAX"),
    ("scale --np=many", 2, "not 'many'"),
    ("scale --np=2 --elastic_server=127.0.0.1:9", 69, "(etcd at 127.0.0.1:9 did not answer: Connection refused): give"),
    ("scale --np=", 2, "--np is empty"),
    ("status --job_id=", 2, "--job_id is empty"),
    ("status --job_id=a/b", 2, "--job_id must be"),
    ("--job_id=X --np=0 train.py", 2, "--np must be N or MIN:MAX"),
    ("--job_id=X --np=3:1 train.py", 2, "not '3:1'"),
    ("--job_id=X nope.py", 2, "no script 'nope.py'"),
    (f"--job_id=X {'x' * 300}", 2, "xxx': File name too long"),
    ("--job_id=X", 2, "no script was given"),
    ("--job_id=X -m nope", 2, "no module 'nope'"),
    ("--job_id=X --no_python nope", 2, "no program 'nope'"),
    ("--np=2 train.py", 2, "--job_id is missing"),
    ("--elastic_server=127.0.0.1:2379 train.py", 2, "--job_id is missing"),
    ("--job_id=a/b train.py", 2, "--job_id must be 1 to 128 letters"),
    ("--job_id= train.py", 2, "--job_id is empty"),
    ("--standalone --job_id= train.py", 2, "--job_id is empty"),
    ("--job_id=X --np= train.py", 2, "--np is empty"),
    ("--job_id=X --checkpoint_dir= train.py", 2, "--checkpoint_dir is empty"),
    ("--job_id=X --elastic_server= train.py", 2, "--elastic_server is empty"),
    ("--job_id=X --elastic_server=:: train.py", 2, "bad etcd endpoint"),
    ("--job_id=X --elastic_server=a..b:2379 train.py", 2, "--elastic_server: 'a..b' cannot be resolved: that is no"),
    ("--job_id=X --address=a..b train.py", 2, "--address: 'a..b' cannot be resolved: that is no host name"),
    ("--job_id=X --address=0.0.0.0 train.py", 2, "--address=0.0.0.0 is where to listen"),
    ("--job_id=X --elastic_server=127.0.0.1:9 --store_timeout=1 train.py", 69, "could not be reached within 1 s"),
    ("--job_id=X --nproc_per_node=0 train.py", 2, "--nproc_per_node must be at least 1"),
    ("--job_id=X --nproc_per_node=two train.py", 2, "gpu, cpu or auto, not two"),
    ("--job_id=X --gpus=999 train.py", 2, "--gpus=999: there is no GPU '999'; "),
    ("--job_id=X --tee=4 train.py", 2, "--tee must be 0 (none), 1 (stdout)"),
    ("--cluster_node_ips=127.0.0.1 train.py", 2, "--cluster_node_ips is another launcher's: use --ips"),
    ("--np=2 --rdzv-endpoint=a:29400 train.py", 2, "--rdzv_endpoint is another launcher's: agents meet in etcd"),
    ("--ips=192.0.2.1,192.0.2.2 train.py", 2, "none of them is this machine; say which one is, with --address"),
    ("--ips=127.0.0.1,127.0.0.2 train.py", 2, "127.0.0.1 and 127.0.0.2 are both this machine; say which one is"),
    ("--ips=127.0.0.1,127.0.0.2 --address=127.0.0.3 train.py", 2, "--address=127.0.0.3 is not in --ips"),
    ("--ips=127.0.0.1,127.0.0.2 --address=127.0.0.1 --np=3 train.py", 2, "--np=3 is more than the 2 machines"),
    ("--ips=127.0.0.1 --elastic_server=127.0.0.1:2379 train.py", 2, "--ips brings an etcd of its own: leave out"),
    ("--job_id=X --detect_within=1 train.py", 2, "--detect_within must be at least 2.5 s"),
    ("--job_id=X --lease=5 train.py", 2, "--lease must be at most --detect_within - 0.5 s = 4.5 s"),
    ("--job_id=X --link_heartbeat=3 train.py", 2, "--link_heartbeat must be more than 0 and at most a third"),
    ("reset --job_id=nope", 2, "no job 'nope' at 127.0.0.1:2379; jobs there: none"),
    ("stop --job_id=X --yes --wait=inf", 2, "'--wait': wanted seconds, "),
    ("drain a --job_id=X --wait=nan", 2, "'--wait': wanted seconds, "),
    ("status --standalone", 2, "elastic-agent status has no --standalone, which is an option of elastic-agent run"),
    ("pause", 2, "no live job at 127.0.0.1:2379"),
    ("--job_id=X --console_ranks=first train.py", 2, "--console_ranks must be ranks"),
    ("--job_id=X --max_restartz=1 train.py", 2, "--max_restarts"),
    ("--job_id=X --nprocs=2 train.py", 2, "No such option '--nprocs'. Did you mean '--nproc_per_node'?"),
    (
        "--job_id=X --hang=1 train.py",
        2,
        "--hang may be --hang_factor or --hang_first or --hang_floor or --hang_timeout",
    ),
    ("--np=2 --rdzv-endpoint=a:29400 --shutdown-timeout=3 train.py", 2, "meet in etcd: give --elastic_server"),
    (
        "--np=2 --rdzv-endpoint=a:29400 --shutdown-timeout=3 train.py",
        2,
        "--shutdown_timeout is another launcher's: use",
    ),
    ("--ips=127.0.0.1,127.0.0.2 --address=127.0.0.1 -", 2, "--job_id is missing: a script from standard input"),
    ("--job_id=X .", 2, "'.' is a directory without __main__.py"),
    ("--standalone --np=2 train.py", 2, "--standalone is one node"),
]


EACH = """
import json, os, shlex, sys, tempfile
from agent.cli.command_line import main
for line in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = ["elastic-agent", *shlex.split(line)]
            sys.exit(main())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), output.read()]))
"""
"""Runs each command line in a fork of one interpreter; prints its code and its output."""


def test_a_mistake_is_one_clear_line_and_the_right_code(tmp_path: Path) -> None:
    """No traceback, and nothing written."""
    with a_host(tmp_path) as host:
        wrong = []
        lines = json.dumps([line for line, *_ in MISTAKES])
        _, told = host.run(f"python -c {shlex.quote(EACH)} {shlex.quote(lines)}")
        for (line, wanted_code, wanted_words), answer in zip(MISTAKES, told.splitlines(), strict=True):
            code, output = json.loads(answer)
            is_one_line = output.startswith("elastic-agent: error: ") and output.count("\n") == 1
            if code != wanted_code or wanted_words not in output or not is_one_line:
                wrong.append((line, code, output))
        assert not wrong
        as_typed = host.run(f"elastic-agent {MISTAKES[0][0]}")
        assert as_typed == tuple(json.loads(told.splitlines()[0]))
        code, output = host.run("elastic-agent status")
        assert "jobs that have ended: none" in output, "a mistake writes nothing"


def test_a_node_reports_what_an_unset_variable_left_open(host: Host) -> None:
    """`--node_id="$UNSET"` is not given: two such agents on one host do not wait for each other's name."""
    line = "elastic-agent --job_id=X --np=2 --node_id= --address= train.py"
    agents = [host.start(line), host.start(line)]
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0, 0]


def test_an_empty_variable_counts_as_not_set(host: Host) -> None:
    """All that are read, also those before one that is set."""
    names = [name for parameter in run.params for name in parameter.envvar or ()]
    assert len(names) > 20
    environ = {**dict.fromkeys(names, ""), "PADDLE_ELASTIC_JOB_ID": "X"}
    code, output = host.run("elastic-agent train.py", **environ)
    assert (code, "job X succeeded" in output) == (0, True), output
    assert host.run("elastic-agent status --json", **environ)[0] == 0


BREAK = """
from agent.store.api import Put
from agent.store.etcd import EtcdStore
store = EtcdStore(["127.0.0.1:2379"])
store.transact([], [Put("/elastic-agent/broken/shared/spec", b'{"v":1,"run":"\\xff"}')])
store.close()
"""


def test_one_job_s_damage_is_no_matter_for_another(host: Host) -> None:
    """Who names a job reads that one; who names none is told which one is left out."""
    assert host.run(f"python -c {shlex.quote(BREAK)}") == (0, "")
    code, output = host.run("elastic-agent scale --np=2")
    warning, error = output.splitlines()
    assert (code, "no live job" in error) == (2, True)
    unread = "the record at /elastic-agent/broken/shared/spec cannot be read"
    assert f"warning: job 'broken' is left out: {unread}" in warning
    agent = host.start("elastic-agent --job_id=good train.py --wait")
    wait_for_training(host, 1, ELASTIC_AGENT_JOB_ID="good")
    code, output = host.run("elastic-agent scale --np=2 --job_id=good")
    assert (code, output.count("\n")) == (0, 1), output
    code, output = host.run("elastic-agent scale --np=1")
    assert (code, "job good: np 2 -> 1" in output, "'broken' is left out" in output) == (0, True, True)
    host.stop_training()
    assert agent.wait(PATIENCE_S) == 0
    code, output = host.run("elastic-agent status --job_id=broken")
    assert (code, output.count("\n"), "/elastic-agent/broken/shared/spec" in output) == (2, 1, True)


def test_standalone_needs_no_etcd_and_is_a_job_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    argv = [str(BIN / "elastic-agent"), "--standalone", "--nproc_per_node=2", "train.py"]
    for _ in range(2):
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        assert "rank 0 of 2" in done.stdout


def test_help_names_every_command(tmp_path: Path) -> None:
    for line in (["--help"], ["scale", "--help"], ["status", "-h"]):
        argv = [str(BIN / "elastic-agent"), *line]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Usage: elastic-agent")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("ulimit -n 64", "the limit of open files is 64; "),
        ("ulimit -f 8", "the limit of the size of a file is 8192 bytes; "),
        ("ulimit -v 4000000", "the limit of address space is 3.815 GiB; "),
        ("cd gone && rmdir ../gone", "the working directory has been removed: "),
        (f"exec {' '.join(UNSHARE)}", "127.0.0.1 cannot be reached (Network is unreachable), "),
    ],
)
def test_what_the_system_does_not_provide_is_reported_in_one_line(tmp_path: Path, before: str, said: str) -> None:
    (tmp_path / "gone").mkdir()
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('never run')")
    agent = f"elastic-agent --standalone {shlex.quote(str(script))}"
    line = f"{before} {agent}" if before.startswith("exec") else f"{before} && exec {agent}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    (told,) = [each for each in done.stderr.splitlines() if not each.startswith("shell-init")]
    assert told.startswith(f"elastic-agent: error: {said}")
    assert done.returncode == 2
