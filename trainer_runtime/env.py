"""In-script configuration, as OneFlow's `env`: the job is described in the script, which runs on every machine.

    import trainer_runtime as tr

    tr.config.gpu_device_num(2)
    tr.env.ctrl_port(9988)
    tr.env.machine([{"addr": "192.168.1.12"}, {"addr": "192.168.1.11"}])
    tr.env.init()

`python train.py` on each machine is then a member of the job: the first `init()` turns the process into an agent,
which runs the script anew, once for each rank; there `init()` joins the process group. So what stands before it is done
once more in each rank, and nothing that lasts belongs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_runtime import script_job


def ctrl_port(port: int) -> None:
    """Let the machines find each other at this port and the next one. Without it they take 9988.

    Raises:
        ValueError: it is no port.
    """
    script_job.note_call("--ctrl_port")
    script_job.described.port = script_job.whole_number("ctrl_port", port, 1, 65534)


def machine(nodes: Sequence[Mapping[str, str]], min_nodes: int | None = None) -> None:
    """Name all machines of the job, the same list on each. The first is the master if all come together.

    Args:
        nodes: `{"addr": "192.168.1.12"}` for each.
        min_nodes: with fewer the job waits; with at least so many the rest go on when one is lost. Without it all are
            needed.

    Raises:
        ValueError: it is no such list.
    """
    script_job.note_call("--ips", "--np")
    script_job.described.machines = script_job.addresses(nodes)
    most = len(script_job.described.machines)
    script_job.described.min_nodes = (
        None if min_nodes is None else script_job.whole_number("min_nodes", min_nodes, 1, most)
    )


def init() -> None:
    """Begin: the script's process becomes an agent, and its ranks join the process group.

    In a rank this is `trainer_runtime.init()`, and returns. In a script that was just started it does not return.

    Raises:
        RuntimeError: this process cannot become an agent: it runs no script, or has already used CUDA.
        ValueError: there are fewer GPUs here than were asked for.
    """
    if script_job.is_rank():
        from trainer_runtime.dist import init as join  # noqa: PLC0415 - loads torch

        join()
    else:
        script_job.become_agent()


def is_master() -> bool:
    """Say whether this rank is on the master node: the one of rank 0, whose output is shown, and which saves."""
    return script_job.group_rank() == 0
