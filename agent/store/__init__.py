"""Where agents meet: etcd, its in-memory twin for tests, the layout of keys and the codec of records."""

from __future__ import annotations

import importlib
import os

# What gRPC prints could block its threads on a console that nobody reads; all that matters is in its errors. And
# threads that it starts in a child between fork and exec abort that, since Python closes there what they wait for: now
# and then an etcd of ours ended before it had begun (github.com/grpc/grpc/issues/43055).
_ASKED_OF_GRPC = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "false"}


def _import_grpc() -> None:
    """Import gRPC, which looks at the environment then, and leave that as it was: workers may use gRPC, too."""
    added = {name: value for name, value in _ASKED_OF_GRPC.items() if name not in os.environ}
    os.environ.update(added)
    try:
        importlib.import_module("grpc")
    finally:
        for name in added:
            del os.environ[name]


_import_grpc()
