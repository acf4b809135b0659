"""Access to the page: the token, and browser sessions. No clock here: `now` is seconds since 1970.

The token is derived from the job's secret, which is in etcd: whoever can read the secret can do more than this page
allows. Another token can be given in a file. A browser sends the token once and gets a session: a cookie that contains
its expiry and is signed with the token. Programs send the token with each request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict

from agent.errors import ConfigError
from agent.store.access import read_text
from trainer_runtime.contract import MIN_SECRET

SESSION_S = 12 * 3600.0
_MAX_FAILURES = 10
_FAILURES_WITHIN_S = 60.0
_MAX_HOSTS = 1024


def read_token(path: str | None) -> str | None:
    """Read the token from a file; None stays None. Raises `ConfigError`."""
    if path is None:
        return None
    token = read_text("--http_token_file", path)
    if len(token) < MIN_SECRET or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"--http_token_file={path} must hold one word of {MIN_SECRET} letters and digits, or more")
    return token


def token_of(secret: str) -> str:
    """Return the token of the job with this secret: 64 hexadecimal digits."""
    return hmac.digest(secret.encode(), b"elastic-agent: the web page's token", hashlib.sha256).hex()


def tokens_match(given: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def open_session(token: str, now: float) -> str:
    """Return the value of a session cookie: its expiry, signed with the token."""
    ends = str(int(now + SESSION_S))
    return f"{ends}.{_sign(token, ends)}"


def is_session(given: str, token: str, now: float) -> bool:
    """Whether a cookie was signed with this token and has not expired."""
    ends, _, signature = given.partition(".")
    if not tokens_match(signature, _sign(token, ends)):
        return False
    return int(ends) > now  # `ends` is a number, since its signature is ours


def _sign(token: str, ends: str) -> str:
    return hmac.digest(token.encode(), b"session until " + ends.encode(errors="replace"), hashlib.sha256).hex()


class FailedLogins:
    """Count wrong tokens by client address: after ten within a minute, further ones must wait."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def may_try(self, host: str, now: float) -> bool:
        """Whether a wrong token from this address is still answered as wrong."""
        return len(self._recent(host, now)) < _MAX_FAILURES

    def record(self, host: str, now: float) -> None:
        """Record a wrong token from this address."""
        self._failures[host] = [*self._recent(host, now), now]
        self._failures.move_to_end(host)
        if len(self._failures) > _MAX_HOSTS:
            self._failures.popitem(last=False)

    def _recent(self, host: str, now: float) -> list[float]:
        return [at for at in self._failures.get(host, ()) if now - at < _FAILURES_WITHIN_S]
