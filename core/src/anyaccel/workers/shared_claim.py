"""One claim of this process to devices that every process on the machine shares, and what comes of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anyaccel.errors import AnyaccelError, DevicesBusyError, LeaseCancelledError, LedgerError
from anyaccel.launcher.hold import why
from anyaccel.ledger import Lease
from anyaccel.ledger import mark as marks
from anyaccel.model import Allocation, Extent, Grant, Request
from anyaccel.scheduler import Verdict
from anyaccel.workers.leases import OnFailed, OnHeld

if TYPE_CHECKING:
    from anyaccel.workers.shared_leases import SharedLeases


class SharedHeld:
    """Devices that the ledger says are ours."""

    __slots__ = ("_lease", "_leases", "allocation")

    def __init__(self, leases: SharedLeases, allocation: Allocation, lease: Lease | None) -> None:
        self.allocation = allocation
        self._leases = leases
        self._lease = lease
        if lease is not None:
            leases.took(lease.devices)

    @property
    def lease(self) -> str:
        """Identity of the lease, as others see it; empty when nothing is held."""
        return self._lease.id if self._lease else ""

    @property
    def mark(self) -> marks.Mark:
        """Mark that the lease names; empty when there is none."""
        return self._lease.mark if self._lease else ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that carry the lease."""
        return self._lease.fds if self._lease else ()

    def set_aside(self, reason: str) -> None:
        """Say to others why they are kept although nobody uses them."""
        if self._lease:
            self._lease.set_aside(reason)

    def release(self) -> None:
        """Give them back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
            self._leases.gave(lease.devices)


class SharedClaim:
    """A request on its way through this process's line, and then through the machine's."""

    def __init__(
        self,
        leases: SharedLeases,
        request: Request,
        note: str,
        on_held: OnHeld,
        on_failed: OnFailed,
        *,
        confined: bool,
        line: object,
    ) -> None:
        self.request = request
        self.note = note
        self.on_held = on_held
        self.on_failed = on_failed
        self.line = line
        self.number = next(leases.numbers)
        self.waits = False
        self._leases = leases
        self._choice = leases.choice(request)
        self._grants: tuple[Grant, ...] = ()
        self._cancel: int | None = None
        self._started = False
        self._guard = threading.Lock()
        candidates = self._choice.candidates
        wanted = frozenset(device.id for device in candidates)
        self.ids = leases.scope.with_parts(wanted)
        self._want = leases.scope.want(
            wanted,
            witnesses=leases.scope.witnesses(leases.inventory, candidates),
            request=str(request),
            confined=confined,
            mark=marks.draw,
        )

    def fits(self, taken: Mapping[str, Extent]) -> bool:
        """Whether it would be served if nothing but this were taken, by key of the ledger."""
        return self._choice.choose(self._leases.scope.taken(taken)) is not None

    def take(self, *, wait: bool) -> SharedHeld | None:
        """Get the devices; None when they are not free now and we shall not wait, or the claim was withdrawn."""
        try:
            lease = self._leases.ledger.acquire(
                self._want, self._choose, wait=None if wait else 0, note=self.note, cancel=self._cancel
            )
        except LeaseCancelledError:
            return None
        except DevicesBusyError:
            if wait:
                raise
            return None
        allocation = Allocation(id=lease.id, request=self.request, grants=self._grants)
        return SharedHeld(self._leases, allocation, lease)

    def withdraw(self) -> bool:
        """Stop waiting; False when it has been granted already."""
        if not self._leases.left(self):
            return False
        with self._guard:
            if self._cancel is not None:
                os.eventfd_write(self._cancel, 1)
        self._leases.go_on()
        return True

    def first(self) -> bool:
        """Whether nobody of another line who competes for the same devices comes before."""
        return self._leases.first(self)

    def alone(self) -> bool:
        """Whether nobody of another line waits for one of the same devices."""
        return self._leases.alone(self)

    def why(self) -> Verdict:
        """What it waits for."""
        return why(self.request, inventory=self._leases.inventory)

    def wait(self) -> None:
        """Stand in the machine's line until it is served or withdrawn; in a thread of its own."""
        outcome: SharedHeld | AnyaccelError | None
        try:
            outcome = self.take(wait=True)
        except AnyaccelError as error:
            outcome = error
        self._close(outcome)

    def _close(self, outcome: SharedHeld | AnyaccelError | None) -> None:
        """Leave both lines, and hand over what came of it."""
        wanted = self._leases.left(self)
        with self._guard:
            cancel, self._cancel = self._cancel, None
        if cancel is not None:
            os.close(cancel)
        self._leases.go_on()
        if isinstance(outcome, AnyaccelError):
            if wanted:
                self.on_failed(outcome)
        elif outcome is not None and wanted:
            self.on_held(outcome)
        elif outcome is not None:
            outcome.release()

    def start(self) -> None:
        """Begin to wait, unless that was done already or nobody wants it any more."""
        with self._guard:
            if self._started or not self._leases.waits(self):
                return
            self._started = True
        try:
            with self._guard:
                self._cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            threading.Thread(target=self.wait, name="anyaccel lease", daemon=True).start()
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
            self._close(LedgerError(f"{self.request} cannot wait for its devices: {error}"))

    def _choose(self, taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
        scope = self._leases.scope
        grants = self._choice.choose(scope.taken(taken))
        if grants is None:
            return None
        self._grants = grants
        return scope.to_ledger(grants)
