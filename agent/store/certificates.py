"""Certificates that agents generate themselves: from a secret that all machines share, or one per agent for its links.

Every process that has the secret derives the same certificate authority from it and issues a certificate to itself.
The members of an etcd run by a job accept no client and no other member without such a certificate, and their
connections are encrypted. No certificate has to be distributed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported only where needed: most commands do without it
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256 (SEC 2): private keys are numbers from 1 to `_ORDER - 1`."""
_VALIDITY = dt.datetime(2000, 1, 1, tzinfo=dt.UTC), dt.datetime(2049, 12, 31, tzinfo=dt.UTC)
"""Unlimited in practice: the secret lives as long as the job, and the machines' clocks may differ."""
_AUTHORITY = "elastic-agent job"
_LEAF = "elastic-agent"


@dataclass(frozen=True)
class Tls:
    """Certificates and key of a TLS connection, as PEM."""

    ca: bytes | None = None
    """Trusted authorities. None: gRPC's own list of public authorities."""
    cert: bytes | None = None
    """This side's certificate, with intermediate ones. None: etcd does not require one."""
    key: bytes | None = field(default=None, repr=False)


def issue(secret: str, names: Iterable[str] = ()) -> Tls:
    """Return a certificate of the secret's authority, its key, and the authority's certificate.

    Args:
        secret: shared by the job's machines.
        names: host names or IP addresses that the certificate is valid for, besides 127.0.0.1.
    """
    from cryptography import x509  # noqa: PLC0415

    authority, own = _authority_of(secret), _new_key()
    hosts = x509.SubjectAlternativeName([_host(name) for name in dict.fromkeys(["127.0.0.1", *names])])
    cert = _signed(_certificate(_LEAF, own, _AUTHORITY).add_extension(hosts, critical=False), authority)
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    ca = _signed(_certificate(_AUTHORITY, authority, _AUTHORITY).add_extension(is_authority, critical=True), authority)
    return Tls(ca, cert, _pem(own))


def self_signed() -> tuple[bytes, bytes]:
    """Return a self-signed certificate and its key, as PEM. Peers identify it by its fingerprint."""
    own = _new_key()
    return _signed(_certificate(_LEAF, own, _LEAF), own), _pem(own)


def _authority_of(secret: str) -> EllipticCurvePrivateKey:
    """Derive the authority's private key. Slow on purpose, because a secret chosen by a person can be guessed."""
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    seed = hashlib.scrypt(secret.encode(), salt=b"elastic-agent: the job's authority", n=1 << 14, r=8, p=1, dklen=48)
    return ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, ec.SECP256R1())


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    return ec.generate_private_key(ec.SECP256R1())


def _certificate(subject: str, key: EllipticCurvePrivateKey, issuer: str) -> x509.CertificateBuilder:
    from cryptography import x509  # noqa: PLC0415

    subject_name, issuer_name = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (subject, issuer)
    )
    return x509.CertificateBuilder(
        issuer_name=issuer_name,
        subject_name=subject_name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=_VALIDITY[0],
        not_valid_after=_VALIDITY[1],
    )


def _signed(certificate: x509.CertificateBuilder, by: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

    return certificate.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _host(name: str) -> x509.GeneralName:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.IPAddress(ipaddress.ip_address(name.partition("%")[0]))
    except ValueError:
        return x509.DNSName(name)
