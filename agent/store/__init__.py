"""The store in which agents meet: etcd, the layout of keys, and the codec of records.

A twin in memory is for tests, and for the records of a job whose etcd has ended.
"""

from __future__ import annotations

import importlib
import os

# gRPC's own log lines could block its threads on a console that nobody reads; everything of interest is in its errors.
# gRPC's fork support starts threads in a child between fork and exec. They abort the child, because Python closes the
# descriptors that they wait for: now and then an etcd started by an agent died before it ran
# (github.com/grpc/grpc/issues/43055).
_GRPC_SETTINGS = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "false"}


def _import_grpc() -> None:
    """Import gRPC, which reads the environment at that moment; restore the environment, since workers may use gRPC."""
    added = {name: value for name, value in _GRPC_SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        importlib.import_module("grpc")
    finally:
        for name in added:
            del os.environ[name]


_import_grpc()
