"""Only its listener can bind a reserved port."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from agent.ports import PortHold


@pytest.fixture
def hold() -> Iterator[PortHold]:
    made = PortHold()
    yield made
    made.close()


def listener(port: int, address: str = "127.0.0.1", family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen()
    return made


def test_a_store_can_listen_on_the_port_while_it_is_held(hold: PortHold) -> None:
    with listener(hold.port), socket.create_connection(("127.0.0.1", hold.port), timeout=5):
        pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this host")
def test_a_store_on_both_families_can_listen_on_the_port_too(hold: PortHold) -> None:
    with listener(hold.port, "::", socket.AF_INET6), socket.create_connection(("127.0.0.1", hold.port), timeout=5):
        pass


def test_a_listener_without_reuse_is_refused(hold: PortHold) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", hold.port))


def test_the_previous_port_stays_reserved_until_the_next_renewal(hold: PortHold) -> None:
    first = hold.port
    second = hold.renew()
    assert second == hold.port != first
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", first))
    hold.renew()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))


def test_no_two_holders_get_the_same_port() -> None:
    holds = [PortHold() for _ in range(200)]
    assert len({hold.port for hold in holds}) == 200
    for hold in holds:
        hold.close()
