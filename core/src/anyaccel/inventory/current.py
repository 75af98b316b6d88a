"""The allocation of this worker, and the part of a machine in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from anyaccel.errors import LedgerError, UsageError
from anyaccel.model import Allocation, Device, Share, decode, replace
from anyaccel.probe import HOST, MACHINE_VARIABLE, Machine

ALLOCATION_VARIABLE = "ANYACCEL_ALLOCATION"
LEASE_VARIABLE = "ANYACCEL_LEASE"

_told: set[str] = set()


def current(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Return the allocation of this process, as its launcher wrote it.

    Args:
        environ: The environment to read; the environment of this process when None.

    An allocation is ignored when its lease does not cover this process: the lease may have ended, and its devices may
    be in use by another process. The logger ``anyaccel`` warns once about that.

    Returns:
        The allocation, with its devices in the order in which the vendor's runtime numbers them here; None outside
        of a worker.

    Raises:
        UsageError: When ``ANYACCEL_ALLOCATION`` holds other text than a launcher writes.

    Examples:
        >>> print(anyaccel.current())
        None
        >>> with anyaccel.use("GPU:0.5", machine="sim:H100:2"):
        ...     [share.memory_bytes for share in anyaccel.current().shares]
        [42760404992]
    """
    environ = os.environ if environ is None else environ
    text = environ.get(ALLOCATION_VARIABLE)
    if not text:
        return None
    import json

    try:
        held = decode(Allocation, json.loads(text))
    except ValueError as error:
        raise UsageError(f"{ALLOCATION_VARIABLE} must hold what the launcher wrote: {error}; unset it") from error
    lease = environ.get(LEASE_VARIABLE)
    return held if not lease or _covered(lease, environ) else None


def _covered(lease: str, environ: Mapping[str, str]) -> bool:
    """Return whether a lease of the environment is active and covers this process; warn once if not."""
    from anyaccel.ledger import Ledger

    try:
        reason = Ledger.open(environ).explain_refusal(lease)
    except LedgerError as error:
        reason = str(error)
    if reason and lease not in _told:  # a training loop may ask at every step
        import logging

        _told.add(lease)
        logging.getLogger("anyaccel").warning(
            "anyaccel: the lease %r, which %s names, is ignored: %s; unset %s and %s",
            lease, LEASE_VARIABLE, reason, LEASE_VARIABLE, ALLOCATION_VARIABLE,
        )  # fmt: skip
    return not reason


def narrow(devices: Sequence[Device], machine: Machine, environ: Mapping[str, str]) -> list[Device]:
    """Hide the devices of a machine outside of this worker's allocation, and narrow shared devices.

    Args:
        devices: The devices of a machine.
        machine: The machine; an allocation on another machine does not count.
        environ: Our environment.
    """
    # A worker of a simulated machine may look at the host, whose devices have other owners.
    held = current(environ) if machine.text == environ.get(MACHINE_VARIABLE, HOST) else None
    if held is None:
        return list(devices)
    # The launcher may have seen other vendors than this process, so an id may begin with its vendor in one of the two.
    shares = {(share.device.vendor, share.device.raw_id): share for share in held.by_device.values()}
    found = [(device, shares.get((device.vendor, device.raw_id))) for device in devices]
    return [_narrow(device, share) if share else replace(device, visible=False) for device, share in found]


def _narrow(device: Device, share: Share) -> Device:
    if device.slots == 1:  # shares without a position, or a whole device
        return replace(device, units=share.units)
    return device if share.whole else device.narrowed(share.slots)
