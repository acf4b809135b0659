"""In-script configuration, as OneFlow's `config`: what each machine gives to the job. See `trainer_runtime.env`."""

from __future__ import annotations

from trainer_runtime import script_job


def gpu_device_num(count: int) -> None:
    """Let the job use so many GPUs of each machine, one rank process for each; without GPUs, so many processes.

    Raises:
        ValueError: it is no number of devices.
    """
    script_job.note_call("--nproc_per_node", "--gpus")
    script_job.described.count = script_job.whole_number("gpu_device_num", count, 1, 1024)
