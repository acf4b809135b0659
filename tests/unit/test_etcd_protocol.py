"""etcd's messages: read from etcd3's files, of which nothing is run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent.store.etcd_protocol import parse_description

SPEAKER = """
import sys
from google.protobuf.internal import api_implementation
from agent.store import etcd_protocol
from agent.store.api import KeyRange

request = etcd_protocol.read_request([KeyRange("/a/", is_prefix=True)], "/a/")
assert bytes(request.SerializeToString()) == b"\\x12\\x0c\\x0a\\x0a\\x0a\\x03/a/\\x12\\x03/a0"
print(api_implementation.Type(), [name for name in sys.modules if name.startswith("etcd3")])
"""


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_messages_are_made_without_the_client_under_any_implementation_of_protobuf(implementation: str) -> None:
    environ = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation}
    done = subprocess.run(
        [sys.executable, "-c", SPEAKER], check=True, capture_output=True, text=True, timeout=60, env=environ
    )
    assert (done.stdout, done.stderr) == (f"{implementation} []\n", "")


def test_files_that_are_generated_in_another_way_are_refused() -> None:
    with pytest.raises(ImportError, match=r"0\.12\.0"):
        parse_description("DESCRIPTOR = pool.AddSerializedFile(b'...')")
