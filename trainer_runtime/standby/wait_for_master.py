"""Waits until rank 0's store accepts connections, before torch connects to it.

The ranks of a group start at the same moment, and usually another rank is ready before rank 0 listens. After the first
refused connection, torch's client sleeps for about 0.5 s, then longer and longer. So the function with which torch
opens the store of `env://` and `tcp://` is wrapped: the wrapper tries to connect in short intervals first. Polling is
the only way to learn that the port is open.

Once the connection is no longer refused, or a tenth of the store's timeout is over, torch proceeds as it always does.
So any error is torch's own. Every error other than a refusal is left to torch at once.
"""

from __future__ import annotations

import sys

from .import_hooks import around_import

TYPE_CHECKING = False  # every cold start pays for imports at the top; torch has loaded those in the functions
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

_MODULE = "torch.distributed.rendezvous"
_FUNCTION = "_create_c10d_store"
_PARAMETERS = ("hostname", "port", "rank", "world_size", "timeout")
"""The function's first parameters. If they have other names, this torch is unknown and left alone."""
_PORTS = range(1, 1 << 16)
_SHARE = 0.1
_ANSWER_WITHIN_S = 1.0
"""Seconds to wait for an answer; if the host does not answer at all, waiting in short intervals is pointless."""
_PAUSE_SHARE = 0.1
"""Pause as a share of the time waited so far, which bounds the delay after the port opens."""
_PAUSE_LEAST_S, _PAUSE_MOST_S = 0.001, 0.25


def install() -> None:
    """Wrap torch's function now, or when torch imports the module."""
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    else:
        around_import(_MODULE, _load_and_wrap)


def _load_and_wrap(module: ModuleType, load: Callable[[ModuleType], None]) -> None:
    load(module)
    _wrap(module)


def _wrap(module: ModuleType) -> None:
    create: Any = vars(module).get(_FUNCTION)
    code = getattr(create, "__code__", None)
    if code is None or code.co_varnames[: len(_PARAMETERS)] != _PARAMETERS:
        return
    from contextlib import suppress  # noqa: PLC0415
    from functools import wraps  # noqa: PLC0415

    @wraps(create)
    def wait_and_create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: Any,  # noqa: ANN401
        *rest: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> object:
        if rank != 0 and port in _PORTS:
            with suppress(Exception):  # torch reports whatever is wrong with the arguments
                wait_until_listening(hostname, port, timeout.total_seconds())
        return create(hostname, port, rank, world_size, timeout, *rest, **named)

    setattr(module, _FUNCTION, wait_and_create)


def wait_until_listening(host: str, port: int, timeout_s: float) -> None:
    """Wait until connections are no longer refused, for at most a tenth of the store's timeout.

    Args:
        host: host of rank 0's store.
        port: port of rank 0's store.
        timeout_s: the store's timeout in seconds.

    Raises:
        OSError: the host's name cannot be resolved.
    """
    import socket  # noqa: PLC0415
    import time  # noqa: PLC0415

    at_most_s = _SHARE * timeout_s

    # Once, because resolving a name may use the network.
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    began = time.monotonic()
    while _is_refused(addresses) and (waited_s := time.monotonic() - began) < at_most_s:
        time.sleep(min(max(waited_s * _PAUSE_SHARE, _PAUSE_LEAST_S), _PAUSE_MOST_S))


def _is_refused(addresses: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether a host refused the connection and no address accepted one."""
    import socket  # noqa: PLC0415

    is_refused = False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as caller:
            caller.settimeout(_ANSWER_WITHIN_S)
            try:
                caller.connect(address)
            except ConnectionRefusedError:
                is_refused = True
            except OSError:
                continue
            else:
                return False
    return is_refused
