"""A page on the loopback that shows runs as they go: ``fedlit report --serve`` and ``fedlit serve --page``."""

from __future__ import annotations

import errno
import logging
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = "8050"
"""Where none is given."""

LOOPBACK = "127.0.0.1"

_REQUESTS = 16
"""At most, that are answered at the same time."""

_log = logging.getLogger("fedlit.page")

_NAMES = ("localhost", LOOPBACK, "[::1]")


class PageServer(ThreadingHTTPServer):
    """Answers each request for ``/`` with a page that is at most a second old, and takes no other request.

    Requests in another host's name, which a page of a stranger can make a browser send, are refused.

    Args:
        make: Makes the HTML.
        port: 0 takes a free one.
        host: Address to listen at; all but the loopback's can be seen by others, without a password.

    Raises:
        OSError: If the port is in use.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, make: Callable[[], str], port: int, host: str = LOOPBACK) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.host = host
        self._make, self._page, self._made_at = make, b"", -math.inf
        self._lock, self._free = threading.Lock(), threading.BoundedSemaphore(_REQUESTS)

    @property
    def is_private(self) -> bool:
        """Whether this machine alone reaches it."""
        return self.host in ("localhost", LOOPBACK, "::1")

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_port}/"

    def page(self) -> bytes:
        """Return the HTML, which visitors share; make it anew if it is older than a second."""
        with self._lock:
            if time.monotonic() - self._made_at > 1.0:
                self._page, self._made_at = self._make().encode(), time.monotonic()
            return self._page

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; turn visitors away where too many are being answered."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `process_request`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over visitors who go away before they have the page."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def start(self) -> None:
        """Serve in a thread, until the process ends."""
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0  # seconds for which a caller may say nothing
    server_version, sys_version = "fedlit", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        name = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if self.server.is_private and name not in _NAMES:
            self.send_error(403, "ask by the name localhost")
        elif self.path.partition("?")[0] != "/":
            self.send_error(404)
        else:
            try:
                page = self.server.page()
            except Exception as error:
                _log.warning("the page cannot be made: %s: %s", type(error).__name__, error)
                self.send_error(500, "the page cannot be made", "see the output of the command")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if with_body:
                self.wfile.write(page)

    def log_message(self, *args: object) -> None:
        """Log nothing: a browser asks every few seconds."""


def open_page(make: Callable[[], str], where: str, option: str) -> PageServer:
    """Return a server of a page at ``[HOST:]PORT``, and print where it is; end the command if it cannot be had."""
    host, _, port = where.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    if not (port.isdecimal() and int(port) < 1 << 16):
        sys.exit(f"fedlit: {option} must be PORT or HOST:PORT with a port from 0 to 65535, got {where!r}")
    try:
        server = PageServer(make, int(port), host)
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror or error})"
        sys.exit(f"fedlit: {option}: port {port} of {host} {why}: give another, or 0 for one that is free")
    print(f"fedlit: runs are shown at {server.url}", flush=True)
    if not server.is_private:
        print("fedlit: everybody who reaches this address can read the page: nothing asks for a password", flush=True)
    return server
