"""The API server, as much of it as a driver on a node needs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Iterator
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Folder of a pod's token and certificates."""
TIMEOUT_SECONDS = 10.0
WATCH_SECONDS = 300
_LARGEST_ANSWER = 1 << 26
CONFLICT, NOT_FOUND = 409, 404


class ApiError(AnyaccelError):
    """Raised when the API server refuses a request, or cannot be reached.

    Attributes:
        status: The HTTP status; 0 if there was no answer.
    """

    def __init__(self, message: str, status: int = 0, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ApiServer:
    """A client of the API server. Methods are thread-safe: each request has a connection of its own.

    Args:
        url: Address, such as ``https://10.0.0.1:6443``; that of the cluster in which this pod runs if empty.
        token_file: File with a bearer token, read for each request, since the kubelet replaces tokens; empty for none.
        ca_file: File with the certificates of the cluster; empty for the pod's, if there are any, else the system's.
        client_cert: File with a client certificate and its key, such as the kubelet's; empty for none.

    Raises:
        UsageError: If there is no address.
    """

    def __init__(self, url: str = "", *, token_file: str = "", ca_file: str = "", client_cert: str = "") -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not url and not host:
            raise UsageError("the API server is unknown outside of a pod", hint="add --server URL")
        self._url = urllib.parse.urlsplit(url or f"https://{f'[{host}]' if ':' in host else host}:{port}")
        in_pod = not url and os.path.exists(f"{ACCOUNT}/token")
        self._token_file = token_file or (f"{ACCOUNT}/token" if in_pod else "")
        self._ca_file = ca_file or (f"{ACCOUNT}/ca.crt" if in_pod else "")
        self._client_cert = client_cert

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout)
        # Made anew each time: the kubelet also replaces its client certificate.
        context = ssl.create_default_context(cafile=self._ca_file or None)
        if self._client_cert:
            context.load_cert_chain(self._client_cert)
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: Any, timeout: float) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the answer is open until the end of the block.

        Raises:
            ApiError: If the server refuses the request, or cannot be reached.
        """
        subject = f"{method} {path.partition('?')[0]}"
        try:
            connection = self._connect(timeout)
        except OSError as error:
            raise ApiError(f"{subject}: {error}", hint="check --ca-file and --client-cert") from error
        with contextlib.closing(connection):
            try:
                headers = {"Accept": "application/json", "Content-Type": "application/json"}
                if self._token_file:
                    with open(self._token_file, encoding="ascii") as file:
                        headers["Authorization"] = f"Bearer {file.read().strip()}"
                connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
                answer = connection.getresponse()
                if not 200 <= answer.status < 300:  # noqa: PLR2004
                    raise ApiError(f"{subject}: {_message(answer)}", answer.status)
                yield answer
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ApiError(f"{subject}: the API server does not answer: {error}") from error

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request; return the object in the answer.

        Raises:
            ApiError: If the server refuses the request, or cannot be reached.
        """
        with self._ask(method, path, body, TIMEOUT_SECONDS) as answer:
            found = json.loads(answer.read(_LARGEST_ANSWER))
            if not isinstance(found, dict):
                raise ApiError(f"{method} {path}: the answer is no object")
            return found

    def watch(self, path: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the events of a collection until the server ends the watch.

        Raises:
            ApiError: If the server refuses the watch, or the connection breaks; ``status`` is 410 if events since
                the version are gone.
        """
        text = urllib.parse.urlencode({"watch": "1", "timeoutSeconds": str(WATCH_SECONDS), **query})
        with self._ask("GET", f"{path}?{text}", None, WATCH_SECONDS + TIMEOUT_SECONDS) as answer:
            for line in answer:  # one event a line
                event = json.loads(line)
                if event.get("type") == "ERROR":
                    raise ApiError("the watch has ended", int(event.get("object", {}).get("code", 0)))
                yield event


def _message(answer: http.client.HTTPResponse) -> str:
    """Return the reason of a refusal, cut to 500 characters."""
    try:
        return str(json.loads(answer.read(1 << 16))["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} {answer.reason}"
