"""What holds for all tests."""

import agent.store  # noqa: F401 - it says how gRPC behaves: before a test imports that
