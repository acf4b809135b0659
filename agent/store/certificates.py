"""Certificates for an etcd that agents bring along, made from a secret that all machines of the job are given.

Who has the secret derives the same authority from it, and issues itself a certificate: that is all that a member, an
agent or a command needs. Members accept nobody without one, neither as a client nor as another member, and what they
say is encrypted. Nobody has to hand certificates around.

The signatures are ECDSA on P-256, which both Go's TLS and gRPC's take; Python's library has none. A key is used for a
few signatures in its life and is never asked for one by somebody else, so the arithmetic need not be fast, nor take
the same time for all numbers.

Prior art: SEC 1 (keys, ECDSA), RFC 5280 (certificates), RFC 5915 (private keys).
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

MIN_SECRET = 16
"""Characters. Who is shown a certificate can try guesses at home."""

# Of P-256: the field's prime, the base point, its order.
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_BYTES = 32

_Point = tuple[int, int] | None
"""None: at infinity."""

_EC_PUBLIC_KEY, _P256, _ECDSA_SHA256 = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7", "1.2.840.10045.4.3.2"
_COMMON_NAME, _ALTERNATIVE_NAMES, _BASIC_CONSTRAINTS, _KEY_USAGE = "2.5.4.3", "2.5.29.17", "2.5.29.19", "2.5.29.15"
_INTEGER, _BITS, _OCTETS, _OBJECT, _TEXT, _TIME, _SEQUENCE, _SET = 2, 3, 4, 6, 12, 23, 48, 49
_VALID = (b"000101000000Z", b"491231235959Z")
"""As long as the form allows: the secret's life is the job's, and the machines' clocks need not agree."""
_AUTHORITY = "elastic-agent job"


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
    authority = _authority_of(secret)
    own = _random()
    hosts = b"".join(_host(name) for name in dict.fromkeys(["127.0.0.1", *names]))
    leaf = _certificate(
        "elastic-agent",
        own,
        authority,
        _extension(_ALTERNATIVE_NAMES, _der(_SEQUENCE, hosts)),
        _extension(_KEY_USAGE, _bits(b"\x80", unused=7)),  # digital signature
    )
    ca = _certificate(
        _AUTHORITY,
        authority,
        authority,
        _extension(_BASIC_CONSTRAINTS, _der(_SEQUENCE, b"\x01\x01\xff"), is_critical=True),  # it is one
        _extension(_KEY_USAGE, _bits(b"\x04", unused=2), is_critical=True),  # it signs certificates
    )
    return Tls(
        ca=_pem("CERTIFICATE", ca), cert=_pem("CERTIFICATE", leaf), key=_pem("EC PRIVATE KEY", _private_key(own))
    )


def _authority_of(secret: str) -> int:
    """The authority's private key. Slow, since what a person chose can be guessed."""
    told = hashlib.scrypt(secret.encode(), salt=b"elastic-agent: the job's authority", n=1 << 14, r=8, p=1, dklen=48)
    return int.from_bytes(told, "big") % (_N - 1) + 1


def _random() -> int:
    return secrets.randbelow(_N - 1) + 1


def _certificate(subject: str, key: int, authority: int, *extensions: bytes) -> bytes:
    algorithm = _der(_SEQUENCE, _oid(_ECDSA_SHA256))
    told = _der(
        _SEQUENCE,
        _der(0xA0, _integer(2)),  # version 3
        _integer(secrets.randbits(120) + 1),
        algorithm,
        _name(_AUTHORITY),
        _der(_SEQUENCE, *(_der(_TIME, at) for at in _VALID)),
        _name(subject),
        _der(_SEQUENCE, _der(_SEQUENCE, _oid(_EC_PUBLIC_KEY), _oid(_P256)), _bits(_public_key(key))),
        _der(0xA3, _der(_SEQUENCE, *extensions)),
    )
    return _der(_SEQUENCE, told, algorithm, _bits(_sign(authority, told)))


def _sign(key: int, message: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    while True:
        nonce = _random()
        point = _times(nonce, _G)
        r = point[0] % _N if point else 0
        s = pow(nonce, -1, _N) * (digest + r * key) % _N
        if r and s:
            return _der(_SEQUENCE, _integer(r), _integer(s))


def _public_key(key: int) -> bytes:
    point = _times(key, _G)
    assert point is not None  # noqa: S101 - the key is not a multiple of the order
    return b"\x04" + b"".join(number.to_bytes(_BYTES, "big") for number in point)


def _private_key(key: int) -> bytes:
    public = _der(0xA1, _bits(_public_key(key)))
    return _der(_SEQUENCE, _integer(1), _der(_OCTETS, key.to_bytes(_BYTES, "big")), _der(0xA0, _oid(_P256)), public)


def _times(factor: int, point: _Point) -> _Point:
    result: _Point = None
    while factor:
        if factor & 1:
            result = _plus(result, point)
        point = _plus(point, point)
        factor >>= 1
    return result


def _plus(a: _Point, b: _Point) -> _Point:
    if a is None or b is None:
        return a or b
    if a[0] == b[0] and (a[1] + b[1]) % _P == 0:
        return None
    slope = (3 * a[0] ** 2 - 3) * pow(2 * a[1], -1, _P) if a == b else (b[1] - a[1]) * pow(b[0] - a[0], -1, _P)
    x = (slope**2 - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P


# Below: the notation, ASN.1's DER.


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _integer(number: int) -> bytes:
    return _der(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _bits(content: bytes, *, unused: int = 0) -> bytes:
    return _der(_BITS, bytes([unused]), content)


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    return _der(_OBJECT, *map(_base_128, [40 * first + second, *rest]))


def _base_128(number: int) -> bytes:
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.append(0x80 | number & 0x7F)
    return bytes(reversed(digits))


def _name(common: str) -> bytes:
    return _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _oid(_COMMON_NAME), _der(_TEXT, common.encode()))))


def _extension(which: str, value: bytes, *, is_critical: bool = False) -> bytes:
    return _der(_SEQUENCE, _oid(which), b"\x01\x01\xff" if is_critical else b"", _der(_OCTETS, value))


def _host(name: str) -> bytes:
    try:
        return _der(0x87, ipaddress.ip_address(name.partition("%")[0]).packed)
    except ValueError:
        return _der(0x82, name.encode())


def _pem(what: str, content: bytes) -> bytes:
    lines = base64.encodebytes(content)  # 76 to a line
    return b"-----BEGIN %b-----\n%b-----END %b-----\n" % (what.encode(), lines, what.encode())
