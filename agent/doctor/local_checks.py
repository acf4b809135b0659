"""Checks of this machine. Each is a function of its inputs and is quick, but `host_name` waits for DNS."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from agent.doctor.facts import Finding
from agent.node_facts import is_loopback
from agent.workers.environment import without_secrets
from trainer_runtime.torch_names import TESTED

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is read, not written
_LEAST_SHARED_BYTES = 1 << 30
_LEAST_DESCRIPTORS = 4096
_IMPORTS_WITHIN_S = 120.0
_INSTALL_TORCH = f"pip install torch=={TESTED[-1]}"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_BRIDGE = re.compile(r"docker\d*|br-[0-9a-f]{12}|virbr\d+|cni\d+|podman\d+|lxcbr\d+|lxdbr\d+")
"""Interfaces to containers and virtual machines on this machine; others do not reach them."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Interfaces = Mapping[str, Sequence[str]]
"""The IP addresses of each interface."""


def examine(address: str, ips: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Run all checks, for a node that other machines reach at this address."""
    interfaces = interfaces_here()
    yield network(address, ips, interfaces)
    yield interface_variables(ips, environ, interfaces)
    yield proxies(environ)
    yield shared_memory(_SHARED_MEMORY)
    yield descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    if not is_loopback(ips):
        yield host_name(socket.gethostname())


def interfaces_here() -> Interfaces:
    """Return the interfaces of this machine."""
    return {
        name: tuple(
            each.address.partition("%")[0] for each in found if each.family in {socket.AF_INET, socket.AF_INET6}
        )
        for name, found in psutil.net_if_addrs().items()
    }


def network(address: str, ips: Sequence[str], interfaces: Interfaces) -> Finding:
    """Check that the address is on an interface that others reach."""
    about = "address"
    if is_loopback(ips):
        return Finding(about, f"{address} is reached from this machine only, which is fine for a job on one machine")
    mine = [name for name, addresses in interfaces.items() if set(ips) & set(addresses)]
    others = [
        f"{name} {addresses[0]}"
        for name, addresses in sorted(interfaces.items())
        if addresses and name not in mine and not is_loopback(addresses) and not _BRIDGE.fullmatch(name)
    ]
    if not mine:
        return Finding(about, f"{address} is on no interface of this machine", _give_address(others))
    if _BRIDGE.fullmatch(mine[0]):
        found = f"{address} is on {mine[0]}, a bridge inside this machine, which other machines cannot reach"
        return Finding(about, found, _give_address(others))
    also = f" (there are also {', '.join(others)}: --address chooses)" if others else ""
    return Finding(about, f"{address} on {mine[0]}{also}")


def interface_variables(ips: Sequence[str], environ: Mapping[str, str], interfaces: Interfaces) -> Finding:
    """Check interface variables that the user has set. The agent sets the others."""
    about = "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    right = next((name for name, addresses in interfaces.items() if set(ips) & set(addresses)), "")
    for name in _INTERFACE_VARIABLES:
        chosen = environ.get(name)
        if chosen and right and not is_loopback(ips) and not _chooses(chosen, right):
            return Finding(about, f"{name}={chosen}, and the address is on {right}", f"unset {name}, or {name}={right}")
    return Finding(about, f"the agent sets them to {right or 'the interface that has the address'}")


def _chooses(chosen: str, interface: str) -> bool:
    """Match a value like NCCL: prefixes of names, `^` for all but these, `=` for whole names."""
    is_negated, rest = chosen.startswith("^"), chosen.lstrip("^")
    is_whole, names = rest.startswith("="), rest.lstrip("=").split(",")
    plain = [name.partition(":")[0] for name in names if name]
    found = interface in plain if is_whole else any(interface.startswith(name) for name in plain)
    return found != is_negated


def proxies(environ: Mapping[str, str]) -> Finding:
    """Check for a proxy that would also be used between the machines of the job."""
    about = "proxy variables"
    found = [name for each in _PROXIES for name in (each, each.upper()) if environ.get(name)]
    if not found:
        return Finding(about, "none is set")
    if environ.get("no_proxy") or environ.get("NO_PROXY"):
        return Finding(about, f"{', '.join(found)}, with no_proxy; the agent uses no proxy")
    return Finding(
        about,
        f"{', '.join(found)}, without no_proxy: the agent uses no proxy, but the script may",
        "set no_proxy to the machines of the job, or unset it",
    )


def shared_memory(path: Path) -> Finding:
    """Check the size of shared memory, through which data loaders pass batches."""
    about = "shared memory"
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Finding(about, f"{path} does not exist: {error.strerror}", "mount a tmpfs there")
    size = found.f_frsize * found.f_blocks
    if size < _LEAST_SHARED_BYTES:
        small = f"{path} has {size >> 20} MB, which data loaders with worker processes soon fill"
        return Finding(about, small, "docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8g /dev/shm")
    return Finding(about, f"{path} has {size / (1 << 30):.1f} GB")


def descriptors(soft: int, hard: int) -> Finding:
    """Check the hard limit of open files, to which a process may raise its soft limit.

    Links, pipes and data loaders need several descriptors each.
    """
    about = "open files"
    if 0 <= hard < _LEAST_DESCRIPTORS:
        return Finding(about, f"the hard limit is {hard}", f"raise the hard limit (ulimit -Hn) to {_LEAST_DESCRIPTORS}")
    return Finding(
        about, f"the limit is {soft}" + (f", which a process may raise to {hard}" if 0 < soft < hard else "")
    )


def torch_names(environ: Mapping[str, str]) -> Finding:
    """Check that torch can be imported, and that it has the private names that `trainer_runtime` uses.

    The agent's process never imports torch, so another one does, which takes some seconds.
    """
    about = "torch"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "trainer_runtime.torch_names"],
            env=without_secrets(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORTS_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(about, f"cannot be imported within {_IMPORTS_WITHIN_S:g} s", "put it on a faster disk")
    found = (done.stdout or done.stderr).strip().rpartition("\n")[2] or f"ended with code {done.returncode}"
    return Finding(about, found, _INSTALL_TORCH if done.returncode else "")


def host_name(name: str) -> Finding:
    """Check whether the host name resolves to an address that others reach. This is a note only.

    Debian's installer maps it to 127.0.1.1, but the agent does not use the host name.
    """
    about = "host name"
    try:
        ips = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return Finding(about, f"{name} does not resolve: the agent does not use it, but a script may")
    if is_loopback(ips):
        where = f"{name} resolves to {ips[0]}, where other machines cannot reach this one"
        return Finding(about, f"{where}: the agent does not use it, but a script may")
    return Finding(about, f"{name} is {', '.join(ips)}")


def _give_address(others: Sequence[str]) -> str:
    return "give --address" + (f": {', '.join(others)}" if others else " with an address that the other machines reach")
