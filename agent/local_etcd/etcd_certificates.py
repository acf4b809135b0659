"""Certificates that agents make themselves: from a secret that all machines are given, or each for its own links.

Every process that is given the secret derives the same certificate authority from it and issues itself a certificate.
The members of an etcd that agents bring accept no client and no other member without one, and their connections are
encrypted. So no certificates have to be distributed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where it is needed: most commands do without
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256 (SEC 2): private keys are numbers from 1 to one below it."""
_VALID = dt.datetime(2000, 1, 1, tzinfo=dt.UTC), dt.datetime(2049, 12, 31, tzinfo=dt.UTC)
"""The secret's life is the job's, and the machines' clocks need not agree."""
_AUTHORITY = "elastic-agent job"
_LEAF = "elastic-agent"


@dataclass(frozen=True)
class Tls:
    """What a connection by TLS is made with: PEM texts."""

    ca: bytes | None = None
    """Whom to trust. None: gRPC's own list of public authorities."""
    cert: bytes | None = None
    """Ours, with what stands between it and its authority. None: etcd asks for none."""
    key: bytes | None = field(default=None, repr=False)


def issue(secret: str, names: Iterable[str] = ()) -> Tls:
    """Return a certificate of the secret's authority, its key, and the authority's certificate.

    Args:
        secret: what the job's machines share.
        names: host names or IP addresses that it is to be valid for, besides 127.0.0.1.
    """
    from cryptography import x509  # noqa: PLC0415

    authority, own = _authority_of(secret), _new_key()
    hosts = x509.SubjectAlternativeName([_host(name) for name in dict.fromkeys(["127.0.0.1", *names])])
    cert = _signed(_certificate(_LEAF, own, _AUTHORITY).add_extension(hosts, critical=False), authority)
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    ca = _signed(_certificate(_AUTHORITY, authority, _AUTHORITY).add_extension(is_authority, critical=True), authority)
    return Tls(ca, cert, _pem(own))


def self_signed() -> tuple[bytes, bytes]:
    """Return a certificate that no authority has signed, and its key, as PEM: it is known by its fingerprint."""
    own = _new_key()
    return _signed(_certificate(_LEAF, own, _LEAF), own), _pem(own)


def _authority_of(secret: str) -> EllipticCurvePrivateKey:
    """The authority's private key. Slow, since what a person chose can be guessed."""
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    told = hashlib.scrypt(secret.encode(), salt=b"elastic-agent: the job's authority", n=1 << 14, r=8, p=1, dklen=48)
    return ec.derive_private_key(int.from_bytes(told, "big") % (_ORDER - 1) + 1, ec.SECP256R1())


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
        not_valid_before=_VALID[0],
        not_valid_after=_VALID[1],
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
