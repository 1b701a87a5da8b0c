"""Certificates: makes those of a trial, and checks the files of a seat before anything uses them."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlit.checks import check, check_between, refuse
from fedlit.federation.names import check_list, folded

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}")
_BEFORE = dt.timedelta(hours=1)
"""Certificates are valid from then on, as clocks differ."""


def make_certificates(out: Path, server: str, sites: Sequence[str], days: int = 365) -> list[Path]:
    """A certificate authority, the server's certificate and one for each site, with their keys, for a trial.

    Args:
        out: Folder for ``ca.crt``, ``ca.key``, ``server.crt``, ``server.key``, and ``NAME.crt``, ``NAME.key``.
        server: Host by which sites call the server; certificates name ``localhost`` besides.
        sites: Names of the sites, which their certificates prove.
        days: For which they are valid.

    Returns:
        The files, none of which was there before.

    Raises:
        ValueError: If a name cannot be one or comes twice, ``days`` are not 1 to 3650, or a file exists already.
    """
    check_list("sites", sites)
    names = list(sites)
    wrong = [name for name in names if not _NAME.fullmatch(name) or folded(name) in ("ca", "server")]
    check(
        bool(names) and not wrong,
        "sites",
        "names of 1 to 63 letters, digits, spaces, dots, dashes and underscores, and neither 'ca' nor 'server'",
        wrong or names,
    )
    unlike = len({folded(name) for name in names}) == len(names)
    check(unlike, "sites", "different names, whatever their capitals and blanks", names)
    is_host = re.fullmatch(r"[A-Za-z0-9._-]{1,253}", server) or isinstance(_alternative(server), x509.IPAddress)
    check(bool(is_host), "server", "the name or address of a host, without a port", server)
    check_between("days", days, 1, 3650)
    files = [out / f"{name}.{suffix}" for name in ("ca", "server", *names) for suffix in ("crt", "key")]
    existing = [str(file) for file in files if file.exists()]
    check(not existing, "out", "a folder without these files, which nobody could bring back", existing)
    out.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _named("fedlit trial CA")
    ca = _certificate(issuer, issuer, authority, authority, days, None, ())
    _write(out, "ca", ca, authority)
    for name in ("server", *names):
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if name == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        hosts = [server, "localhost", "127.0.0.1"] if name == "server" else []
        _write(out, name, _certificate(_named(name), issuer, key, authority, days, usage, hosts), key)
    return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    usage: x509.ObjectIdentifier | None,
    hosts: Sequence[str],
) -> x509.Certificate:
    """A certificate; without a ``usage``, of an authority."""
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=usage is None, path_length=0 if usage is None else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=usage is None,
                crl_sign=usage is None,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if hosts:
        names = [_alternative(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(out: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    (out / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with open(os.open(out / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)


def check_files(certificate: Path, key: Path, ca: Path) -> None:
    """Check that the files of a seat fit together, and are valid by this machine's clock.

    Raises:
        ValueError: If they do not; one line states which, and why.
    """
    chain, authorities = read_certificates("certificate", certificate), read_certificates("ca", ca)
    own, secret = chain[0], read_key(key)
    check(secret.public_key() == own.public_key(), "key", f"that of the certificate '{certificate}'", str(key))
    common_name(own)
    now, begins, ends = dt.datetime.now(dt.UTC), own.not_valid_before_utc, own.not_valid_after_utc
    shown = f"'{certificate}', from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
    rule = f"valid now, {now:%Y-%m-%d %H:%M} UTC by this machine's clock"
    check(
        begins <= now <= ends, "certificate", rule, str(certificate), "have it renewed, or set the clock", shown=shown
    )
    # of several in one file, the others lie between it and the authority: the peer sees whether they lead there
    signed = len(chain) > 1 or any(signed_by(own, authority) for authority in authorities)
    rule = f"signed by the ca, '{ca}' of {authorities[0].subject.rfc4514_string()!r}"
    shown = f"'{certificate}' signed by {own.issuer.rfc4514_string()!r}"
    way_out = "all seats need certificates of one authority"
    check(signed, "certificate", rule, str(certificate), way_out, shown=shown)


def common_name(certificate: x509.Certificate) -> str:
    """Return the one name that a certificate is for; a `ValueError` if it has none, several, or control characters."""
    names = [str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    valid = len(names) == 1 and names[0].isprintable()
    check(valid, "certificate", "of one common name, without control characters", names)
    return names[0]


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether an authority has issued a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def read_certificates(argument: str, file: Path) -> list[x509.Certificate]:
    """Return the certificates in a file in PEM; a `ValueError` that names the argument if there are none."""
    content = _content(argument, file)
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        refuse(argument, "a certificate in PEM, which begins with -----BEGIN", str(file))


def read_key(file: Path) -> PrivateKeyTypes:
    """Return the private key in a file in PEM; a `ValueError` if there is none."""
    content = _content("key", file)
    try:
        return serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError):
        refuse("key", "a private key in PEM, without a password", str(file))


def _content(argument: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        refuse(argument, "a file that can be read", str(file), str(error.strerror))
