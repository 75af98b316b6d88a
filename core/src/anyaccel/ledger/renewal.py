"""Renewal of leases that no process holds; see :mod:`anyaccel.ledger.tenure`."""

from __future__ import annotations

import contextlib
import os

from anyaccel.errors import LeaseNotFoundError, LeasePermissionError
from anyaccel.ledger.bodies import clean, with_entry
from anyaccel.ledger.directory import BUSY_SECONDS, StateDirectory
from anyaccel.ledger.listing import read
from anyaccel.ledger.lockfile import LockedFile, read_body
from anyaccel.ledger.names import LeaseName, lease_name
from anyaccel.ledger.tenure import ENTRY, Tenure, read_tenure
from anyaccel.linux.users import user_name


def renew(state: StateDirectory, lease_id: str, tenure: Tenure, note: str | None) -> None:
    """Replace the tenure of a lease; see :meth:`anyaccel.ledger.Ledger.renew`.

    A missing state directory raises NoStateDirectoryError here.
    """
    with state.opened() as directory:
        # The lock keeps requests from publishing a lease of the same devices meanwhile.
        if not state.lock(directory, BUSY_SECONDS):
            raise state.busy(state.owner(directory))
        try:
            files = read(directory).find_lease(lease_id)
            former = [read_tenure(directory, lease) for lease in files]
            for lease in files if _last(former) else ():
                _replace(state, directory, lease, tenure, note)
            # A request that has read a former tenure after its end takes the lease for ended, and gives the device out
            # once the directory is unlocked. A tenure that lasts beyond the last write was never read so.
            if files and _last(former):
                return
            for lease in files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_settled(lease), dir_fd=directory)
        finally:
            state.unlock(directory)
    raise _ended(lease_id)


def _last(tenures: list[Tenure | None]) -> bool:
    """Return whether each tenure lasts now; False if a lease has none, True for an empty list."""
    return all(each is not None and each.reason() for each in tenures)


def _replace(state: StateDirectory, directory: int, lease: LeaseName, tenure: Tenure, note: str | None) -> None:
    """Replace a file of a lease by one with another tenure and note, in one step, so that no reader sees half a body.

    The new file is not locked, keeps the start of the lease, and has no process in its name: see :func:`_settled`.

    Raises:
        OSError: When the new file cannot be made or named.
        LeaseNotFoundError: When the file is gone.
        LeasePermissionError: When the file belongs to another user.
    """
    try:
        found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        raise _ended(lease.id) from None
    if found.st_uid != os.geteuid():
        raise LeasePermissionError(
            f"lease {lease.id} belongs to {user_name(found.st_uid)}", hint="only its owner can renew it"
        )
    file, settled = LockedFile(state.path), _settled(lease)
    try:
        body = with_entry(read_body(directory, lease.name), ENTRY, tenure.encode())
        file.make(directory, body if note is None else with_entry(body, "note", clean(note)))
        os.utime(file.fd, ns=(found.st_atime_ns, found.st_mtime_ns))  # the start of the lease
        os.rename(file.name, settled, src_dir_fd=directory, dst_dir_fd=directory)
        if settled != lease.name:
            os.unlink(lease.name, dir_fd=directory)
    finally:
        file.discard()  # only the hidden name


def _settled(lease: LeaseName) -> str:
    """Return the name of a lease without process and mark, which a program killed while taking the lease left there."""
    return lease_name(lease.device, lease.extent, lease.boot + lease.id, (0, 0), (), lease.period)


def _ended(lease_id: str) -> LeaseNotFoundError:
    """Return the error for a lease that has ended."""
    return LeaseNotFoundError(f"lease {lease_id} has ended", hint="acquire the devices anew")
