"""The job as a script describes it (`config.py`, `env.py`), and the command line of the agent that it turns into."""

from __future__ import annotations

import json
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from trainer_runtime import contract

_CALL_CHARACTERS = 60
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class JobDescription:
    """What the script has set; by default the job is one machine with one process."""

    count: int | None = None
    """Number of devices of each machine."""
    port: int | None = None
    machines: tuple[str, ...] = ()
    min_nodes: int | None = None
    calls: dict[str, str] = field(default_factory=dict)
    """Maps an option of the agent to the call in the script that stands for it, with its source line."""


description = JobDescription()


def note_call(*options: str) -> None:
    """Record the source line of the script's call of the caller of this function, for these options."""
    frame = sys._getframe(2)  # noqa: SLF001 - the script's frame
    path = frame.f_code.co_filename
    line = linecache.getline(path, frame.f_lineno).strip()
    shown = f"{line[:_CALL_CHARACTERS]}…" if len(line) > _CALL_CHARACTERS else line
    description.calls |= dict.fromkeys(options, f"{shown or 'the call'} at {os.path.basename(path)}:{frame.f_lineno}")  # noqa: PTH119


def whole_number(what: str, value: object, least: int, most: int) -> int:
    """Return `value` if it is a whole number in this range; else raise `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, not {value!r}")
    return value


def addresses(nodes: object) -> tuple[str, ...]:
    """Return the addresses in a list of nodes; raise `ValueError` if it is malformed."""
    wanted = 'machine() wants a list of nodes with an address each, as [{"addr": "192.168.1.12"}]'
    if not isinstance(nodes, Sequence) or isinstance(nodes, str) or not nodes:
        raise ValueError(f"{wanted}, not {nodes!r}")
    found = []
    for node in nodes:
        address = node.get("addr") if isinstance(node, Mapping) else None
        if not isinstance(address, str) or not address.strip() or "," in address:
            raise ValueError(f"{wanted}; {node!r} is none")
        found.append(address.strip())
    if len({*found}) < len(found):
        raise ValueError(f"machine() names one address twice: {', '.join(found)}")
    return tuple(found)


def is_rank() -> bool:
    """Return whether a launcher has started this process, this agent or another launcher."""
    return contract.GROUP in os.environ or "RANK" in os.environ


def group_rank() -> int:
    """Return the index of this rank's node in its group; 0 without an agent."""
    return int(os.environ.get("GROUP_RANK", "0"))


def become_agent() -> NoReturn:
    """Replace this process by an agent that runs the same script. Raises `RuntimeError`, `ValueError`."""
    command = [*_agent_options(), *_script()]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.environ[contract.SCRIPT_CALLS] = json.dumps(description.calls)
    # -P: a file named agent.py beside the script must not be imported instead of the agent.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "agent", *command])  # noqa: S606 - replacing this process is the purpose


def _script() -> list[str]:
    """Return the arguments with which an agent runs this process's script."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is None or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise RuntimeError(
            "trainer_runtime.env.init() starts the script again in each rank, but this process runs no script: put the "
            "code into a file, and run `python train.py` on each machine"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "trainer_runtime.env.init() must come before CUDA is used: move it up, to the script's first lines"
        )
    if main.__spec__ is not None:
        name = main.__spec__.name.removesuffix(".__main__")
        return ["--module", name, *sys.argv[1:]]
    return [os.path.abspath(str(main.__file__)), *sys.argv[1:]]  # noqa: PTH100 - does not resolve links


def _agent_options() -> list[str]:
    machines, least = description.machines, description.min_nodes
    np = f"{least}:{len(machines)}" if least is not None else str(len(machines))
    return [
        *([f"--ips={','.join(machines)}", f"--np={np}"] if machines else ["--standalone"]),
        *([f"--ctrl_port={description.port}"] if description.port is not None else []),
        *_devices(description.count),
    ]


def _devices(count: int | None) -> list[str]:
    """Return the options for `count` ranks per node, and for the first `count` GPUs if the machine has any."""
    if count is None:
        return ["--nproc_per_node=1"]
    gpus = _visible_gpus()
    if gpus and len(gpus) < count:
        raise ValueError(f"gpu_device_num({count}): the GPUs here are {','.join(gpus)}")
    return [f"--nproc_per_node={count}", *([f"--gpus={','.join(gpus[:count])}"] if gpus else [])]


def _visible_gpus() -> list[str]:
    if _VISIBLE in os.environ:
        return [gpu for gpu in os.environ[_VISIBLE].split(",") if gpu.strip() not in {"", "-1"}]
    import torch  # noqa: PLC0415 - slow, so only if needed

    return [str(number) for number in range(torch.cuda.device_count())]
