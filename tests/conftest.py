"""What holds for all tests."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from authority import Authority

import agent.store  # noqa: F401 - it says how gRPC behaves: before a test imports that

pytest_plugins = ["process_tests"]

gc.disable()  # while thousands of tests are collected, there is little garbage to find

# A shell without job control starts what goes to the background deaf to Ctrl-C, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, except among what the tests consist of."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority of certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, whose certificates are not accepted."""
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session", autouse=True)
def _own_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs that tests run are noted in a directory of theirs, and no others are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
