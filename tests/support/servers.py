"""Servers for tests that say nothing of a client that has gone: by then, another test may look at standard error."""

import socketserver
import sys
from http.server import ThreadingHTTPServer
from typing import Any


class Quiet(socketserver.BaseServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of a handler, unless it is the end of a connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class QuietHTTPServer(Quiet, ThreadingHTTPServer):
    """A server over HTTP with a thread for each client; none is waited for."""

    daemon_threads = True
    block_on_close = False
