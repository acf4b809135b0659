"""The address of the page."""

from __future__ import annotations

import socket

import pytest

from agent.errors import ConfigError
from agent.web.address import listen, parse_http, url


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "127.0.0.1", 8080),
        ("0", "127.0.0.1", 0),
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("node-1.local:8080", "node-1.local", 8080),
        ("[::1]:8080", "::1", 8080),
        (" 8080 ", "127.0.0.1", 8080),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_http(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", ":8080", "host:", "host:99999", "::1:8080", "[1.2.3.4]:80", "host:-1", "x:²", "1" * 5000]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--http must be HOST:PORT"):
        parse_http(text)


def test_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot be listened on"):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["a..b", "no.such.host.invalid", "198.51.100.7"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot be listened on"):
        listen(host, 0)


def test_listening_on_all_addresses_includes_ipv4() -> None:
    with listen("::", 0) as everywhere, socket.create_connection(("127.0.0.1", everywhere.getsockname()[1])):
        pass


def test_the_url_for_browsers() -> None:
    with listen("127.0.0.1", 0) as here:
        assert url(here, "10.0.0.1") == f"http://127.0.0.1:{here.getsockname()[1]}"
    with listen("0.0.0.0", 0) as everywhere:
        port = everywhere.getsockname()[1]
        assert url(everywhere, "10.0.0.1") == f"http://10.0.0.1:{port}"
        assert url(everywhere, "fd00::1") == f"http://[fd00::1]:{port}"
