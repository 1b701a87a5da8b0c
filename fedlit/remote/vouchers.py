"""Certificates of sites as vouchers for the identity keys of their clients."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa

from fedlit.checks import check
from fedlit.federation.identities import Voucher
from fedlit.privacy import KeyCheckError
from fedlit.remote.certificates import common_name, read_certificates, read_key, signed_by

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), hashes.SHA256.digest_size)


@final
class CertificateVoucher(Voucher):
    """Signs by the key of a site's certificate, and checks other sites' by their authority or fingerprint.

    Args:
        certificate: File of this site's certificate, in PEM.
        key: File of the key to it.
        ca: File of the authority's certificate.
        peers: Who speaks for other sites' clients, by client: the name in their certificate, or its fingerprint,
            ``sha256:`` and 64 hexadecimal digits, for which no authority is needed. Any other client is spoken for by
            a certificate of its own name.

    Raises:
        ValueError: If a value of ``peers`` begins like a fingerprint and is none.
    """

    def __init__(self, certificate: Path, key: Path, ca: Path, peers: Mapping[str, str]) -> None:
        check_peers(peers)
        self._chain, self._key = certificate.read_bytes(), read_key(key)
        self._authorities, self._peers = read_certificates("ca", ca), dict(peers)

    def sign(self, message: bytes) -> dict[str, bytes]:
        """See `Voucher`."""
        key = self._key
        if isinstance(key, ec.EllipticCurvePrivateKey):
            signature = key.sign(message, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPrivateKey):
            signature = key.sign(message, _PSS, hashes.SHA256())
        elif isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey):
            signature = key.sign(message)
        else:
            raise KeyCheckError(f"a certificate's key must be of RSA, EC or Ed25519, got {type(key).__name__}")
        return {"chain": self._chain, "signature": signature}

    def check(self, client: str, message: bytes, proof: Mapping[str, object]) -> None:
        """See `Voucher`."""
        pem, signature = proof.get("chain"), proof.get("signature")
        if not isinstance(pem, bytes) or not isinstance(signature, bytes):
            raise KeyCheckError(f"nobody vouches for the identity key of client {client!r}: its site sends no proof")
        try:
            chain = x509.load_pem_x509_certificates(pem)
            expected = self._peers.get(client, client)
            if _FINGERPRINT.fullmatch(expected):
                found = fingerprint_of(chain[0])
            else:
                self._check_chain(chain)
                found = common_name(chain[0])
        except (ValueError, x509.DuplicateExtension, UnsupportedAlgorithm) as error:
            raise KeyCheckError(f"the certificate that vouches for client {client!r} is not valid: {error}") from error
        if found != expected:
            raise KeyCheckError(
                f"the identity key of client {client!r} is vouched for by the certificate {found!r}, expected "
                f"{expected!r}: if that is its site, add it to peers of this seat, as {{{client}: {found}}}"
            )
        try:
            _verify(chain[0], signature, message)
        except (InvalidSignature, ValueError, TypeError) as error:
            raise KeyCheckError(f"the identity key of client {client!r} is not signed by its certificate") from error

    def _check_chain(self, chain: Sequence[x509.Certificate]) -> None:
        """Raise a `ValueError` unless each is valid now and issued by the next, and the last one by the authority."""
        now = dt.datetime.now(dt.UTC)
        for certificate, issuer in zip(chain, [*chain[1:], None], strict=True):
            begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            check(begins <= now <= ends, "certificate", "valid now", f"from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}")
            issuers = self._authorities if issuer is None or certificate in self._authorities else [issuer]
            known = any(signed_by(certificate, each) and _is_authority(each) for each in issuers)
            check(
                known, "certificate", "signed by the authority of this seat (ca)", certificate.subject.rfc4514_string()
            )


def check_peers(peers: Mapping[str, str]) -> None:
    """Raise a `ValueError` if a value begins like a fingerprint and is none."""
    for client, value in peers.items():
        valid = not value.startswith("sha256:") or _FINGERPRINT.fullmatch(value)
        check(bool(valid), f"peers[{client!r}]", "a certificate's name, or sha256: and 64 hexadecimal digits", value)


def fingerprint_of(certificate: x509.Certificate) -> str:
    """Return the fingerprint of a certificate, ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _verify(certificate: x509.Certificate, signature: bytes, message: bytes) -> None:
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, message, _PSS, hashes.SHA256())
    elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        key.verify(signature, message)
    else:
        raise TypeError(f"no signatures by a {type(key).__name__}")
