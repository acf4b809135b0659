"""A server that speaks S3, for tests: moto's, on a port of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"


class ObjectStore:
    """The server. It can go away, and come back at the same address with all objects."""

    def __init__(self) -> None:
        self._port = 0
        self._start()
        self.client.create_bucket(Bucket=BUCKET)

    def _start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        self._port = self._server.get_host_and_port()[1]

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs, in variables that all clients of S3 know."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    @property
    def client(self) -> boto3.client:
        """Another client, to look at the objects and to damage them."""
        known = self.environment
        return boto3.client(
            "s3",
            endpoint_url=known["AWS_ENDPOINT_URL"],
            aws_access_key_id="someone",
            aws_secret_access_key="secret",
            region_name=known["AWS_DEFAULT_REGION"],
        )

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin so."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return sorted(each["Key"] for each in found)

    def go_away(self) -> None:
        """Answer nobody any more."""
        self._server.stop()

    def come_back(self) -> None:
        """Answer again, with what was there."""
        self._start()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run the server."""
    store = ObjectStore()
    try:
        yield store
    finally:
        store.go_away()
