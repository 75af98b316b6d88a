"""What this worker holds, and what that leaves of a machine: only ever less."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from anyaccel.errors import LedgerError, UsageError
from anyaccel.model import Allocation, Device, Share, replace
from anyaccel.model.wire import decode
from anyaccel.probe import HOST, MACHINE_VARIABLE
from anyaccel.probe.machine import Machine

ALLOCATION_VARIABLE = "ANYACCEL_ALLOCATION"
LEASE_VARIABLE = "ANYACCEL_LEASE"

_told: set[str] = set()


def current(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Say what this process was given by the launcher that started it.

    Args:
        environ: The environment to read; that of this process when None.

    An allocation whose lease does not cover this process counts for nothing: the lease may have ended, and its devices
    may be another's by now. That is told once, as a warning of the logger ``anyaccel``.

    Returns:
        The allocation, with its devices in the order in which the vendor's runtime numbers them here; None outside
        of a worker.

    Raises:
        UsageError: When somebody has written nonsense into ``ANYACCEL_ALLOCATION``.

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
    """Whether a lease that the environment names is in force and this process was started with it; tells if not."""
    from anyaccel.ledger import Ledger

    try:
        reason = Ledger.open(environ).explain_refusal(lease)
    except LedgerError as error:
        reason = str(error)
    if reason and lease not in _told:
        import logging

        _told.add(lease)
        logging.getLogger("anyaccel").warning(
            "anyaccel: the lease %r, which %s names, is ignored: %s; unset %s and %s",
            lease, LEASE_VARIABLE, reason, LEASE_VARIABLE, ALLOCATION_VARIABLE,
        )  # fmt: skip
    return not reason


def narrow(devices: Sequence[Device], machine: Machine, environ: Mapping[str, str]) -> list[Device]:
    """Leave of a machine's devices what this worker holds: the others are hidden, shares stay shares.

    Args:
        devices: The devices of a machine.
        machine: The machine; what we hold on another one says nothing about it.
        environ: Our environment.
    """
    held = current(environ) if machine.text == environ.get(MACHINE_VARIABLE, HOST) else None
    if held is None:
        return list(devices)
    # Whoever started us may have seen more vendors than we do, or fewer, and so named a device with its vendor or not.
    shares = {(share.device.vendor, share.device.raw_id): share for share in held.by_device.values()}
    found = [(device, shares.get((device.vendor, device.raw_id))) for device in devices]
    return [_narrow(device, share) if share else replace(device, visible=False) for device, share in found]


def _narrow(device: Device, share: Share) -> Device:
    if device.slots == 1:
        return replace(device, units=share.units)
    return device if share.whole else device.narrowed(share.slots)
