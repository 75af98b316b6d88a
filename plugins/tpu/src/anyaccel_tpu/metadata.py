"""Ask Google's metadata server about the TPU of this virtual machine: once, and never longer than a second in all.

Elsewhere the server's address is a black hole. Others wait for it without a limit, or for minutes (pytorch/xla#9449,
jax-ml/jax#40854), so everything here has one deadline that includes name look-up, connecting and slow answers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from anyaccel.plugin import ProbeContext

if TYPE_CHECKING:
    import http.client

ADDRESS = "169.254.169.254"
"""What ``metadata.google.internal`` resolves to; asked by number, so that no name server is needed."""

SECONDS = 1.0
QUESTION = "metadata/instance"
KEYS = (
    "attributes/accelerator-type",
    "attributes/instance-id",
    "attributes/agent-worker-number",
    "attributes/tpu-env",
    "maintenance-event",
)
_PATH = "/computeMetadata/v1/instance/"
_LIMIT = 1 << 16
_OK, _NOT_FOUND = 200, 404
_TPU_ENV_KEYS = re.compile(
    r"\s*(ACCELERATOR_TYPE|TPU_ACCELERATOR_TYPE|TOPOLOGY|TPU_TOPOLOGY|WORKER_ID|TPU_WORKER_ID"
    r"|(TPU_)?CHIPS_PER_HOST_BOUNDS|(TPU_)?HOST_BOUNDS)\s*:"
)


def ask(ctx: ProbeContext) -> dict[str, str]:
    """Query every key of the metadata server; unknown keys are left out.

    Raises:
        QueryError: The server did not answer in time or is not Google's.
    """
    # The variables of Google's own clients, which emulators set.
    host = ctx.environ.get("GCE_METADATA_HOST") or ctx.environ.get("GCE_METADATA_IP") or ADDRESS
    seconds = min(SECONDS, ctx.remaining())
    answers: dict[str, str] = ctx.query(QUESTION, lambda: fetch(host, seconds))
    return answers


def fetch(host: str, seconds: float) -> dict[str, str]:
    """Fetch the keys over a single connection.

    Of ``tpu-env``, only lines read by this plug-in are kept: the rest names projects and users, and answers end up in
    recordings.

    Args:
        host: ``address`` or ``address:port``.
        seconds: Time limit for the whole.

    Raises:
        TimeoutError: The time limit is reached.
        OSError, http.client.HTTPException: The server cannot be reached or speaks no HTTP.
        RuntimeError: The answer is not a metadata server's.
    """
    import contextlib
    import http.client
    import socket
    import threading

    connection = http.client.HTTPConnection(host, timeout=seconds)
    outcome: list[dict[str, str] | Exception] = []

    def work() -> None:
        try:
            outcome.append({key: text for key in KEYS if (text := _get(connection, host, key)) is not None})
        except Exception as error:  # noqa: BLE001 - handed to the caller below
            outcome.append(error)
        finally:
            connection.close()

    # A socket's timeout starts anew with every byte and does not cover name look-up, so a thread is abandoned instead.
    thread = threading.Thread(target=work, name="tpu-metadata", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome or isinstance(outcome[0], TimeoutError):
        sock = connection.sock  # shutting it down wakes the thread that still waits, so that it ends
        with contextlib.suppress(AttributeError, OSError):
            sock.shutdown(socket.SHUT_RDWR)
        raise TimeoutError(f"the metadata server {host} did not answer within {seconds:.1f} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _get(connection: http.client.HTTPConnection, host: str, key: str) -> str | None:
    connection.request("GET", _PATH + key, headers={"Metadata-Flavor": "Google"})
    response = connection.getresponse()
    text = response.read(_LIMIT).decode(errors="replace")
    # Other clouds answer at the same address.
    if response.headers.get("Metadata-Flavor") != "Google":
        raise RuntimeError(f"{host} is no metadata server of Google's: its answer lacks 'Metadata-Flavor: Google'")
    if response.status == _NOT_FOUND:
        return None
    if response.status != _OK:
        raise RuntimeError(f"the metadata server {host} answered {response.status} {response.reason} to {key}")
    if key.endswith("tpu-env"):
        return "".join(line for line in text.splitlines(keepends=True) if _TPU_ENV_KEYS.match(line))
    return text.strip()
