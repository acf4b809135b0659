"""In-script configuration in the form of OneFlow's `config`: the devices of each machine. See `trainer_runtime.env`."""

from __future__ import annotations

from trainer_runtime import script_job


def gpu_device_num(count: int) -> None:
    """Set the number of GPUs that the job uses on each machine: one rank process per GPU.

    On machines without GPUs this is the number of rank processes.

    Raises:
        ValueError: `count` is not a whole number from 1 to 1024.
    """
    script_job.note_call("--nproc_per_node", "--gpus")
    script_job.description.count = script_job.whole_number("gpu_device_num", count, 1, 1024)
