"""The store through which the ranks of a group meet: a TCPStore on the master's address, with unguessable names.

A TCPStore that torch opens by itself listens on every address and accepts every connection. Under an agent, rank 0's
store listens only on the address by which the ranks find it. All names have a prefix that is derived from the group's
key, which only its ranks are given, and `rank_messages.py` authenticates its values with that key. Torch leaves this
open: anybody who reaches the port can list the names, and then overwrite or delete values. docs/security.md describes
the effect.

Without an agent, or where the script opens its process group itself, the store is as torch opens it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer_runtime import contract
from trainer_runtime.standby.wait_for_master import wait_until_listening

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

_BACKLOG = 4096


def ranks_key() -> bytes:
    """Return the key that the agents gave to the ranks of this group; empty without an agent."""
    return bytes.fromhex(os.environ.get(contract.RANKS_KEY, ""))


def private_prefix(key: bytes) -> str:
    """Return the prefix of all names; empty without a key."""
    return f"{hmac.digest(key, b'names', hashlib.sha256).hex()}/" if key else ""


def open_rank_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Open the store on rank 0, and connect to it on the other ranks, at MASTER_ADDR and MASTER_PORT.

    Args:
        rank: this rank.
        world_size: number of ranks.
        timeout: limit for the other ranks to connect, and for each operation.

    Raises:
        KeyError: MASTER_ADDR or MASTER_PORT is not set.
        torch.distributed.DistError: the port is in use, or rank 0 did not open the store in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _listen(address, port) if rank == 0 else None
    if rank != 0:
        with suppress(OSError):  # torch reports whatever is wrong with the address
            wait_until_listening(address, port, timeout.total_seconds())
    store = dist.TCPStore(  # type: ignore[attr-defined] # public, but missing from torch's types
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,  # as in torch's own rendezvous: other users of the port in this process share the store
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    return dist.PrefixStore(private_prefix(ranks_key()).rstrip("/"), store)  # type: ignore[attr-defined] # as above


def _listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on this address alone; None if it is a name, or not an address of this host.

    A name may resolve differently on other hosts; on its own host it is often the loopback interface.

    Raises:
        torch.distributed.DistNetworkError: the port is in use; worded like torch's error, which the agent recognizes.
    """
    try:
        ((family, kind, _, _, place), *_) = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return None
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the agent has held the port until now
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:  # the host is behind address translation
            return None
        name = errno.errorcode.get(error.errno or 0, "")
        raise dist.DistNetworkError(
            f"the ranks' store could not listen on {address}, port: {port}, {name}: {error.strerror}"
        ) from error
    return listener
