"""What asks for rank 0 before torch does: when it lets torch go on, and what it leaves to torch."""

from __future__ import annotations

import inspect
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from agent.ports import hold_port
from trainer_runtime.standby import wait_for_master

_LONG = timedelta(hours=1)


def _create_c10d_store(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: int = 1
) -> tuple[Any, ...]:
    """Tries once, where torch's would sleep."""
    socket.create_connection((hostname, port), 60).close()
    return rank, world_size, timeout, use_libuv


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """It, within a process that knocks."""
    module = ModuleType("torch.distributed.rendezvous")
    vars(module)["_create_c10d_store"] = _create_c10d_store
    monkeypatch.setitem(sys.modules, module.__name__, module)
    wait_for_master.install()
    made: Callable[..., tuple[Any, ...]] = vars(module)["_create_c10d_store"]
    assert made is not _create_c10d_store
    return made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were made, which take no time."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_that_does_not_listen_yet_is_waited_for(
    create: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """What connects then is not refused once. It gets what it was given."""
    pauses: list[float] = []
    with hold_port("127.0.0.1") as held:

        def pause(length_s: float) -> None:
            pauses.append(length_s)
            if len(pauses) == 3:
                held.listen()

        monkeypatch.setattr(time, "sleep", pause)
        assert create(host, held.getsockname()[1], 1, 2, _LONG, use_libuv=0) == (1, 2, _LONG, 0)
    assert len(pauses) == 3


def test_pauses_grow_with_the_time_that_has_passed(
    create: Callable[..., Any], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a tenth of it, or a millisecond; never more than a quarter of a second."""
    clock = iter([100.0, 100.0, 100.002, 100.1, 101.0, 110.0, 100.0 + 0.1 * _LONG.total_seconds()])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(wait_for_master, "_is_refused", lambda _: True)
    with hold_port("127.0.0.1") as held, pytest.raises(ConnectionRefusedError):
        create("127.0.0.1", held.getsockname()[1], 1, 2, _LONG)
    assert pauses == pytest.approx([0.001, 0.001, 0.01, 0.1, 0.25])


def test_where_nobody_comes_it_is_torch_that_fails(create: Callable[..., Any]) -> None:
    with hold_port("127.0.0.1") as held, pytest.raises(ConnectionRefusedError):
        create("127.0.0.1", held.getsockname()[1], 1, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("host", "port", "rank", "timeout", "error"),
    [
        ("127.0.0.1", None, 0, _LONG, ConnectionRefusedError),  # it is the one that will listen
        ("no.such.host.invalid", 1, 1, _LONG, socket.gaierror),
        ("127.0.0.1", 1 << 16, 1, _LONG, ConnectionRefusedError),  # the system would take it for another one
        ("127.0.0.1", None, 1, None, ConnectionRefusedError),  # what is no time-out at all
    ],
)
def test_what_is_no_refusal_of_another_rank_is_left_to_torch(
    create: Callable[..., Any],
    pauses: list[float],
    host: str,
    port: int | None,
    rank: int,
    timeout: object,
    error: type[Exception],
) -> None:
    with hold_port("127.0.0.1") as held, pytest.raises(error):
        create(host, held.getsockname()[1] if port is None else port, rank, 2, timeout)
    assert pauses == []


def test_one_address_of_several_is_enough(pauses: list[float]) -> None:
    """As `localhost`, which may be two, of which mostly one listens."""
    with hold_port("127.0.0.1") as refusing, socket.create_server(("127.0.0.1", 0)) as listening:
        found = [
            info
            for held in (refusing, listening)
            for info in socket.getaddrinfo("127.0.0.1", held.getsockname()[1], type=socket.SOCK_STREAM)
        ]
        assert wait_for_master._is_refused(found[:1])
        assert not wait_for_master._is_refused(found)
    assert pauses == []


def test_it_looks_like_torchs_own(create: Callable[..., Any]) -> None:
    assert inspect.signature(create) == inspect.signature(_create_c10d_store)
    assert (create.__name__, create.__module__) == (_create_c10d_store.__name__, __name__)


@pytest.mark.parametrize("own", [None, len, lambda host, port, *rest: (host, port, rest)])
def test_a_torch_that_is_not_known_is_left_alone(own: object, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.distributed.rendezvous")
    vars(module)["_create_c10d_store"] = own
    monkeypatch.setitem(sys.modules, module.__name__, module)
    wait_for_master.install()
    assert vars(module)["_create_c10d_store"] is own
