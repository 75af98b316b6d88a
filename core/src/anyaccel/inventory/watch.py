"""Watch the accelerators of a machine for changes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Event, Thread
from time import monotonic

from anyaccel.durations import Duration, read_seconds
from anyaccel.inventory.detect import detect
from anyaccel.model import Device, Inventory, Value, VendorReport, VendorState, replace
from anyaccel.vendors import DEADLINE_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from anyaccel.probe import Machine

EVERY_SECONDS = 10.0
"""Seconds between two detections."""


class Change(Value):
    """A difference between two detections of a machine.

    Attributes:
        inventory: The machine now. It keeps the former devices of a vendor whose detection failed, since failed is not
            absent.
        added: New devices.
        lost: Devices that are gone, in their former state.
        changed: Other devices with a difference, in their present state: broken, repaired, hidden.
        failed: Vendors whose detection failed now, and not before.
    """

    inventory: Inventory
    added: tuple[Device, ...] = ()
    lost: tuple[Device, ...] = ()
    changed: tuple[Device, ...] = ()
    failed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.lost or self.changed or self.failed)

    def __str__(self) -> str:
        told = {
            "added": [device.id for device in self.added],
            "lost": [device.id for device in self.lost],
            "changed": [device.id for device in self.changed],
            "detection failed": self.failed,
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names) or "nothing changed"


def compare(before: Inventory, after: Inventory) -> Change:
    """Compare two inventories of a machine; the result is false without a difference."""
    failed = [report.vendor for report in after.vendors if report.state is VendorState.FAILED]
    kept = [device for device in before.devices if device.vendor in failed and not after.of_vendor(device.vendor)]
    silent = {device.vendor for device in kept}
    reports = [_kept(before.report(each.vendor), each) if each.vendor in silent else each for each in after.vendors]
    known = {device.id: device for device in before.devices}
    devices = (*after.devices, *kept)
    if kept:  # the order of vendors must not change because one has failed
        ranks = {device.vendor: rank for rank, device in enumerate(before.devices)}
        devices = tuple(sorted(devices, key=lambda device: ranks.get(device.vendor, len(before.devices))))
    there = {device.id for device in devices}
    had_failed = {report.vendor for report in before.vendors if report.state is VendorState.FAILED}
    return Change(
        inventory=replace(after, devices=devices, vendors=tuple(reports)),
        added=tuple(device for device in devices if device.id not in known),
        lost=tuple(device for device in before.devices if device.id not in there),
        changed=tuple(device for device in devices if known.get(device.id, device) != device),
        failed=tuple(vendor for vendor in failed if vendor not in had_failed),
    )


def _kept(before: VendorReport | None, now: VendorReport) -> VendorReport:
    """Return the former report of a vendor whose detection failed, with the failure."""
    return now if before is None else replace(before, state=now.state, problem=now.problem, seconds=now.seconds)


class Watch:
    """An iterator over the changes of a machine, synchronous and asynchronous, for one reader at a time.

    A reader that asks for the next change starts a detection at once, and then at intervals until there is a
    difference. Differences since the last change count as a single change. :meth:`close`, or the end of a ``with``
    block, ends the iteration.

    Attributes:
        inventory: The last inventory of the reader; None before the first detection.
    """

    def __init__(self, look: Callable[[], Inventory], since: Inventory | None, every: float) -> None:
        self.inventory = since
        self._look = look
        self._every = every
        self._looked: float | None = None
        self._closed = Event()
        self._stops = {self._closed}

    def close(self) -> None:
        """End the iteration; any thread may call this method."""
        for stop in tuple(self._stops):
            stop.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        change = self._wait(self._closed)
        if change is None:
            raise StopIteration
        self.inventory = change.inventory
        return change

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        stop = Event()
        self._stops.add(stop)
        if self._closed.is_set():
            stop.set()

        future: Future[Change | None] = Future()
        future.set_running_or_notify_cancel()  # so that a cancelled task cannot cancel the thread's future

        def wait() -> None:
            try:
                future.set_result(self._wait(stop))
            except Exception as error:  # noqa: BLE001 -- raised where the change is awaited
                future.set_exception(error)

        # A daemon thread: a hanging vendor must not keep the program from exiting.
        Thread(target=wait, name="anyaccel-watch", daemon=True).start()
        try:
            change = await asyncio.wrap_future(future)
        finally:
            stop.set()  # a task that was cancelled leaves no thread behind
            self._stops.discard(stop)
        if change is None:
            raise StopAsyncIteration
        self.inventory = change.inventory
        return change

    def _wait(self, stop: Event) -> Change | None:
        """Detect until there is a difference; return None when ``stop`` is set."""
        before = self.inventory
        while not stop.wait(0.0 if self._looked is None else max(0.0, self._looked + self._every - monotonic())):
            self._looked = monotonic()
            after = self._look()
            if stop.is_set():  # a reader that was cancelled meanwhile leaves what is known to the next one
                break
            if before is None:
                self.inventory = before = after
                continue
            change = compare(before, after)
            if change:
                return change
            before = change.inventory  # a vendor may be well again, and fail anew
        return None


def watch(
    machine: str | Machine | None = None,
    *,
    since: Inventory | None = None,
    every: Duration = EVERY_SECONDS,
    declare: Mapping[str, int] | None = None,
    timeout: Duration = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> Watch:
    """Watch the accelerators of a machine for changes.

    Args:
        machine: The machine, as for :func:`anyaccel.detect`.
        since: The inventory to compare with; the first detection when None.
        every: Time between two detections.
        declare: Number of devices by resource name; see :func:`anyaccel.detect`.
        timeout: Time that each vendor may take.
        environ: The environment whose variables count; that of this process when None.

    Returns:
        An iterator over :class:`Change`, synchronous and asynchronous. An asynchronous iteration detects in a thread.
        The iteration raises the errors of detection.

    Raises:
        UsageError: When ``every`` or ``timeout`` is not a duration.

    Examples:
        >>> change = next(iter(anyaccel.watch("sim:H100:2", since=anyaccel.detect("sim:H100:1"))))
        >>> len(change.added), len(change.lost)
        (1, 0)
    """
    pause = read_seconds("every", every, positive=True)
    deadline = read_seconds("timeout", timeout)

    def look() -> Inventory:
        return detect(machine, declare=declare, timeout=deadline, environ=environ)

    return Watch(look, since, pause)
