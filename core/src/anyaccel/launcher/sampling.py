"""Ask vendors, now and then, how the devices of one lease fare while they are held.

Each question is put by a process of its own, which starts the vendor's process as ``anyaccel status`` does, writes down
the answer and ends with it. So nothing of a vendor stays in memory between two questions, and whoever keeps the lease
waits for none: a vendor that hangs is killed when its time is over, or when the lease is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping

from anyaccel import configuration
from anyaccel.errors import ConfigurationError
from anyaccel.launcher.detached import start_helper
from anyaccel.model import Inventory, Share, Stats, replace
from anyaccel.model.wire import decode, encode
from anyaccel.probe import HOST
from anyaccel.probe.machine import SIMULATION

FIRST_SECONDS = 10.0
"""From the beginning of a lease to the first question: what is shorter costs nothing."""
LIMIT_SECONDS = 40.0
"""Time for one question: to start the processes on a machine under load, and for the vendors to answer."""
_MOST_FAILURES = 3
"""After so many in a row nobody is asked any more."""
_CHUNK = 1 << 16


class Sampler:
    """Asks how devices fare. Nothing here waits: :meth:`step` is called once :attr:`seconds` are over.

    Args:
        inventory: The machine with the devices that are held, and no others.
        every: Seconds from one question to the next. The first ones come sooner.
        tell: Called with each answer, by device id.
    """

    def __init__(self, inventory: Inventory, every: float, tell: Callable[[Mapping[str, Stats]], object]) -> None:
        self._inventory = inventory
        self._every = every
        self._tell = tell
        self._gap = min(FIRST_SECONDS, every)
        self._at = time.monotonic() + self._gap
        self._asking = 0
        self._failures = 0
        self._data = b""
        self.answer = -1

    @property
    def seconds(self) -> float:
        """Seconds until :meth:`step` is to be called, unless :attr:`answer` can be read before; infinite for never."""
        return max(0.0, self._at - time.monotonic())

    def step(self) -> None:
        """Put a question, take what has come of an answer, or give up the question whose time is over."""
        over = not self.seconds
        if self._asking and (self._read() or over):
            self._done()
        elif over:
            try:
                self._ask()
            except OSError:  # no process or descriptor is left
                self._failed()

    def stop(self) -> None:
        """Ask nothing more, and end what is being asked."""
        self._at = float("inf")
        self._end()

    def _ask(self) -> None:
        self._asking, self.answer = start_helper(self._answer)
        os.set_blocking(self.answer, False)
        self._data = b""
        self._at = time.monotonic() + LIMIT_SECONDS

    def _answer(self, write: int) -> int:
        """Ask the vendors, and write down what they say of what is counted: the load and the memory in use."""
        from anyaccel.inventory.observe import stats

        observed, problems = stats(self._inventory)
        if problems and not observed:
            return 1
        counted = {
            name: Stats(utilization=seen.utilization, memory_used_bytes=seen.memory_used_bytes)
            for name, seen in observed.items()
        }
        with open(write, "wb") as file:
            file.write(json.dumps(encode(counted)).encode())
        return 0

    def _read(self) -> bool:
        """Take what has come; whether that is all."""
        try:
            while chunk := os.read(self.answer, _CHUNK):
                self._data += chunk
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _done(self) -> None:
        self._end()
        found = _decoded(self._data)
        if found is None:
            self._failed()
            return
        self._failures = 0
        if any(each != Stats() for each in found.values()):
            self._tell(found)
            self._next()
        else:  # it does not tell, and will not in an hour
            self._at = float("inf")

    def _failed(self) -> None:
        self._failures += 1
        self._next()
        if self._failures >= _MOST_FAILURES:
            self._at = float("inf")

    def _next(self) -> None:
        self._at = time.monotonic() + self._gap
        self._gap = min(2 * self._gap, self._every)

    def _end(self) -> None:
        """End the process that asks; what it has started ends with it."""
        child, self._asking = self._asking, 0
        if not child:
            return
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(self.answer)
        self.answer = -1


def sampler(
    inventory: Inventory, shares: tuple[Share, ...], tell: Callable[[Mapping[str, Stats]], object]
) -> Sampler | None:
    """What asks how some devices fare; None where nobody would answer, or the user wants none.

    Args:
        inventory: The machine.
        shares: What is held of it.
        tell: As of :class:`Sampler`.
    """
    devices = tuple({share.device.id: share.device for share in shares if not share.device.declared}.values())
    machine = inventory.machine
    if not devices or machine.startswith(SIMULATION):
        return None
    try:
        every = float(configuration.user().get("journal.sample_every"))
    except ConfigurationError:
        return None
    if not every:
        return None
    if machine != HOST:
        machine = os.path.abspath(machine)  # a monitor leaves the directory
    return Sampler(replace(inventory, machine=machine, devices=devices), every, tell)


def _decoded(data: bytes) -> dict[str, Stats] | None:
    """Read an answer; None where there is none."""
    try:
        return {name: decode(Stats, words) for name, words in json.loads(data).items()}
    except ValueError:
        return None
