"""What a process of a parameter-server job is told: Paddle's variables, and where the workers may meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.roles.plan import RolePlan, RoleProcess
from agent.workers.devices import VISIBLE
from agent.workers.environment import GROUP_VARIABLES, without_secrets
from trainer_runtime import contract
from trainer_runtime.tls import NAMES, VARIABLE, TlsFiles

_ROLES = {"server": "PSERVER", "worker": "TRAINER", "heter": "HETER_TRAINER"}
SECRET = "ELASTIC_AGENT_PS_SECRET"  # noqa: S105 - a name


@dataclass(frozen=True)
class RoleFacts:
    """What is the same for all processes of a machine."""

    plan: RolePlan
    job_id: str
    run: str
    node_id: str
    secret: str
    checkpoint_dir: Path
    """In there servers keep their rows."""
    fresh: bool
    """What is there of an earlier run is not to be looked at."""
    gpus: tuple[str, ...]
    """Those that this machine's processes may use."""
    tls: TlsFiles | None = None
    """By which its processes speak to each other. None: in the clear."""


def role_environment(base: Mapping[str, str], post: RoleProcess, incarnation: int, facts: RoleFacts) -> dict[str, str]:
    """The complete environment of one process. `base` is what the user gave to the agent."""
    plan = facts.plan
    workers = plan.of("worker")
    env = {name: value for name, value in without_secrets(base).items() if name not in GROUP_VARIABLES}
    env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"} | env
    env |= {
        "TRAINING_ROLE": _ROLES[post.kind],
        "PADDLE_PSERVERS_IP_PORT_LIST": plan.endpoints("server"),
        "PADDLE_TRAINER_ENDPOINTS": plan.endpoints("worker"),
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": plan.endpoints("heter"),
        "PADDLE_HETER_TRAINER_DEVICE": plan.heter_device,
        "PADDLE_TRAINERS_NUM": str(len(workers) + len(plan.of("heter"))),
        "PADDLE_CURRENT_ENDPOINT": post.endpoint,
        "POD_IP": post.machine,
        "PADDLE_PORT": str(post.port),
        contract.JOB_ID: facts.job_id,
        contract.RUN_ID: facts.run,
        contract.NODE_ID: facts.node_id,
        contract.CHECKPOINT_DIR: str(facts.checkpoint_dir / facts.run if facts.fresh else facts.checkpoint_dir),
        SECRET: facts.secret,
        contract.PS_INCARNATION: str(incarnation),
    }
    for name in NAMES:  # what the agent itself was given by these variables counts for all, or none does
        env.pop(VARIABLE.format(name.upper()), None)
    if facts.tls is not None:
        env |= {VARIABLE.format(name.upper()): getattr(facts.tls, name) for name in NAMES}
    if post.kind != "server":
        number = post.index + (len(workers) if post.kind == "heter" else 0)
        env["PADDLE_TRAINER_ID"] = str(number)
        env |= {"MASTER_ADDR": workers[0].machine, "RANK": str(number), "WORLD_SIZE": env["PADDLE_TRAINERS_NUM"]}
        if plan.http_port:
            env |= {
                "MASTER_PORT": str(plan.http_port),
                "PADDLE_GLOO_HTTP_ENDPOINT": f"{workers[0].machine}:{plan.http_port}",
            }
    return env | _devices(post, facts)


def _devices(post: RoleProcess, facts: RoleFacts) -> dict[str, str]:
    """One GPU for each worker of the machine, which share them if there are fewer; none for servers.

    Where there are heterogeneous workers, the GPUs are theirs.
    """
    kinds_with = ("heter",) if facts.plan.of("heter") else ("worker",)
    if post.kind not in kinds_with:
        return {VISIBLE: "", "FLAGS_selected_gpus": ""} if facts.gpus else {}
    if not facts.gpus:
        return {}
    here = [other for other in facts.plan.of(post.kind) if other.machine == post.machine]
    return {VISIBLE: facts.gpus[here.index(post) % len(facts.gpus)], "FLAGS_selected_gpus": "0"}
