"""What holds for all tests."""

import signal

import agent.store  # noqa: F401 - it says how gRPC behaves: before a test imports that

pytest_plugins = ["process_tests"]

# A shell without job control starts what goes to the background deaf to Ctrl-C, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
