"""Processes that claim devices: forked on demand by one small process, and driven from outside with lines of Python.

Run as a script, it is the process that forks: it gets the two ends of a claimant's pipes over its standard input. Code
in its first argument is executed once, before the first claimant is forked.
"""

import asyncio
import contextlib
import io
import json
import os
import random  # noqa: F401 - the ledger does so when it has to try again: too late for a user who may not read root's Python
import select
import signal
import socket
import subprocess
import sys
import threading
import time

from anyaccel.ledger import Ledger, Want, acquisition, tickets
from anyaccel.model import NOTHING, Extent

PATIENCE = 60.0
"""Seconds after which something that should happen soon, on a machine that does much else, has not happened."""
SILENCE = 300.0
"""Seconds after which who waits and does not look is passed here: on a busy machine, 2 may be without a processor."""


class ClaimantError(Exception):
    """What a claimant raised; ``kind`` is the name of the class."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Claimant:
    """The driving end of one process."""

    def __init__(self, nest):
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(nest, [b"x"], [theirs.fileno()])
        self._socket = ours
        self._received = b""
        self.pid = self._read(PATIENCE)
        self._process = io.FileIO(os.pidfd_open(self.pid))  # its number may be another's once it has ended

    def begin(self, code):
        """Let it execute some code, and do not wait for it."""
        self._socket.sendall(json.dumps(code).encode() + b"\n")

    def end(self, timeout=PATIENCE):
        """The value of ``result`` after the code, or what it raised."""
        answer = self._read(timeout)
        if "error" in answer:
            raise ClaimantError(*answer["error"])
        return answer["result"]

    def do(self, code, timeout=PATIENCE):
        """Execute code, or evaluate an expression."""
        self.begin(code)
        return self.end(timeout)

    def busy(self, seconds=0.0):
        """Whether it has not finished some seconds from now."""
        return b"\n" not in self._received and not select.select([self._socket], [], [], seconds)[0]

    def signal(self, number):
        """Send it a signal."""
        signal.pidfd_send_signal(self._process.fileno(), number)

    def kill(self):
        """Kill it, and wait until it has left the kernel."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        select.select([self._process], [], [], PATIENCE)

    def stop(self):
        """Stop it, and wait until it has."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: state(self.pid) == "T")

    def _read(self, timeout):
        while b"\n" not in self._received:
            if self.busy(timeout):
                raise TimeoutError(f"claimant {self.pid} has not finished after {timeout} s")
            part = self._socket.recv(1 << 16)
            if not part:
                raise EOFError(f"claimant {self.pid} has died")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self):
        if not self._process.closed:
            self.kill()
        self._process.close()
        self._socket.close()


def state(pid):
    """Letter of a process's state; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def eventually(condition, seconds=PATIENCE):
    """Wait until something holds; how long that takes is no matter here."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.002)
    return value


def serve(connection):
    """Be a claimant."""
    tickets._PATIENCE, acquisition._LOCK_SECONDS_AT_LAST = SILENCE, PATIENCE
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    space = {"Ledger": Ledger, "Want": Want, "os": os, "time": time, "signal": signal, "asyncio": asyncio}
    space |= {"Extent": Extent, "NOTHING": NOTHING}
    space |= {"threading": threading, "subprocess": subprocess, "sys": sys, "json": json, "leases": []}
    exec(PRELUDE, space)
    connection.sendall(f"{os.getpid()}\n".encode())
    for line in connection.makefile():
        code = json.loads(line)
        space.pop("result", None)
        try:
            try:
                value = eval(compile(code, "<claim>", "eval"), space)
            except SyntaxError:
                exec(compile(code, "<claim>", "exec"), space)
                value = space.get("result")
            answer = {"result": value}
            text = json.dumps(answer)
        except BaseException as error:  # noqa: BLE001 - it is the driver's to judge
            text = json.dumps({"error": [type(error).__name__, str(error)]})
        connection.sendall(text.encode() + b"\n")


PRELUDE = """
from anyaccel.ledger.lease import DeviceLock

def open_ledger(path):
    global ledger
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": path})

def chooser(devices, units=10_000, count=1):
    wanted = Extent(units)
    def choose(taken):
        free = [device for device in devices if taken.get(device, NOTHING).leaves(wanted)]
        return dict.fromkeys(free[:count], wanted) if len(free) >= count else None
    return choose

def take(*devices, units=10_000, count=1, device_locks=None, **options):
    want = Want(candidates=frozenset(devices), request=" ".join(devices), device_locks=device_locks or {})
    lease = ledger.acquire(want, chooser(devices, units, count), **({"wait": 0} | options))
    leases.append(lease)
    return {device: extent.units for device, extent in lease.devices.items()}

def give():
    leases.pop().release()
"""


def main():
    exec("".join(sys.argv[1:]), {})
    nest = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for claimants: they are watched from outside
    while True:
        message, descriptors, _, _ = socket.recv_fds(nest, 1, 1)
        if not message:  # the tests are over, or were killed: so is all that was started here
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            nest.close()
            serve(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
