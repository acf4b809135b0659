"""Errors, split by who must act.

Each carries the agent's exit code. A message says in one line what was wanted, what came, and what to do.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_STORE = 69
EXIT_TIMEOUT = 75
EXIT_BUDGET = 76


class ElasticAgentError(Exception):
    """Base of all errors that a user may see; printed as one line, never as a traceback."""

    exit_code = 1


class ConfigError(ElasticAgentError):
    """The operator must act: a bad option, value or combination. Nothing was written."""

    exit_code = EXIT_USAGE


class RecordError(ElasticAgentError):
    """The operator must act: a record in etcd is malformed or of an unknown version. Names the key."""

    exit_code = EXIT_USAGE


class StoreUnavailable(ElasticAgentError):  # noqa: N818 - says what is the case, not that a bug was hit
    """Nobody need act: etcd did not answer in time; whether a write landed is not known. Try again."""

    exit_code = EXIT_STORE


class LeaseGone(StoreUnavailable):
    """Nobody need act: a write was to be bound to a lease that etcd does not know (any more). Nothing landed."""


class StoreRefused(StoreUnavailable):
    """The operator must act: etcd answers, and does not let this user in or do this. Nothing landed."""

    exit_code = EXIT_USAGE


class NotInTime(ElasticAgentError):  # noqa: N818 - same
    """Nobody need act: what was asked for goes on, and was not done within the time that was given."""

    exit_code = EXIT_TIMEOUT


class Compacted(ElasticAgentError):  # noqa: N818 - same
    """The reader must act: the revision to watch from is gone; read everything again."""
