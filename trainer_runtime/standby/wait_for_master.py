"""Knocks where rank 0's store will be, before torch connects to it.

The ranks of a group start at the same moment, and mostly another one is there before rank 0 listens. torch's client
takes the first refusal for a long absence: it sleeps for about 0.5 s, then longer and longer. So the function with
which torch opens the store of `env://` and `tcp://` gets another one around it, which asks in short pauses first.
Nothing but the next answer tells that somebody listens by now.

Once it is not refused any more, or a tenth of the store's time-out is over, torch does all that it always does. So it
is torch that fails, in its own words. Whatever is no refusal is left to torch at once.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # what is imported here, every cold start pays for; torch has imported the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_MODULE = "torch.distributed.rendezvous"
_FUNCTION = "_create_c10d_store"
_PARAMETERS = ("hostname", "port", "rank", "world_size", "timeout")
"""Its first ones. Where they have other names, it is a torch that nothing is known of."""
_PORTS = range(1, 1 << 16)
_SHARE = 0.1
_ANSWER_WITHIN_S = 1.0
"""Where nobody answers at all, it is no matter of moments."""
_PAUSE_SHARE = 0.1
"""Of the time that it has knocked already: so much is lost at most."""
_PAUSE_LEAST_S, _PAUSE_MOST_S = 0.001, 0.25


def install() -> None:
    """Have this process knock: torch's function is changed now, or when it is imported."""
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    else:
        finder = _Finder()
        os.register_at_fork(after_in_child=finder.leave)
        sys.meta_path.insert(0, finder)


class _Finder:
    """Waits for the import of that one module."""

    def leave(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called at the beginning of each import; finds what the others find."""
        if name != _MODULE:
            return None
        self.leave()
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is not None:
            _wrap_once_loaded(spec)
        return spec


def _wrap_once_loaded(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    own = getattr(loader, "exec_module", None)
    if own is None or not hasattr(loader, "__dict__"):
        return

    def load(module: ModuleType) -> None:
        del loader.exec_module  # which was this one: its class has the other
        own(module)
        _wrap(module)

    loader.exec_module = load


def _wrap(module: ModuleType) -> None:
    create: Any = vars(module).get(_FUNCTION)
    code = getattr(create, "__code__", None)
    if code is None or code.co_varnames[: len(_PARAMETERS)] != _PARAMETERS:
        return
    from contextlib import suppress  # noqa: PLC0415
    from functools import wraps  # noqa: PLC0415

    @wraps(create)
    def knock_and_create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: Any,  # noqa: ANN401
        *rest: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> object:
        if rank != 0 and port in _PORTS:
            with suppress(Exception):  # whatever is wrong with what was given, torch says it
                knock(hostname, port, timeout.total_seconds())
        return create(hostname, port, rank, world_size, timeout, *rest, **named)

    setattr(module, _FUNCTION, knock_and_create)


def knock(host: str, port: int, timeout_s: float) -> None:
    """Wait until connections are not refused any more, a tenth of a store's time-out at most.

    Args:
        host: where rank 0's store will listen.
        port: the same.
        timeout_s: the store's.

    Raises:
        OSError: the host's name leads nowhere.
    """
    import socket  # noqa: PLC0415
    import time  # noqa: PLC0415

    at_most_s = _SHARE * timeout_s

    # Once: a name may be asked for over the network.
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    began = time.monotonic()
    while _is_refused(addresses) and (waited_s := time.monotonic() - began) < at_most_s:
        time.sleep(min(max(waited_s * _PAUSE_SHARE, _PAUSE_LEAST_S), _PAUSE_MOST_S))


def _is_refused(addresses: Sequence[tuple[Any, ...]]) -> bool:
    """Whether nobody listens at any of these, as a host that is there has said."""
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
