"""In-script configuration in the form of OneFlow's `env`: the script describes the job, and runs on every machine.

    import trainer_runtime as tr

    tr.config.gpu_device_num(2)
    tr.env.ctrl_port(9988)
    tr.env.machine([{"addr": "192.168.1.12"}, {"addr": "192.168.1.11"}])
    tr.env.init()

Run `python train.py` on each machine. The first `init()` replaces the process by an agent, which runs the script again,
once for each rank; there `init()` joins the process group. The code before `init()` therefore runs once more in each
rank: do not put anything before it that takes long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_runtime import script_job


def ctrl_port(port: int) -> None:
    """Set the port at which the machines find each other; the next port is used too. Default: 9988.

    Raises:
        ValueError: `port` is not a whole number from 1 to 65534.
    """
    script_job.note_call("--ctrl_port")
    script_job.description.port = script_job.whole_number("ctrl_port", port, 1, 65534)


def machine(nodes: Sequence[Mapping[str, str]], min_nodes: int | None = None) -> None:
    """Name all machines of the job, with the same list on each. The first is the master if all machines come together.

    Args:
        nodes: one mapping for each machine, `{"addr": "192.168.1.12"}`.
        min_nodes: smallest number of machines to train with: with fewer the job waits, with at least as many it
            continues when one is lost. Default: all machines are needed.

    Raises:
        ValueError: `nodes` is not such a list, or `min_nodes` is not a number from 1 to its length.
    """
    script_job.note_call("--ips", "--np")
    script_job.description.machines = script_job.addresses(nodes)
    most = len(script_job.description.machines)
    script_job.description.min_nodes = (
        None if min_nodes is None else script_job.whole_number("min_nodes", min_nodes, 1, most)
    )


def init() -> None:
    """Replace the script's process by an agent; in the rank processes of the agent, join the process group.

    In a rank this calls `trainer_runtime.init()` and returns. In a script that was just started it does not return.

    Raises:
        RuntimeError: this process cannot become an agent: it runs no script file, or has already used CUDA.
        ValueError: this machine has fewer GPUs than `config.gpu_device_num` asked for.
    """
    if script_job.is_rank():
        from trainer_runtime.dist import init as join  # noqa: PLC0415 - loads torch

        join()
    else:
        script_job.become_agent()


def is_master() -> bool:
    """Return whether this rank is on the master node: the node of rank 0, which prints the output and saves."""
    return script_job.group_rank() == 0
