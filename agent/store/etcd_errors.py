"""The meaning of a failed call: in one line for an operator, and whether etcd can have acted on it.

gRPC reports UNAVAILABLE both for a call that found no connection and for one whose connection broke during the call.
Only its text distinguishes them: a call whose text begins with one of `_NEVER_SENT` ended while its connection (TCP,
TLS and HTTP/2) was being established, so nothing of it was sent. Any other call may have reached etcd.
"""

from __future__ import annotations

import re
from typing import Any

import grpc

from agent.errors import StoreUnavailable

_NEVER_SENT = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")

# From gRPC's text about a connection that could not be established to a message that an operator can act on.
_TLS_TROUBLES = (
    ("unable to get local issuer certificate|self.signed certificate", "its certificate is not signed by --etcd_ca"),
    (
        "certificate signature failure",
        "its certificate was made from another secret, or by another authority of that name",
    ),
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not yet valid"),
    (
        "Hostname Verification Check failed|not the peer name",
        "its certificate is for another name than this endpoint's",
    ),
    # With TLS 1.3 etcd checks the client's certificate last. Its rejection arrives on the open connection, or before
    # the handshake has ended, depending on timing.
    (
        r"Unwrap failed|ALERT_(BAD_CERTIFICATE|CERTIFICATE_\w+|UNKNOWN_CA)",
        "it does not accept this client: --etcd_cert is missing, expired, or signed by another authority",
    ),
    ("Handshake read failed|WRONG_VERSION_NUMBER|wrong version number", "it does not speak TLS: want http://?"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate cannot be verified"),
    (r"\d: Socket closed$", "it closed the connection at once: does it want https://?"),
)

# etcd's texts when it does not, or no longer, know the caller. In these cases it has done nothing.
_UNKNOWN_CALLER = ("invalid auth token", "user name is empty", "revision of auth store is old")


class EndpointFailed(StoreUnavailable):
    """The endpoint did not answer: another endpoint, or another attempt, may succeed."""


class OutOfTime(EndpointFailed):
    """The time for the whole call was over before the endpoint had as long as an attempt may take."""


class NeverSent(EndpointFailed):
    """No connection to the endpoint could be established: nothing of the call has left this process."""


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """Return the status of a failed call."""
    call: Any = error  # whatever gRPC raises is also its `Call`, which the published types do not say
    code: grpc.StatusCode = call.code()
    return code


def details_of(error: grpc.RpcError) -> str:
    """Return the server's or gRPC's text about a failed call, in one line."""
    details = _text(error)
    if not details.startswith(_NEVER_SENT):
        return details
    for pattern, meaning in _TLS_TROUBLES:
        if re.search(pattern, details):
            return meaning
    # Only the end of gRPC's own text, after the last colon, is helpful.
    cause = re.sub(r"\]$| \(\d+\)$", "", details.rpartition(": ")[2])
    return cause if "connect" in details.partition(":")[0] else f"its name cannot be resolved ({cause})"


def was_never_sent(error: grpc.RpcError) -> bool:
    """Whether nothing of the call can have reached a server, so that even a write may be sent elsewhere."""
    return code_of(error) is grpc.StatusCode.UNAVAILABLE and _text(error).startswith(_NEVER_SENT)


def is_caller_unknown(details: str) -> bool:
    """Whether etcd rejected a call because it had no token, or one that etcd does not know (any more)."""
    return any(words in details for words in _UNKNOWN_CALLER)


def is_permission_denied(details: str) -> bool:
    """Whether etcd knows the user and denies the request."""
    return "permission denied" in details


def is_etcd_away(error: grpc.RpcError) -> bool:
    """Whether no answer came, so that another endpoint is worth a try."""
    return code_of(error) in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def _text(error: grpc.RpcError) -> str:
    call: Any = error
    return " ".join((call.details() or code_of(error).name).split())
