"""The default carrier: gRPC with mutual TLS, over one port, to which sites dial out.

Both ends prove who they are by certificates of one authority; a site's name is the common name of its certificate.
Each site has one connection, with a stream that carries nothing and stays open: when it ends, the site is disconnected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from cryptography import x509

from fedlit.federation.errors import FederationError
from fedlit.remote.carrier import PIECE_BYTES, BrokenError, Caller, Listener, Pieces, RefusedError
from fedlit.remote.certificates import common_name
from fedlit.remote.handshake import EndedError, objection

_log = logging.getLogger("fedlit.remote")

_SERVICE, _CALL, _PRESENCE = "fedlit", "call", "presence"
_ALIVE_MS = 5000
"""Milliseconds after which an idle peer is pinged, and again those that it has to answer."""

_OPTIONS = [
    ("grpc.keepalive_time_ms", _ALIVE_MS),
    ("grpc.keepalive_timeout_ms", _ALIVE_MS),
    ("grpc.http2.ping_timeout_ms", _ALIVE_MS),  # without it a frozen peer is noticed after a minute
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", PIECE_BYTES + (64 << 10)),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", _ALIVE_MS),  # for one attempt: TCP and TLS take three ways there and back
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_CONNECTS = 0.5
"""Seconds to wait for a connection: before version 1.80, gRPC goes on making one only while somebody waits for it."""

_UNTRUSTED = 5.0
"""Seconds for which a connection that ends as soon as it stands is tried again: so does a server without TLS."""

_MAX_CALLS = 6
"""Of one site at once: a presence, a call, and some that broke off unnoticed."""

_MAX_REASON = 6000
"""Bytes of a refusal on the wire, which gRPC bounds by 8 KiB with all else that ends a call."""


def _library() -> Any:
    """gRPC, which is an extra."""
    try:
        import grpc
    except ImportError as error:
        raise ImportError(f"a seat across organisations needs gRPC: pip install 'fedlit[remote]' ({error})") from error
    return grpc


@final
class GrpcListener(Listener):
    """Takes calls of sites at ``HOST:PORT``, where port 0 is any; files are in PEM.

    Why a handshake failed is written by gRPC to standard error (``Handshake failed with error``), and without a name:
    none is known yet.
    """

    def __init__(self, address: str, certificate: Path, key: Path, ca: Path, *, names: Collection[str]) -> None:
        self._address = address
        self._names = frozenset(names)
        self._grpc = grpc = _library()
        self._credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())], ca.read_bytes(), require_client_auth=True
        )
        self._server: Any = None
        self._strangers: dict[str, float] = {}
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def listen(
        self, answer: Callable[[str, Pieces], Pieces], came: Callable[[str], None], gone: Callable[[str], None]
    ) -> str:
        """See `Listener`."""
        grpc = self._grpc
        pool = ThreadPoolExecutor(8 + _MAX_CALLS * len(self._names), thread_name_prefix="fedlit-sites")
        self._server = grpc.server(pool, options=_OPTIONS)

        def call(request: Iterator[bytes], context: Any) -> Iterator[bytes]:
            name = self._named(context)
            try:
                with self._counted(name):
                    yield from answer(name, _unbroken(request))
            except RefusedError as error:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, _fitting(str(error)))
            except BrokenError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, _fitting(str(error)))
            except Exception as error:
                _log.exception("a call of site %s failed", name)
                # its text may contain what is not for a site
                context.abort(grpc.StatusCode.INTERNAL, f"the server failed ({type(error).__name__}): see its log")

        def presence(request: bytes, context: Any) -> Iterator[bytes]:
            name = self._named(context)
            ended = threading.Event()
            try:
                with self._counted(name):
                    if not context.add_callback(ended.set):
                        return
                    came(name)
                    try:
                        yield b""
                        ended.wait()
                    finally:
                        gone(name)
            except BrokenError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        handlers = {
            _CALL: grpc.stream_stream_rpc_method_handler(call),
            _PRESENCE: grpc.unary_stream_rpc_method_handler(presence),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise FederationError(
                f"nothing can listen at {self._address!r}, as where another program does: give another address or port"
            )
        self._server.start()
        return f"{self._address.rpartition(':')[0]}:{port}"

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """Count a call of a site; they are bounded so that no site takes the threads that others need."""
        with self._lock:
            if self._calls[name] >= _MAX_CALLS:
                raise BrokenError(f"site {name!r} has {_MAX_CALLS} calls under way, and no more are taken")
            self._calls[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[name] -= 1

    def _named(self, context: Any) -> str:
        """The name in the caller's certificate; ends a call of any other than the sites."""
        about = context.auth_context()
        names: list[str] = [name.decode(errors="replace") for name in about.get("x509_common_name", ())]
        with suppress(ValueError, IndexError):  # several names, or one with a NUL, at which others stop reading
            name = common_name(x509.load_pem_x509_certificate(about["x509_pem_cert"][0]))
            if name in self._names:
                return name
        self._log_stranger(context.peer(), names)
        reason = (
            f"the server knows no site {', '.join(map(repr, names))}, as the certificate's common name has it, but "
            f"{sorted(self._names)}"
        )
        context.abort(self._grpc.StatusCode.PERMISSION_DENIED, _fitting(reason))
        raise AssertionError("abort raises")

    def _log_stranger(self, peer: str, names: list[str]) -> None:
        """Log a refused certificate, at most once a second for each."""
        now, key = time.monotonic(), ", ".join(names)
        with self._lock:
            self._strangers = {each: at for each, at in self._strangers.items() if now - at < 1.0}
            if key in self._strangers:
                return
            self._strangers[key] = now
        _log.warning("refused %s with a certificate of %s, which is no site here", peer, names)

    def close(self) -> None:
        """See `Listener`."""
        if self._server is not None:
            self._server.stop(0.5).wait()
            self._server = None


def _fitting(reason: str) -> str:
    """As much of a text as fits into a refusal, where gRPC escapes each byte of a letter beyond ASCII by three."""
    size = 0
    for index, letter in enumerate(reason):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode(errors="replace"))
        if size > _MAX_REASON:
            return f"{reason[:index]}..."
    return reason


def _unbroken(request: Iterator[bytes]) -> Pieces:
    try:
        yield from request
    except Exception as error:  # gRPC has no type for a request that was cut off
        raise BrokenError("the request was cut off") from error


@final
class GrpcCaller(Caller):
    """Calls a server at ``HOST:PORT``, whose certificate has to name this host; files are in PEM."""

    def __init__(self, server: str, certificate: Path, key: Path, ca: Path) -> None:
        self._server, self._files = server, (certificate, key, ca)
        self._grpc = grpc = _library()
        self._credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), certificate.read_bytes())
        self._channel: Any = None
        self._presence: Any = None
        self._connected_once = False
        self._shut: tuple[float, float] | None = None  # when connections that stood were first and last ended
        self._lock = threading.Lock()

    def call(self, request: Pieces) -> Pieces:
        """See `Caller`."""
        try:
            with self._lock:
                channel = self._connected()
            yield from channel.stream_stream(f"/{_SERVICE}/{_CALL}")(request)
        except self._grpc.RpcError as error:
            raise self._converted(error) from None

    def _connected(self) -> Any:
        """The channel, once the server has seen its connection."""
        if self._channel is None:
            # a target with "dns:" is looked up anew for each attempt
            self._channel = self._grpc.secure_channel(f"dns:///{self._server}", self._credentials, options=_OPTIONS)
        if self._presence is None or not self._presence.is_active():
            ready = self._grpc.channel_ready_future(self._channel)
            try:
                ready.result(timeout=_CONNECTS)
            except self._grpc.FutureTimeoutError:  # the call below raises why there is no connection
                ready.cancel()
            presence = self._channel.unary_stream(f"/{_SERVICE}/{_PRESENCE}")(b"")
            next(presence)
            self._presence, self._connected_once, self._shut = presence, True, None
        return self._channel

    def _converted(self, error: Any) -> Exception:
        """Return the carrier's error for an error of gRPC."""
        code, details, codes = error.code(), error.details() or "", self._grpc.StatusCode
        if code in (codes.PERMISSION_DENIED, codes.UNAUTHENTICATED):
            return RefusedError(details)
        if code in (codes.UNIMPLEMENTED, codes.RESOURCE_EXHAUSTED):
            return RefusedError(
                f"what answers at {self._server} is not this server, or another version of it: {details}"
            )
        details = " ".join(details.split())[:300]
        if not self._connected_once:
            self._check_trust(details)
        return BrokenError(details or str(code))

    def _check_trust(self, details: str) -> None:
        """Raise a `RefusedError` if a first connection fails because one end does not trust the other."""
        try:
            reason = objection(self._server, *self._files)
        except EndedError:
            now = time.monotonic()
            since, last = self._shut or (now, now)
            self._shut = (since if now - last < _UNTRUSTED else now, now)  # a server that restarts shuts it once
            if now - self._shut[0] < _UNTRUSTED:
                return
            raise RefusedError(
                f"what listens at {self._server} ends each connection at once: it is no fedlit server, or does not "
                "trust this site's certificate, which has to be of the server's authority and not to have expired "
                f"[{details}]"
            ) from None
        if reason is not None:
            raise RefusedError(
                f"{self._server} and this site do not trust each other: {reason}. See that both certificates are of "
                "one authority (ca), that the server's names this host, that neither has expired and both clocks are "
                "right"
            )

    def close(self) -> None:
        """See `Caller`."""
        if self._channel is not None:
            if self._presence is not None:
                self._presence.cancel()
            self._channel.close()
            self._channel = self._presence = None
