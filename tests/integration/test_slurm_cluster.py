"""Jobs under a real Slurm: its tasks need no option, and a job that is preempted or out of time continues later."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chaos.ledger import Ledger
from chaos.training import digest
from integration.conftest import PATIENCE_S
from integration.test_launcher import TRAIN, TRAINING, seen, undisturbed
from machines import Network, environment
from slurm_cluster import Slurm, missing
from waiting import wait_for

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not on this machine: {', '.join(missing())}")

SBATCH = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"


@pytest.fixture
def slurm(tmp_path: Path, network: Callable[..., Network]) -> Iterator[Slurm]:
    with Slurm(tmp_path / "slurm", network(1, 2)) as running:
        running.environ["PATH"] = f"{Path(sys.executable).parent}:{running.environ['PATH']}"
        yield running


def test_a_task_of_srun_needs_no_option(tmp_path: Path, slurm: Slurm) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    slurm.environ = environment(tmp_path, **{**slurm.environ, "CUDA_VISIBLE_DEVICES": "2,3"})
    slurm.environ["PATH"] = f"{tmp_path / 'bin'}:{slurm.environ['PATH']}"
    slurm.ask("srun", "--nodes=2", f"--chdir={tmp_path}", "elastic-agent", "train.py")
    ranks = seen(tmp_path)
    gpus = [(told["CUDA_VISIBLE_DEVICES"], told["FLAGS_selected_gpus"]) for told in ranks]
    assert gpus == [("2,3", "0"), ("2,3", "1")] * 2
    assert [told["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0] for told in ranks] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2
    assert {told["ELASTIC_AGENT_JOB_ID"] for told in ranks} == {"slurm-1"}


@pytest.mark.long("integration/test_last_checkpoint.py; unit/test_slurm.py")
def test_a_preempted_job_and_one_out_of_time_are_requeued_and_right(tmp_path: Path, slurm: Slurm) -> None:
    """The example's batch script, of which only the GPUs are taken out.

    Slurm signals all processes of a step. The ranks end at once, and an agent saves the newest snapshot.
    """
    written = tmp_path / "written"
    written.mkdir()
    (tmp_path / "train.py").write_text(
        f"import runpy, sys; sys.argv[1:] = [{str(written)!r}, '--step_time_s=0.05']; "
        f"runpy.run_path({str(TRAINING)!r}, run_name='__main__')"
    )
    (tmp_path / "train.sbatch").write_text(re.sub(r"#SBATCH --gpus.*\n", "", SBATCH.read_text()))
    ledger = Ledger(written)

    def train_beyond(step: int, restarts: int) -> int:
        """Wait for later steps, of that start of the job; return the newest."""

        def has_trained() -> bool:
            ledger.follow()
            return ledger.lines != [] and ledger.lines[-1].step > step

        wait_for(lambda: slurm.shown(job)["Restarts"] == str(restarts), f"start {restarts}", PATIENCE_S)
        try:
            wait_for(has_trained, f"steps after {step}", PATIENCE_S)
        except AssertionError:
            print(slurm.shown(job), *(path.read_text() for path in tmp_path.glob("slurm-*.out")))
            raise
        return ledger.lines[-1].step

    job = slurm.submit(f"--chdir={tmp_path}", "--partition=low", str(tmp_path / "train.sbatch"))
    step = train_beyond(20, 0)
    other = slurm.submit("--partition=high", "--wrap=sleep 1")
    wait_for(lambda: slurm.shown(other)["JobState"] == "COMPLETED", "the job that preempts", PATIENCE_S)
    step = train_beyond(step + 20, 1)
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    wait_for(lambda: slurm.shown(job)["Restarts"] == "2", "the next start", PATIENCE_S)
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    train_beyond(step + 20, 2)
    (written / "stop").write_text(str(max(line.step for line in ledger.lines)))
    wait_for(lambda: slurm.shown(job)["JobState"] == "COMPLETED", "the job's end", PATIENCE_S)
    ledger.follow()
    assert slurm.shown(job)["ExitCode"] == "0:0"
    result = torch.load(written / "weights.pt", weights_only=True)
    assert digest(result["weights"]) == undisturbed(tmp_path / "alone", result["step"])
