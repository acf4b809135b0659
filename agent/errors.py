"""Errors, classified by who must act.

Each error carries the agent's exit code. Its message says in one line what was wanted, what was found, and what to do.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_STORE = 69
EXIT_UNSAVED = 74
EXIT_TIMEOUT = 75
EXIT_BUDGET = 76


class ElasticAgentError(Exception):
    """Base of all errors shown to users; printed as one line, never as a traceback."""

    exit_code = 1


class ConfigError(ElasticAgentError):
    """The operator must act: a bad option, value or combination. Nothing was written."""

    exit_code = EXIT_USAGE


class RecordError(ElasticAgentError):
    """The operator must act: a record in etcd is malformed or has an unknown version. The message names the key."""

    exit_code = EXIT_USAGE


class StoreUnavailable(ElasticAgentError):  # noqa: N818 - says what is the case, not that a bug was hit
    """Retry: etcd did not answer in time. A write may or may not have been applied."""

    exit_code = EXIT_STORE


class LeaseGone(StoreUnavailable):
    """Retry with a new lease: etcd does not know the lease of a write (any more). Nothing was applied."""


class StoreRefused(StoreUnavailable):
    """The operator must act: etcd answers, but rejects this user or this request. Nothing was applied."""

    exit_code = EXIT_USAGE


class NotInTime(ElasticAgentError):  # noqa: N818 - same
    """Nobody need act: the requested change is still in progress after the time allowed for it."""

    exit_code = EXIT_TIMEOUT


class Compacted(ElasticAgentError):  # noqa: N818 - same
    """The reader must act: etcd has compacted the revision to watch from. Read everything again."""
