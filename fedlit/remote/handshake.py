"""Find out by a TLS handshake why a site and what listens at the server's address do not come together.

gRPC reports only the address that it tried last, in messages that differ from release to release. Where a host has
several addresses, that is often not the one at which a server answered.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

_SECONDS = 5.0
"""Timeout of the connection, of the handshake and of the server's first byte, each."""


class EndedError(Exception):
    """What listens ended the connection and sent no reason."""


def objection(server: str, certificate: Path, key: Path, ca: Path) -> str | None:
    """Return why one of both ends does not trust the other, or None if both do, or nobody listens at ``HOST:PORT``.

    Files are in PEM. An `EndedError` if what listens ends the connection without a reason: it may be starting, may
    speak no TLS, or may not trust the certificate and not report that.
    """
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as strict as gRPC, and no more
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _SECONDS) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=host) as secure:  # which keeps the timeout
                    if not secure.recv(1):  # a server that trusts this end sends first, in HTTP/2
                        raise EndedError
            except ssl.SSLCertVerificationError as error:
                return f"the server's certificate is not trusted here: {error.verify_message}"
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # cut off, or closed with a goodbye
                raise EndedError from error
            except ssl.SSLError as error:
                reason = (error.reason or str(error)).replace("_", " ").lower()
                if "alert" in reason:
                    return f"the server does not trust this site's certificate: {reason}"
                return f"what listens there speaks no TLS: {reason}"
            except ConnectionError as error:
                raise EndedError from error
    except (OSError, ValueError):
        return None
    return None
