"""An authority of certificates, for tests."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import trustme

from trainer_runtime.tls import TlsFiles


@dataclass
class Authority:
    """Signs certificates, and writes them where options can name them."""

    folder: Path

    def __post_init__(self) -> None:
        self._signer = trustme.CA()
        self.ca = self._write("ca", self._signer.cert_pem)

    def issue(self, name: str, *hosts: str, not_after: dt.datetime | None = None) -> tuple[str, str]:
        """A certificate for these hosts, and its key."""
        leaf = self._signer.issue_cert(*hosts, not_after=not_after)
        return self._write(f"{name}.crt", *leaf.cert_chain_pems), self._write(f"{name}.key", leaf.private_key_pem)

    def _write(self, name: str, *blobs: trustme.Blob) -> str:
        path = self.folder / name
        path.touch(0o600)
        path.write_bytes(b"".join(blob.bytes() for blob in blobs))
        return str(path)

    def files(self, name: str, *hosts: str) -> TlsFiles:
        """What one node is given."""
        return TlsFiles(*self.issue(name, *hosts), self.ca)
