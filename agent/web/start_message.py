"""What the agent tells the page's process on its standard input: secrets stay out of arguments and variables."""

from __future__ import annotations

import msgspec

from agent.store.access import Credentials
from trainer_runtime.tls import TlsFiles


class StartMessage(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process needs to know."""

    listener: int | None
    """Descriptor of the listening socket, which it inherits. None: no page is served."""
    events: int | None
    """The same of the file that events go to. None: they are not written."""
    endpoints: tuple[str, ...]
    credentials: Credentials
    job_id: str
    node_id: str
    """Of the agent, unless another one on this machine had it first."""
    since: float
    """What happened before has been told, or is nobody's to tell: seconds since 1970."""
    is_again: bool
    """An earlier process has told what was there."""
    tls: TlsFiles | None = None
    """Its certificate. None: it is served in the clear."""
    token: str | None
    """None: the one that is derived from the job's secret."""


def encode(orders: StartMessage) -> bytes:
    """As one line."""
    return msgspec.json.encode(orders) + b"\n"


def decode(line: bytes) -> StartMessage:
    """Read it again."""
    return msgspec.json.decode(line, type=StartMessage)
