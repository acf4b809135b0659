"""The role of this process in a parameter-server job, read from its environment.

The variables are Paddle's, so that jobs described for Paddle run unchanged. The agent sets the same variables.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from trainer_runtime import contract, tls
from trainer_runtime.ps.shard_connection import Endpoint
from trainer_runtime.tls import TlsError, TlsFiles, check, files_of

SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
TRAINING_ROLE = "TRAINING_ROLE"
WORKERS = "PADDLE_TRAINERS_NUM"
WORKER = "PADDLE_TRAINER_ID"
WORKER_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
ADDRESS = "POD_IP"
PORT = "PADDLE_PORT"
SECRET = "ELASTIC_AGENT_PS_SECRET"  # noqa: S105 - a name
"""Variable with the secret of the job's processes. Without one, servers admit only callers from listed machines."""
_KINDS: dict[str, Literal["server", "worker"]] = {"PSERVER": "server", "TRAINER": "worker", "HETER_TRAINER": "worker"}


@dataclass(frozen=True)
class Role:
    """The role of one process."""

    kind: Literal["server", "worker"]
    index: int
    """Index among the processes of its kind, from 0."""
    servers: tuple[Endpoint, ...]
    workers: int
    secret: bytes
    incarnation: int
    """Which of the processes that were started in this place; 1 without an agent."""
    machines: frozenset[str]
    """The machines of all listed endpoints."""
    tls: TlsFiles | None = None
    """Files for TLS between the processes. None: connections are not encrypted."""

    def addresses(self) -> frozenset[str]:
        """Return the IP addresses of the machines. Names that cannot be resolved now are left out."""
        found: set[str] = set()
        for machine in self.machines:
            with suppress(OSError):
                found |= {str(info[4][0]) for info in socket.getaddrinfo(machine, None, type=socket.SOCK_STREAM)}
        return frozenset(found)


class SecretError(RuntimeError):
    """The operator must act: the secret in the environment is too short."""


def role_of(environ: Mapping[str, str] = os.environ) -> Role:
    """Return the role that the environment describes.

    Raises:
        RuntimeError: it describes none; the message names what is missing.
        SecretError: it has a secret that is too short.
    """
    role_name = _required(environ, TRAINING_ROLE)
    kind = _KINDS.get(role_name)
    if kind is None:
        raise RuntimeError(f"{TRAINING_ROLE} must be one of {', '.join(_KINDS)}, not {role_name!r}")
    servers = tuple(_endpoint(text) for text in _required(environ, SERVERS).split(","))
    workers = _number(environ, WORKERS, 1)
    if kind == "server":
        own_endpoint = (_required(environ, ADDRESS), _number(environ, PORT, 1))
        if own_endpoint not in servers:
            raise RuntimeError(
                f"{ADDRESS}:{PORT} is {own_endpoint[0]}:{own_endpoint[1]}, which is not in {SERVERS}={environ[SERVERS]}"
            )
        index = servers.index(own_endpoint)
    else:
        index = _number(environ, WORKER, 0)
        if index >= workers:
            raise RuntimeError(f"{WORKER} must be from 0 to {workers - 1}, as {WORKERS} is {workers}, not {index}")
    listed = [text for text in environ.get(WORKER_ENDPOINTS, "").split(",") if text.strip()]
    return Role(
        kind,
        index,
        servers,
        workers,
        secret=_secret(environ),
        incarnation=int(environ.get(contract.PS_INCARNATION, "1")),
        machines=frozenset(host for host, _ in (*servers, *map(_endpoint, listed))),
        tls=_tls(environ, servers[index][0] if kind == "server" else None),
    )


def client_context(role: Role) -> ssl.SSLContext | None:
    """Return the TLS context with which this process calls servers. None: connections are not encrypted."""
    return tls.dialling(role.tls, names_host=True) if role.tls else None


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise RuntimeError(
            f"{name} is not set: start the script with `elastic-agent --server_num=N --worker_num=N`, or set "
            f"{TRAINING_ROLE}, {SERVERS} and {WORKERS}, with {ADDRESS} and {PORT} for a server, {WORKER} for a worker"
        )
    return value


def _secret(environ: Mapping[str, str]) -> bytes:
    secret = environ.get(SECRET, "")
    if secret and len(secret) < contract.MIN_SECRET:
        raise SecretError(
            f"{SECRET} must have {contract.MIN_SECRET} characters or more, not {len(secret)}: take a random one, the "
            "same for all processes of the job, for example from `openssl rand -hex 32`"
        )
    return secret.encode(errors="surrogateescape")


def _tls(environ: Mapping[str, str], host: str | None) -> TlsFiles | None:
    try:
        files = files_of(environ)
        if files is not None:
            check(files, host, calls=True)
    except TlsError as error:
        raise RuntimeError(str(error)) from None
    return files


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = _required(environ, name)
    if not text.isdecimal() or int(text) < least:
        raise RuntimeError(f"{name} must be a whole number from {least} on, not {text!r}")
    return int(text)


def _endpoint(text: str) -> Endpoint:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise RuntimeError(
            f"{SERVERS} and {WORKER_ENDPOINTS} must be lists as 10.0.0.1:6170,10.0.0.2:6170; {text!r} is no address"
        )
    return host.strip("[]"), int(port)
