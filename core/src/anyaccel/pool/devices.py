"""Devices of workers: requests resolved against this machine, leases, quarantine, and private state directories.

A process that exits closes its devices first. A process that is killed may leave memory behind for a while, and with
some drivers for ever. Such a device is kept in quarantine with the reason, because the next holder would run out of
memory at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from anyaccel.errors import AnyaccelError, LedgerError, NeverFitsError, StateDirectoryError
from anyaccel.forkserver.client import Gone
from anyaccel.inventory import stats
from anyaccel.launcher import LedgerRequest, OpenLease, UsageMeter, has_hook
from anyaccel.linux import mark as marks
from anyaccel.linux import tidy_in_child
from anyaccel.model import Allocation, Extent, Inventory, Request, Share, Stats, replace
from anyaccel.pool.reactor import find_reactor
from anyaccel.probe import parse_machine
from anyaccel.scheduler import Choice, Scheduler
from anyaccel.vendors import KnownNames, validate

if TYPE_CHECKING:
    from anyaccel.ledger import Lease

CPU = Allocation(id="cpu", request=Request(terms=()), grants=())
"""The allocation of a worker without devices."""
PRIVATE = "anyaccel-private-"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - what is made there has mode 0700
FIRST_LOOK_SECONDS = 0.1
LAST_LOOK_SECONDS = 10.0
ORPHANED = 16
"""A device without processes is clean if less than 1/16 of its memory is in use: drivers keep some for themselves."""

ChoiceFactory = Callable[[Request], Choice]


def check_request(inventory: Inventory, request: Request) -> None:
    """Raise the error of a request that can never be served, not even by the CPU if the request permits that.

    Raises:
        UnknownNameError: When no device has one of its names.
        NeverFitsError: When the machine has too few such devices.
    """
    verdict = Scheduler(inventory, validate, KnownNames()).why(request)
    if not (verdict.ever_fits or verdict.cpu):
        raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)


class LocalRequest(LedgerRequest):
    """A request of a pool, resolved against this machine.

    Args:
        inventory: The machine.
        request: The request.
        environ: The environment of the pool.
        choice: Chooses the devices for the request; None for any devices that serve it.
        private: Whether leases are private, so that device files are not locked.
        confined: Whether the worker will be confined to its devices.

    Attributes:
        nothing: Whether no device can serve it, so that it falls back to the CPU.
        ids: Ids of the devices that could serve it, and of their parts. Requests with a common id compete.

    Raises:
        UnknownNameError: When no device has one of its names.
        NeverFitsError: When no devices can ever serve it, and it does not permit the CPU.
    """

    def __init__(
        self,
        inventory: Inventory,
        request: Request,
        environ: Mapping[str, str],
        choice: Choice | None,
        *,
        private: bool,
        confined: bool,
    ) -> None:
        super().__init__(inventory, request, environ, choice, confined=confined, mark=marks.draw)
        if private:
            self.want = replace(self.want, device_locks={})
        self.nothing = not self.choice.ever_fits
        if self.nothing:
            check_request(inventory, self.request)
        candidates = () if self.nothing else self.choice.candidates
        self.ids = self.scope.with_parts(device.id for device in candidates)

    def choose(self, taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
        """Choose devices like the base class; none if the request falls back to the CPU by now.

        Raises:
            NeverFitsError: When not even all devices suffice by now, as after the removal of a vendor's plug-in.
        """
        chosen = super().choose(taken)
        if chosen is None and self.choice.choose({}) is None:  # a vendor's rule fails by now: never wait in vain
            check_request(self.inventory, self.request)
            self.grants = ()
            return {}
        return chosen


class WorkerLease(OpenLease):
    """The lease of a worker; unless private, its use of the devices is measured for the journal.

    Args:
        allocation: The devices.
        lease: The lease in the ledger; None if the request fell back to the CPU.
        on_release: Called after the release.
        private: Whether other processes do not see the lease, which then has no line in the journal.
        note: The note of the request.
        waited: Seconds for which the request waited.
    """

    def __init__(
        self,
        allocation: Allocation,
        lease: Lease | None = None,
        on_release: Callable[[], object] = lambda: None,
        *,
        private: bool = False,
        note: str = "",
        waited: float = 0.0,
    ) -> None:
        super().__init__(lease, allocation, note=note, waited=waited)
        self._on_release = on_release
        self._private = private
        if lease and not private:
            usage = UsageMeter(self, added_up=True)
            self.attach_writer(usage.finish, at_exit=False)  # the pool ends its workers at exit, which writes the line

    @property
    def lease_id(self) -> str:
        """Id of the lease for other processes, also after the release; empty for a private lease, or for none."""
        return self.lease.id if self.lease and not self._private else ""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the lease: a worker with copies carries the lease. Empty without a lease and after release."""
        return self.lease.fds if self.lease else ()

    def release(self, *, carried: bool = False) -> None:
        """Finish the journal's line, release the devices, start to undo the handover, and call ``on_release``.

        No effect the second time or without a lease. A private lease has no line; a short lease is added to a sum that
        is written later; a line that cannot be written is lost.

        Args:
            carried: Whether processes still carry the mark of the lease, for instance under another user's id. Then the
                devices stay held until these exit.

        Raises:
            LedgerError: When the ledger cannot be read for ``carried``; the devices are left to the processes all the
                same.
        """
        if self.lease is not None and not self.lease.released:
            try:
                self.end_lease(self.lease.mark if carried else None)
            finally:
                self._on_release()

    def take_back(self) -> None:
        """Have the vendors undo the handover in a new thread: a vendor may take long, and the dispatcher must not wait.

        No effect without a handover. If no thread can be started, the caller waits. A failure of a vendor is logged.
        """
        if self.handover is not None:
            run_aside(super().take_back)


def run_aside(call: Callable[[], object], *, daemon: bool = False) -> None:
    """Run a call that asks vendors, in a new thread; here if none can be started, so that the caller waits for them."""
    try:
        threading.Thread(target=call, name="anyaccel handover", daemon=daemon).start()
    except RuntimeError:  # the interpreter is exiting, or no thread is left
        call()


class Quarantine:
    """The devices of a pool that are kept although their holder was ended."""

    def __init__(self) -> None:
        self._kept: dict[WorkerLease, str] = {}

    def list(self) -> tuple[tuple[Allocation, str], ...]:
        """Return the devices of each kept lease, with the latest reason; any thread may ask."""
        return tuple((lease.allocation, reason) for lease, reason in tuple(self._kept.items()))

    def keep(self, lease: WorkerLease, reason: str) -> None:
        """Record devices as kept, and write the reason into the ledger; no effect for the reason recorded last."""
        if self._kept.get(lease) != reason:
            self._kept[lease] = reason
            if lease.lease is not None:
                lease.lease.quarantine(reason)

    def release(self, inventory: Inventory, lease: WorkerLease, gone: Gone) -> None:
        """Release devices: at once after exit status 0, else when the vendor sees nothing of the process on them.

        Also at once if there was no process, or no vendor can tell. Else the devices are kept, and a thread polls the
        vendor; an observation that fails counts as nothing, and the release comes in the reactor's thread. Processes
        that carry the lease's mark hold the devices until they exit, even after the release. Call it once for each
        lease, in the reactor's thread.
        """

        def release() -> None:
            """Remove the record of the quarantine, if any, and release the lease; in the reactor's thread."""
            self._kept.pop(lease, None)
            try:
                lease.release(carried=gone.carried)
            except LedgerError as error:  # the devices are left to the carriers: the pool goes on
                logging.getLogger("anyaccel").warning("lease %s: %s", lease.lease_id, error)

        def watch() -> None:
            """Poll the vendor until nothing is found or the observation fails; then have the reactor release.

            Each new reason is recorded. The pauses grow from 0.1 s to 10 s.
            """
            pause = FIRST_LOOK_SECONDS
            while reason := find_remains(inventory, lease.allocation, gone.pid):
                self.keep(lease, reason)
                time.sleep(pause)
                pause = min(2 * pause, LAST_LOOK_SECONDS)
            find_reactor().call_soon(release)

        def start() -> None:
            """Start the thread that polls; try again later if no thread can be started now."""
            try:
                # In a thread of its own: a vendor may take seconds to answer, and the reactor serves all pools.
                threading.Thread(target=watch, name="anyaccel reclaim", daemon=True).start()
            except RuntimeError:
                find_reactor().call_later(LAST_LOOK_SECONDS, start)

        if gone.status == 0 or not gone.forked or not can_tell(inventory, lease.allocation):
            release()
        else:
            self.keep(lease, "its holder was killed, and its vendor has not said yet that its memory is free")
            start()


def can_tell(inventory: Inventory, allocation: Allocation) -> bool:
    """Return whether the plug-in for any of the devices has the hook ``anyaccel_stats``, whatever the hook reports.

    May start the vendors' processes. Declared devices do not count, nor do vendors whose process cannot be asked. False
    for a simulated machine.
    """
    vendors = {device.vendor for device in allocation.devices if not device.declared}
    if not vendors or parse_machine(inventory.machine).simulated:
        return False
    return any(has_hook(vendor, "anyaccel_stats") for vendor in vendors)


def find_remains(inventory: Inventory, allocation: Allocation, pid: int) -> str:
    """Observe the machine, which may take seconds, and return the remains of an ended process on devices, as clauses.

    Remains are the process itself, without its descendants, in a vendor's list of processes; or more than 1/16 of the
    memory in use on a wholly leased device for which the vendor lists no process. Less memory counts as clean, because
    drivers keep some. The text is empty without remains, and also if a vendor fails or does not report.
    """
    try:
        observed, _ = stats(inventory)
    except AnyaccelError:
        return ""
    return "; ".join(filter(None, (_find_remains(share, pid, observed) for share in allocation.shares)))


def _find_remains(share: Share, pid: int, observed: Mapping[str, Stats]) -> str:
    """Return the remains of a process on a device, as a clause; empty if nothing is left, or the vendor cannot tell.

    Remains are the process itself, without its descendants; or more than 1/16 of the memory in use on a wholly leased
    device, if the vendor lists the processes on the device and there are none.
    """
    seen = observed.get(share.device.id)
    if seen is None:
        return ""
    if any(process.pid == pid for process in seen.processes or ()):
        return f"{share.device.id} is still in use by process {pid}, which has ended"
    memory, used = share.device.memory_bytes, seen.memory_used_bytes
    if share.whole and seen.processes == () and memory and used and used * ORPHANED > memory:
        return f"{share.device.id} has {used >> 20} MiB in use, and no process that uses them"
    return ""


_private: list[str] = []
"""The private directory of this process, if there is one; further ones are not used."""
tidy_in_child(_private.clear)  # it is the parent's


def find_private_directory() -> str:
    """Return the path of the state directory of this process alone; the first call makes the directory.

    It is in ``/dev/shm`` if that is writable, else in the directory for temporary files. It is removed at exit, but not
    if the process is killed. A forked child makes another. Threads must not call the function at the same time.

    Raises:
        StateDirectoryError: When the directory cannot be made.
    """
    import tempfile

    if not _private:
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
        try:
            _private.append(tempfile.mkdtemp(prefix=PRIVATE, dir=base))
        except OSError as error:
            raise StateDirectoryError(f"no directory for leases can be made in {base}: {error.strerror}") from error
    return _private[0]


@atexit.register  # before pools register their end, so it runs after that
def _remove_private_directory() -> None:
    """Remove the private directory of this process at exit, ignoring errors."""
    if _private:
        import shutil

        while _private:  # two if the handler of a signal has made one while another was made
            shutil.rmtree(_private.pop(), ignore_errors=True)
