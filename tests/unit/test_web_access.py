"""Access to the page: tokens and sessions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.errors import ConfigError
from agent.store.keys import JobKeys
from agent.web.access import SESSION_S, FailedLogins, is_session, open_session, read_token, token_of, tokens_match
from agent.web.app import Site

TOKEN = token_of("a" * 32)
NOW = 1795300000.0


def test_each_job_has_its_own_token_which_does_not_reveal_the_secret() -> None:
    assert token_of("b" * 32) != TOKEN
    assert "a" * 8 not in TOKEN
    assert len(TOKEN) == 64


def test_a_session_expires() -> None:
    cookie = open_session(TOKEN, NOW)
    assert TOKEN not in cookie
    assert is_session(cookie, TOKEN, NOW)
    assert is_session(cookie, TOKEN, NOW + SESSION_S - 1)
    assert not is_session(cookie, TOKEN, NOW + SESSION_S + 1)


@pytest.mark.parametrize(
    "forged",
    [
        "",
        ".",
        "9999999999",
        "9999999999.",
        f"9999999999.{'0' * 64}",
        open_session(token_of("another job"), NOW),
        open_session(TOKEN, NOW).replace(".", ".0"),
        f"9{open_session(TOKEN, NOW)}",
        "\udcff.\udcff",
        "1e9.x",
    ],
)
def test_a_session_cannot_be_forged(forged: str) -> None:
    assert not is_session(forged, TOKEN, NOW)


@pytest.mark.parametrize("given", ["", TOKEN[:-1], f"{TOKEN}0", TOKEN.upper(), "\udcff", "ä"])
def test_a_wrong_token_is_refused(given: str) -> None:
    assert tokens_match(TOKEN, TOKEN)
    assert not tokens_match(given, TOKEN)


def test_wrong_tokens_must_wait_and_the_right_token_is_always_accepted() -> None:
    """Behind a proxy all clients have one address."""
    site = Site(cast("Any", SimpleNamespace(keys=JobKeys("job"))), cast("Any", None), TOKEN)

    def look_at(shown: str) -> int | None:
        refused = site._check_token(shown, TOKEN, "10.0.0.1", NOW)
        return refused.status_code if refused is not None else None

    assert [look_at(f"guess {number}") for number in range(12)] == [401] * 10 + [429] * 2
    assert look_at(TOKEN) is None
    assert look_at("another guess") == 429


def test_wrong_tokens_are_counted_for_a_minute_by_client_address() -> None:
    tries = FailedLogins()
    for second in range(10):
        assert tries.may_try("10.0.0.1", NOW + second)
        tries.record("10.0.0.1", NOW + second)
    assert not tries.may_try("10.0.0.1", NOW + 10)
    assert tries.may_try("10.0.0.2", NOW + 10)
    assert tries.may_try("10.0.0.1", NOW + 61)


def test_wrong_tokens_from_many_addresses_take_bounded_memory() -> None:
    tries = FailedLogins()
    for host in range(5000):
        tries.record(str(host), NOW)
    assert len(tries._failures) == 1024


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("0123456789abcdef\n")
    assert read_token(str(path)) == "0123456789abcdef"
    assert read_token(None) is None
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--http_token_file=.*is a secret"):
        read_token(str(path))


@pytest.mark.parametrize("content", ["short", "0123456789 abcdef", "0123456789abcdeä", "0123456789\nabcdefg", ""])
def test_an_invalid_token_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError, match="--http_token_file") as refused:
        read_token(str(path))
    assert not content or content not in str(refused.value), "it may be a secret"
