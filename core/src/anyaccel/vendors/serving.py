"""The answering side of guarded calls: what runs in a vendor's process. The calling side is another module."""

from __future__ import annotations

import _socket
import contextlib
import faulthandler
import json
import os
import struct
import sys

from anyaccel.linux.descriptors import list_descriptors
from anyaccel.linux.process import set_name
from anyaccel.vendors import IDLE_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def serve(descriptors: list[int], _: object) -> None:
    """Answer calls until the caller has gone, or makes no call for a minute; the target of the fork server.

    Args:
        descriptors: The socket of the calls, and the pipe for printed text.
    """
    calls, output = descriptors
    os.set_blocking(output, True)
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(descriptor, stream)
    # A device's words need not be text; printing them never fails, as on standard error.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    # Descriptors of other processes of the fork server are no business of a vendor's code.
    os.closerange(3, calls)
    os.closerange(calls + 1, max(list_descriptors()) + 1)
    set_name("accel-vendor")
    faulthandler.enable(2)  # the caller sends SIGABRT to a process that hangs, for the traceback
    _answer_calls(_socket.socket(fileno=calls))


def _answer_calls(calls: _socket.socket) -> None:
    # A timeout of the kernel: Python's own would make the socket non-blocking, and sendall() with it.
    calls.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, struct.pack("ll", int(IDLE_SECONDS), 0))
    lines = open(calls.fileno(), "rb", closefd=False)  # noqa: SIM115 - open until the process ends
    while (line := lines.readline()).endswith(b"\n"):  # else the caller has gone, or sends nothing for a minute
        call = json.loads(line)
        me = os.getpid()
        if call["fresh"]:  # the start of the process took a while; the time limit of the call begins now
            calls.sendall(b"%d\n" % me)
        answer = _answer(call)
        if os.getpid() != me:  # the import of a plug-in forked and returned twice
            os._exit(0)
        with contextlib.suppress(Exception):  # a plug-in may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        calls.sendall(answer + b"\n")


def _answer(call: dict[str, Any]) -> bytes:
    try:
        module, _, name = call["function"].partition(":")
        __import__(module)  # a method of importlib would have to be imported first
        value = getattr(sys.modules[module], name)(call["payload"])
        return json.dumps({"value": value}).encode()
    except BaseException as error:  # noqa: BLE001 - SystemExit of a vendor's tool is no reason to vanish
        import traceback

        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fault = {"kind": "raised", "reason": reason, "details": traceback.format_exc()}
        return json.dumps({"fault": fault}).encode()
