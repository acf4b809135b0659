"""Who may come in: the token, and the sessions that it opens. No clock here: `now` is seconds since 1970.

The token is derived from the job's secret, which is in etcd: who can read that can do more than this page. Another one
can be given by a file. A browser shows it once and gets a session, a cookie that says when it ends and is signed with
the token; programs send the token itself.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict

from agent.errors import ConfigError
from agent.store.access import read_text
from trainer_runtime.contract import MIN_SECRET

SESSION_S = 12 * 3600.0
_TRIES = 10
_TRIES_WITHIN_S = 60.0
_REMEMBERED = 1024


def read_token(path: str | None) -> str | None:
    """The token in a file; None stays None. Raises `ConfigError`."""
    if path is None:
        return None
    token = read_text("--http_token_file", path)
    if len(token) < MIN_SECRET or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"--http_token_file={path} must hold one word of {MIN_SECRET} letters and digits, or more")
    return token


def token_of(secret: str) -> str:
    """The token of the job with this secret: 64 hexadecimal digits."""
    return hmac.digest(secret.encode(), b"elastic-agent: the web page's token", hashlib.sha256).hex()


def is_same(given: str, token: str) -> bool:
    """Compare in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def open_session(token: str, now: float) -> str:
    """A cookie's value: when it ends, and the proof that who made it knew the token."""
    ends = str(int(now + SESSION_S))
    return f"{ends}.{_sign(token, ends)}"


def is_session(given: str, token: str, now: float) -> bool:
    """Whether it was made with this token, and has not ended."""
    ends, _, signature = given.partition(".")
    if not is_same(signature, _sign(token, ends)):
        return False
    return int(ends) > now  # a number: it was signed


def _sign(token: str, ends: str) -> str:
    return hmac.digest(token.encode(), b"session until " + ends.encode(errors="replace"), hashlib.sha256).hex()


class FailedLogins:
    """Counts wrong tokens by where they came from: ten in a minute are told that they are wrong, the rest to wait."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()

    def may(self, host: str, now: float) -> bool:
        """Whether a wrong token from there is told that it is wrong."""
        return len(self._lately(host, now)) < _TRIES

    def note(self, host: str, now: float) -> None:
        """It was wrong."""
        self._wrong[host] = [*self._lately(host, now), now]
        self._wrong.move_to_end(host)
        if len(self._wrong) > _REMEMBERED:
            self._wrong.popitem(last=False)

    def _lately(self, host: str, now: float) -> list[float]:
        return [at for at in self._wrong.get(host, ()) if now - at < _TRIES_WITHIN_S]
