"""Sample the load and the memory of the devices of a lease, for the journal.

A process of its own takes each sample: it asks the vendors' processes as ``anyaccel status`` does, writes the answer
and exits. So no vendor's code stays in memory between two samples, and the holder of the lease never waits. A vendor
that hangs is killed at the end of the sample's time, or of the lease.
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
"""Time from the beginning of a lease to the first sample: a shorter lease costs nothing."""
LIMIT_SECONDS = 40.0
"""Time for one sample, with the start of the processes on a machine under load."""
_MOST_FAILURES = 3
"""Failures in a row after which sampling stops."""
_CHUNK = 1 << 16


class Sampler:
    """Samples devices without blocking: the caller calls :meth:`step` once :attr:`seconds` are over.

    Args:
        inventory: The machine, with the leased devices alone.
        every: Seconds between two samples; the first pauses are shorter.
        tell: Called with each sample, by device id.

    Attributes:
        answer: Descriptor that becomes readable with an answer; -1 if no sample is being taken.
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
        """Seconds until the next call of :meth:`step`, unless :attr:`answer` is readable before; infinite for never."""
        return max(0.0, self._at - time.monotonic())

    def step(self) -> None:
        """Begin a sample, read an arrived part of an answer, or give up a sample after its time; return at once.

        A complete sample goes to ``tell``, whose exceptions pass through. Without an answer, nothing happens before
        :attr:`seconds` are over. Sampling stops for good after three failures in a row, and if the devices report
        neither load nor memory.
        """
        over = not self.seconds
        if self._asking and (self._read() or over):
            self._done()
        elif over:
            try:
                self._ask()
            except OSError:  # no process or descriptor is free
                self._failed()

    def stop(self) -> None:
        """Stop sampling for good; kill and reap the process of a sample in progress. A second call has no effect."""
        self._at = float("inf")
        self._end()

    def _ask(self) -> None:
        """Start a process to take a sample, which has ``LIMIT_SECONDS``.

        Raises:
            OSError: If no process or descriptor is free.
        """
        # Not in this process: a plug-in may hang, and what it loads would stay in memory.
        self._asking, self.answer = start_helper(self._answer)
        os.set_blocking(self.answer, False)
        self._data = b""
        self._at = time.monotonic() + LIMIT_SECONDS

    def _answer(self, write: int) -> int:
        """Ask the vendors, write load and used memory of the observed devices to a descriptor as JSON, and close it.

        Runs in the sampling process.

        Returns:
            The exit status: 1, without an answer, if the vendors report problems alone; else 0, also if no device was
            observed.
        """
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
        """Append the arrived part of the answer; return True at its end and after an error, False if more may come."""
        try:
            while chunk := os.read(self.answer, _CHUNK):
                self._data += chunk
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _done(self) -> None:
        """End the sampling process, pass the sample to ``tell``, and schedule the next.

        An invalid answer is a failure; a valid answer resets the count of failures. Without load and memory of any
        device, ``tell`` is not called, and no further sample is taken.
        """
        self._end()
        found = _decoded(self._data)
        if found is None:
            self._failed()
            return
        self._failures = 0
        if any(each != Stats() for each in found.values()):
            self._tell(found)
            self._next()
        else:  # the vendor reports neither, and will not in an hour
            self._at = float("inf")

    def _failed(self) -> None:
        """Count a failure and schedule the next sample; stop sampling after three failures in a row."""
        self._failures += 1
        self._next()
        if self._failures >= _MOST_FAILURES:
            self._at = float("inf")

    def _next(self) -> None:
        """Schedule the next sample, and double the pause after that, up to ``every``."""
        self._at = time.monotonic() + self._gap
        self._gap = min(2 * self._gap, self._every)  # a short lease gets a sample, a long one few

    def _end(self) -> None:
        """Kill and reap the sampling process, with which its children die, and close the answer; at most once."""
        child, self._asking = self._asking, 0
        if not child:
            return
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(self.answer)
        self.answer = -1


def make_sampler(
    inventory: Inventory, shares: tuple[Share, ...], tell: Callable[[Mapping[str, Stats]], object]
) -> Sampler | None:
    """Make the sampler of leased devices.

    Args:
        inventory: The machine.
        shares: The leased shares; declared devices are left out.
        tell: As for :class:`Sampler`.

    Returns:
        The sampler, which is independent of later changes of the working directory; None if the machine is simulated,
        if no device is left, if the user wants no samples, or if the user's configuration cannot be read.
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
        machine = os.path.abspath(machine)  # the monitor changes its working directory
    return Sampler(replace(inventory, machine=machine, devices=devices), every, tell)


def _decoded(data: bytes) -> dict[str, Stats] | None:
    """Parse an answer, a JSON object; None if it is anything else, or has invalid values."""
    try:
        return {name: decode(Stats, words) for name, words in json.loads(data).items()}
    except (ValueError, AttributeError, TypeError):  # no JSON; no object; no values
        return None
