"""This worker's device, rank and process group, and collectives about numbers and failures."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainer_runtime import contract
from trainer_runtime.agent_channel import milestones
from trainer_runtime.agent_events import listen_to_agent
from trainer_runtime.checkpoint import warn
from trainer_runtime.connections import connections
from trainer_runtime.process_exit import destroy_group_at_exit
from trainer_runtime.rank_store import open_rank_store, ranks_key
from trainer_runtime.sealed_store import SealedStore
from trainer_runtime.set_up import set_up
from trainer_runtime.stacks import register_stack_dump, stacks_descriptor
from trainer_runtime.torch_names import describe_missing
from trainer_runtime.wrapping import record_wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

_FEW = "few GPUs: "
"""Prefix of the entry of a rank that has a GPU, but does not know whether another rank has the same one."""


class _Membership:
    """How this process belongs to its group."""

    def __init__(self) -> None:
        self.timeout_s = 600.0
        """Of the collectives, as given to `init`."""
        self.is_by_init = False
        """The process group was opened by `init`, and not by the script."""
        self.hook_before: object = None
        """The hook for uncaught exceptions before the last process group was opened. None: none was."""
        self.hook: object = None
        """That hook with torch's around it."""
        self.is_alone = False
        """The process sets up in a world of its own, before it enters its group at `State.run`."""


membership = _Membership()


class PeerError(RuntimeError):
    """Another rank failed at something that all ranks do together; its own output has the reason."""


def init(timeout_s: float = 600.0) -> None:
    """Select this worker's device and join the process group; does nothing if there is a process group already.

    The rank is taken from the variables that the agent and `torchrun` set (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    Without RANK the script runs alone: a world of size 1 that does not use the network.

    The backend is NCCL if every rank has a GPU of its own, else gloo.

    Args:
        timeout_s: seconds that a collective waits for the other ranks before it fails. Must be longer than any rank
            takes between two collectives, for an evaluation or a save for instance. A peer that dies is noticed at
            once, regardless of the timeout.

    Raises:
        ValueError: RANK is set but not the other variables.
        torch.distributed.DistError: the other ranks did not join within `timeout_s`.
    """
    _register_stack_dump()
    missing = describe_missing()
    if missing:
        warn(missing)
    record_wrapping()
    set_up.watch()
    if not dist.is_initialized():
        membership.timeout_s, membership.is_by_init = timeout_s, True
        membership.is_alone = contract.SETUP in os.environ
        _join(timeout_s)
    if not membership.is_alone:
        milestones.note_joined()


@contextlib.contextmanager
def _one_excepthook() -> Iterator[None]:
    """Let torch add the rank to tracebacks once: it does so in each `init_process_group`, around the hook before."""
    if sys.excepthook is membership.hook:
        sys.excepthook = membership.hook_before  # type: ignore[assignment]
    membership.hook_before = sys.excepthook
    yield
    membership.hook = sys.excepthook


def join_again() -> None:
    """Join the process group of the group that the environment names now, after leaving another one."""
    membership.is_alone = False
    _join(membership.timeout_s)
    milestones.note_joined()


def _join(timeout_s: float) -> None:
    if device().type == "cuda":
        torch.cuda.set_device(device())
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and not membership.is_alone:
        if contract.RANKS_KEY in os.environ:
            rank_, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = open_rank_store(rank_, world, timeout)
        else:
            store, rank_, world = next(rendezvous("env://", timeout=timeout))
        key = ranks_key()
        backend = _agree_on_backend(SealedStore(store, key) if key else store, rank_, world)
        if key and backend == "gloo":  # threads of NCCL use theirs while the interpreter may be held
            store = SealedStore(store, key, timeout, has_counters=True)
        with connections.recorded(), _one_excepthook():
            dist.init_process_group(backend, store=store, rank=rank_, world_size=world, timeout=timeout)
        _hold_with_group(store)
    else:
        with _gloo_on_loopback():
            store = dist.HashStore()  # type: ignore[attr-defined] # public, but missing from torch's types
            with _one_excepthook():
                dist.init_process_group(_own_backend(), store=store, rank=0, world_size=1, timeout=timeout)
    destroy_group_at_exit()


def _hold_with_group(store: Store) -> None:
    """Hold a reference to the store as long as there is a process group: C++ calls its methods without one."""
    weakref.finalize(dist.group.WORLD, lambda _: None, store).atexit = False


def device() -> torch.device:
    """Return the device of this worker: the first of its share of the node's GPUs, else the CPU.

    The workers of a node share the visible GPUs evenly. If the GPUs cannot be divided evenly, each worker takes one, in
    turns.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, nproc = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    each = gpus // nproc if nproc and gpus % nproc == 0 else 1
    return torch.device("cuda", local_rank() * each % gpus)


def local_rank() -> int:
    """Return this worker's index on its node, from 0; 0 without an agent."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank() -> int:
    """Return this worker's rank in the process group.

    In a process that sets up before it enters a group (`State.run`), this is the rank that it will have, and `is_main`
    is false on each rank.

    Raises:
        RuntimeError: there is no process group yet.
    """
    _require_group()
    set_up.note_reader()
    return int(os.environ["RANK"]) if membership.is_alone else dist.get_rank()


def world_size() -> int:
    """Return the number of workers in the process group, or in the one that this process will enter.

    Raises:
        RuntimeError: there is no process group yet.
    """
    _require_group()
    set_up.note_reader()
    return int(os.environ["WORLD_SIZE"]) if membership.is_alone else dist.get_world_size()


def is_main() -> bool:
    """Return whether this is rank 0, the rank that writes files and reports.

    Raises:
        RuntimeError: there is no process group yet.
    """
    set_up.note_reader()
    return rank() == 0 and not membership.is_alone


def do_on_all(action: Callable[[], None]) -> None:
    """Run `action` on every rank and return only if it succeeded on all of them. A collective.

    Raises:
        PeerError: `action` failed on another rank (a rank where it failed raises the original error).
    """
    error: Exception | None = None
    try:
        action()
    except Exception as caught:  # noqa: BLE001 - the other ranks must be informed of any error
        error = caught
    failures = torch.tensor([error is not None], dtype=torch.int64, device=backend_device())
    try:
        if world_size() > 1:
            dist.all_reduce(failures)
    finally:
        if error is not None:
            raise error  # even if the all_reduce fails because other ranks do not take part in it
    if failures.item():
        raise PeerError("another rank could not load the checkpoint; its own output says why")


def broadcast_numbers(*numbers: int) -> list[int]:
    """Return rank 0's numbers on every rank. A collective."""
    wire = torch.tensor(numbers, dtype=torch.int64, device=backend_device())
    dist.broadcast(wire, src=0)
    return [int(number) for number in wire.tolist()]


def sum_over_ranks(*numbers: int) -> list[int]:
    """Return the sums over all ranks on every rank. A collective."""
    wire = torch.tensor(numbers, dtype=torch.int64, device=backend_device())
    dist.all_reduce(wire)
    return [int(number) for number in wire.tolist()]


def open_control_page() -> contract.ControlPage | None:
    """Map the control page that the agent handed down; return None without an agent.

    The descriptor stays open, so that the page can be mapped again.

    Raises:
        RuntimeError: the agent has another version than this package, or did not start this process itself.
    """
    descriptor = os.environ.get(contract.CONTROL_FD)
    if descriptor is None:
        return None
    if not contract.is_control_page(int(descriptor)):
        raise contract.not_handed_down(contract.CONTROL_FD, int(descriptor), "not the agent's page here")
    page = contract.ControlPage(int(descriptor))
    if page.version != contract.PAGE_VERSION:
        raise RuntimeError(
            f"wanted a control page of version {contract.PAGE_VERSION}, the agent made version {page.version}; "
            "install the same elastic-agent for the agent and the training script"
        )
    return page


def _register_stack_dump() -> None:
    # In a process other than the agent's worker, the descriptor of the page may refer to anything.
    page = open_control_page() if stacks_descriptor() is not None else None
    if page is not None:
        register_stack_dump(page)
        page.close()
        listen_to_agent()


def _require_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet; call trainer_runtime.init() first")


def _agree_on_backend(store: Store, own_rank: int, world: int) -> str:
    """Return the backend that all ranks can use: NCCL if all can use it, else gloo.

    Nodes may differ. If each rank chose for itself, ranks with different backends would wait for each other until the
    timeout. Other launchers may give the store of an earlier group, where a rank had another GPU: there only what never
    changes is exchanged, and two ranks on one GPU get NCCL's error.
    """
    keys = [f"trainer_runtime/backend/{rank}" for rank in range(world)]
    gpu = _own_gpu() if contract.RANKS_KEY in os.environ else ""
    # Ranks that see one GPU each may see different ones: `choose_backend` compares their names.
    backend = "nccl" if gpu else _own_backend()
    is_one_of_few = backend == "gloo" and torch.cuda.is_available()
    store.set(keys[own_rank], f"{backend} {gpu or (_few_gpus() if is_one_of_few else f'rank-{own_rank}')}")
    entries = store.multi_get(keys)  # waits until all ranks have set theirs
    backend, reason = choose_backend([entry.decode() for entry in entries])
    if own_rank == 0 and reason:
        warn(reason)
    return backend


def choose_backend(entries: Sequence[str]) -> tuple[str, str]:
    """Return the backend for ranks that can use these, and why it is not NCCL if some of them could use that.

    NCCL refuses two ranks on one GPU also if they are on different nodes: containers, or agents of one machine.

    Args:
        entries: `BACKEND GPU` of each rank: the best backend that it can use alone, and a name that only its GPU has,
            or how many ranks see how many GPUs.
    """
    world = len(entries)
    without = [rank for rank, entry in enumerate(entries) if entry.startswith("gloo ")]
    if without:
        few = f"{len(without)} of {world} have no GPU of their own, rank {without[0]} for one"
        if len(without) < world:
            return "gloo", f"all ranks use gloo: {few}"
        seen = entries[0].removeprefix("gloo ")
        is_few = seen.startswith(_FEW)
        return "gloo", f"all ranks use gloo: {seen.removeprefix(_FEW)}" if is_few else ""
    owners: dict[str, int] = {}
    for rank, entry in enumerate(entries):
        gpu = entry.removeprefix("nccl ")
        if (other := owners.setdefault(gpu, rank)) != rank:
            return "gloo", f"all ranks use gloo: ranks {other} and {rank} share the GPU {gpu}, which NCCL refuses"
    return "nccl", ""


def _own_gpu() -> str:
    """Return a name of this rank's GPU that no other GPU has. Empty: it has none, or this torch does not tell."""
    return str(getattr(torch.cuda.get_device_properties(device()), "uuid", "")) if device().type == "cuda" else ""


def _few_gpus() -> str:
    ranks, gpus = os.environ.get("LOCAL_WORLD_SIZE", "0"), torch.cuda.device_count()
    return f"{_FEW}the {ranks} ranks of a node see {gpus} GPU{'s' * (gpus != 1)}; let each see all GPUs of its node"


def _own_backend() -> str:
    """Return the best backend for this rank. NCCL refuses two ranks on one GPU; gloo works, through host memory."""
    if not torch.cuda.is_available():
        return "gloo"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return "nccl" if ranks_here <= torch.cuda.device_count() else "gloo"


def backend_device() -> torch.device:
    """Return the device that a tensor must be on for the group's backend to send it."""
    return device() if dist.get_backend() == "nccl" else torch.device("cpu")


@contextlib.contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Make gloo listen on the loopback interface; by default it listens on the address of the host name."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((label for _, label in socket.if_nameindex() if label.startswith("lo")), None)
    if name in os.environ or loopback is None:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]
