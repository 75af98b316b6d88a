"""Files that say which devices a vendor has changed for a holder, one per device in the state directory.

The lock of the file orders the handovers of the device. An empty file stands for a device in its idle state. Any user
may write the files, so what they say is shown, and decides on nothing that harms another user.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.entries import HANDOVER, Listing, boot, decode, encode, find_active, read_body

_BODY = rb"(?P<boot>[0-9a-f]{8}) (?P<lease>[0-9a-f]{12}) (?P<state>given|changing) *\n"
LOCK_SECONDS = 60.0
"""Time for the lock of a device. Another handover takes three deadlines of the hook at most, of 10 s each."""


class HandoverFile:
    """The open and locked file of a device.

    Attributes:
        changed: Whether the device may not be in its idle state.
        given_to: The lease for which the device was changed in this boot, without an interruption; else empty.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def changed(self) -> bool:
        """Whether the device may not be in its idle state: the file is not empty, also since an earlier boot.

        OSError passes here, and in :attr:`given_to`.
        """
        return os.fstat(self._descriptor).st_size > 0

    @property
    def given_to(self) -> str:
        """Identity of the lease for which the device was changed in this boot; empty if idle or interrupted.

        The lease may have ended: its holder was killed, and the device was not put back yet.
        """
        lease, state = _parse(os.pread(self._descriptor, 64, 0)) or ("", "")
        return lease if state == "given" else ""

    def write(self, lease: str, state: str) -> None:
        """Replace the content in place: tag of this boot, identity of a lease, and state.

        The state is ``changing`` before a call of the vendor, and ``given`` after it.

        Raises:
            OSError: When the file cannot be written.
        """
        data = f"{boot()} {lease} {state:8}\n".encode()  # one length, so that no end of the former state can stay
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    def clear(self) -> None:
        """Empty the file, which says that the device is in its idle state; OSError passes."""
        os.ftruncate(self._descriptor, 0)


@contextlib.contextmanager
def lock_handovers(state: StateDirectory, devices: Iterable[str]) -> Iterator[dict[str, HandoverFile]]:
    """Context with the open and locked files of devices, by their names in the ledger.

    A missing state directory and missing files are made. Files are locked in the order of their names, so that two
    processes never wait for one another at the same time. The end of the context unlocks the files, which stay.

    Raises:
        LedgerBusyError: When another process keeps a file locked for ``LOCK_SECONDS``.
        LedgerError: When the directory or a file cannot be opened or locked, and in place of any OSError in the body.
    """
    with state.opened(make=True) as directory, contextlib.ExitStack() as rest:
        files = {}
        for device in sorted(devices):  # in the same order in each process: no deadlock
            descriptor = _open(directory, HANDOVER + encode(device), shared=state.shared)
            rest.callback(os.close, descriptor)
            rest.callback(state.unlock, descriptor)  # a child that was forked meanwhile has a copy
            state.lock(descriptor, LOCK_SECONDS, f"the handover of {device}")
            files[device] = HandoverFile(descriptor)
        yield files


def list_unfinished(directory: int, listing: Listing) -> dict[str, str]:
    """Return the devices that a holder left changed in this boot, with the identity of the lease, sorted by device.

    Devices with an active lease are left out. An interrupted change counts, too, with the lease that it was for.

    Args:
        directory: Descriptor of the state directory.
        listing: The names there.

    Raises:
        OSError: When the directory cannot be read, or a lock cannot be tested.
    """
    changed = {}
    for name in os.listdir(directory):
        device = decode(name.removeprefix(HANDOVER)) if name.startswith(HANDOVER) else None
        # A file that cannot be read, or has other content, is skipped.
        if device is not None and (content := _parse(read_body(directory, name))):
            changed[device] = content[0]
    if not changed:
        return {}
    active = find_active(directory, listing.leases)
    held = {lease.device for lease in listing.leases if lease.name in active}
    return {device: changed[device] for device in sorted(changed.keys() - held)}


def _parse(data: bytes) -> tuple[str, str] | None:
    """Return the lease and the state that a file names; None for an idle device, an earlier boot, or other content."""
    match = re.fullmatch(_BODY, data)
    if match is None or match["boot"].decode() != boot():
        return None
    return match["lease"].decode(), match["state"].decode()


def _open(directory: int, name: str, *, shared: bool) -> int:
    """Open the file of a device, and make a missing one, writable for every user if the directory is.

    Raises:
        OSError: When the file cannot be made or opened.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError), contextlib.ExitStack() as rest:
        made = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
        rest.callback(os.close, made)
        if shared:
            os.fchmod(made, 0o666)  # whatever the umask is
    # Without O_CREAT, with which the kernel refuses other users' files in a sticky directory.
    return os.open(name, flags, dir_fd=directory)
