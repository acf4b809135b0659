"""Optional: the etcd that agents start themselves, where none is provided."""

import agent.store  # noqa: F401 - it imports gRPC with the right settings, before a module of this package imports gRPC
