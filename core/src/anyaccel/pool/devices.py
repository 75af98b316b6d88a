"""What a request means on a machine, and the devices that are held for a worker."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from anyaccel.errors import NeverFitsError, StateDirectoryError
from anyaccel.launcher.choosing import KnownNames, local_scheduler, validate
from anyaccel.launcher.scope import Scope
from anyaccel.launcher.usage import OpenLease, UsageMeter
from anyaccel.ledger import Want
from anyaccel.linux import mark as marks
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import ANY_SLOTS, Allocation, Extent, Grant, Inventory, Request, replace
from anyaccel.scheduler import Choice

if TYPE_CHECKING:
    from anyaccel.ledger import Lease

PRIVATE = "anyaccel-private-"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - what is made there has mode 0700

ChoiceFactory = Callable[[Request], Choice]


def choice_among(inventory: Inventory) -> ChoiceFactory:
    """What chooses any devices of a machine that serve a request."""
    return lambda request: Choice(inventory, request, validate, KnownNames())


def check_request(inventory: Inventory, request: Request) -> None:
    """Raise the error of a request that can never be served.

    Raises:
        UnknownNameError: When nothing goes by one of its names.
        NeverFitsError: When there are not such devices, or not so many.
    """
    verdict = local_scheduler(inventory).why(request)
    if not (verdict.ever_fits or verdict.cpu):
        raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)


class LocalRequest:
    """What a request means on this machine.

    Args:
        choice: What chooses devices for it.
        inventory: The machine.
        scope: Under which names the ledger counts the devices.
        private: Whether the devices themselves are not to be locked.
        confined: Whether its holder will be confined to its devices.

    Attributes:
        request: The request.
        nothing: Whether no device can ever serve it, and it takes the CPU instead.
        ids: Ids of the devices that could serve it, and of their parts: two requests compete where these meet.
        want: What to ask the ledger for.
    """

    def __init__(self, choice: Choice, inventory: Inventory, scope: Scope, *, private: bool, confined: bool) -> None:
        self.request = choice.request
        self._choice = choice
        self._chosen: tuple[Mapping[str, Extent], tuple[Grant, ...] | None] = ({}, choice.choose({}))
        self.nothing = self._chosen[1] is None
        if self.nothing:
            check_request(inventory, self.request)
        candidates = () if self.nothing else choice.candidates
        wanted = frozenset(device.id for device in candidates)
        self.ids = scope.with_parts(wanted)
        want = scope.make_want(choice, inventory)
        locks = {} if private else want.device_locks
        self.want: Want = replace(want, device_locks=locks, confined=confined, mark=marks.draw_often)

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """Choose among what is left, or None; what was chosen last is chosen again as long as the same is taken."""
        before, grants = self._chosen
        if before != taken:
            grants = self._choice.choose(taken)
            self._chosen = dict(taken), grants
        return grants


class WorkerLease(OpenLease):
    """Devices that are held for a worker until they are given back.

    Args:
        allocation: What is held.
        lease: The lease; None where nothing is, since the request fell back to the CPU.
        on_release: Called with what the lease held, by name in the ledger, once it has been given back.
        private: Whether other processes are not to see the lease.
        usage: Its line of the journal; None where there is to be none.
    """

    def __init__(
        self,
        allocation: Allocation,
        lease: Lease | None = None,
        on_release: Callable[[Mapping[str, Extent]], object] = lambda _: None,
        *,
        private: bool = False,
        usage: UsageMeter | None = None,
    ) -> None:
        super().__init__(lease, allocation)
        self._on_release = on_release
        self._private = private
        if usage is not None:
            self.attach_writer(usage, at_exit=False)  # pools end their workers then

    @property
    def lease_id(self) -> str:
        """Identity of the lease, as other processes see it; empty when they do not."""
        return self.lease.id if self.lease and not self._private else ""

    @property
    def devices(self) -> Mapping[str, Extent]:
        """What is held, by name in the ledger."""
        return self.lease.devices if self.lease else {}

    @property
    def mark(self) -> marks.Mark:
        """Mark that the lease names; empty when there is none."""
        return self.lease.mark if self.lease else ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that carry the lease."""
        return self.lease.fds if self.lease else ()

    def quarantine(self, reason: str) -> None:
        """Say to others why the devices are kept although nobody uses them."""
        if self.lease:
            self.lease.quarantine(reason)

    def release(self, *, carried: bool = False) -> None:
        """Give them back; does nothing the second time.

        Args:
            carried: Whether they are left to the processes that carry the mark of the lease, whoever started these.
        """
        if self.lease is not None and not self.lease.released:
            self.end_lease(self.lease.mark if carried else None)
            self._on_release(self.lease.devices)


def without(extent: Extent, own: Extent) -> Extent:
    """What others hold of a device, given what all do and what we do."""
    units = max(0, extent.units - own.units)
    return Extent(units, (extent.slots & ~own.slots) or (ANY_SLOTS if units else 0), extent.divided and not own.divided)


_private: dict[str, int] = {}
"""Our private directories, with descriptors that lock them."""


def private_directory() -> str:
    """Make a state directory for this process alone; removes those of processes that have gone.

    Raises:
        StateDirectoryError: When there is no place for it.
    """
    import tempfile

    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    try:
        for name in os.listdir(base):
            if name.startswith(PRIVATE) and (path := os.path.join(base, name)) not in _private:
                with contextlib.suppress(OSError):
                    _remove(path, _locked(path, wait=False))
        while True:
            path = tempfile.mkdtemp(prefix=PRIVATE, dir=base)
            # Until it is locked, another process takes it for a leftover.
            with contextlib.suppress(FileNotFoundError):
                descriptor = _locked(path, wait=True)
                if os.fstat(descriptor).st_nlink:
                    _private[path] = descriptor
                    return path
                os.close(descriptor)
    except OSError as error:
        raise StateDirectoryError(f"no directory for leases can be made in {base}: {error.strerror}") from error


def _locked(path: str, *, wait: bool) -> int:
    """Lock a private directory as long as the descriptor is open, which is as long as its process lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: str, descriptor: int) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def forsake(path: str) -> None:
    """Remove a private directory, whose user has gone."""
    if (descriptor := _private.pop(path, None)) is not None:
        _remove(path, descriptor)


@atexit.register  # after the pools have ended, which say so later
def _forsake_all() -> None:
    for path in list(_private):
        forsake(path)


@tidy_in_child
def _forget() -> None:
    """We are a fork: the directories are the parent's."""
    while _private:
        os.close(_private.popitem()[1])
