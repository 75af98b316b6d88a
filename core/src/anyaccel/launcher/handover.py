"""Have vendors change devices when these are given to a holder, and undo the change when they are given back.

Only plug-ins with ``anyaccel_handover`` are called, and only for detected devices of this host. A holder can be killed
at any time, and then undoes nothing. So each handover first puts the devices into their idle state, whatever happened
before. The holders of shares of a device have one handover in common: the first gives, the last takes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import AnyaccelError, PluginError
from anyaccel.launcher.scope import Scope
from anyaccel.ledger import BLOCKED, Ledger
from anyaccel.model import Device, Inventory
from anyaccel.probe import HOST
from anyaccel.vendors.process import hand_over, vendor_process


class Handover:
    """The handover of the devices of a lease.

    Args:
        ledger: The ledger of the lease.
        lease: Identity of the lease.
        devices: The devices whose vendors have the hook, by their name in the ledger.
        environ: The environment of the vendors' calls.
    """

    def __init__(self, ledger: Ledger, lease: str, devices: Mapping[str, Device], environ: Mapping[str, str]) -> None:
        self._ledger = ledger
        self._lease = lease
        self._devices = devices
        self._environ = environ

    def give(self) -> None:
        """Put the devices into their idle state, then change them for the holder; call it before the holder starts.

        A device in another active lease stays unchanged if its handover is complete. The call waits for other handovers
        of the devices. After an error or an interrupt, :meth:`take_back` undoes the change.

        Raises:
            PluginError: When a vendor fails.
            LedgerError: When another handover of a device takes too long, or the file of a device cannot be written.
        """
        with self._ledger.lock_handovers(self._devices) as files:
            shared = self._find_held(without=self._lease)
            changed = [name for name, file in files.items() if name not in shared or not file.given]
            for name in changed:
                files[name].write(self._lease, "changing")
            for given in (False, True):
                self._call(changed, given=given)
            for name in changed:
                files[name].write(self._lease, "given")

    def complete(self) -> None:
        """Give the devices unless all are given: for a lease whose program was killed before its holder started.

        The errors are those of :meth:`give`.
        """
        with self._ledger.lock_handovers(self._devices) as files:
            given = all(file.given for file in files.values())
        if not given:
            self.give()

    def take_back(self) -> None:
        """Put the devices that no holder has into their idle state; call it after the end of the lease.

        Devices in their idle state are left out. A failure is logged as a warning; ``anyaccel doctor`` names the
        device, and the next :meth:`give` tries again.
        """
        try:
            with self._ledger.lock_handovers(self._devices) as files:
                held = self._find_held()
                changed = [name for name, file in files.items() if name not in held and file.changed]
                for name in changed:
                    files[name].write(self._lease, "changing")
                self._call(changed, given=False)
                for name in changed:
                    files[name].clear()
        except AnyaccelError as error:
            import logging  # 8 ms, which a command that hands nothing over does without

            logging.getLogger("anyaccel").warning(
                "devices of lease %s were not put back into their idle state: %s", self._lease, error
            )

    def _find_held(self, without: str = "") -> set[str]:
        """Return the names of the devices in active leases, without one lease."""
        return {
            record.device
            for record in self._ledger.leases()
            if record.units and record.state not in BLOCKED and record.id != without
        }

    def _call(self, names: Sequence[str], *, given: bool) -> None:
        """Call the hooks of the vendors of devices, all at once; then raise the first problem as PluginError.

        Does nothing without devices.

        Args:
            names: The devices, by their names in the ledger.
            given: Whether to change the devices for a holder, or to put them into their idle state.
        """
        devices = [self._devices[name] for name in names]
        if devices and (problems := hand_over(devices, self._environ, given=given)):
            raise PluginError(problems[0])


def plan_handover(
    lease: str,
    devices: Sequence[Device],
    inventory: Inventory,
    environ: Mapping[str, str],
    ledger: Ledger | None = None,
) -> Handover | None:
    """Return the handover of the lease's detected devices whose vendors have the hook; nothing is changed yet.

    None without such a device, without a lease, and on a machine that is not this host. Also None inside an outer
    lease: its devices were handed over to the holder of that.

    Args:
        lease: Identity of the lease; empty if the request fell back to the CPU.
        devices: Its devices.
        inventory: The machine.
        environ: The environment of the request.
        ledger: The ledger of the lease; that of the environment if None.
    """
    if not lease or inventory.machine != HOST:
        return None
    detected = [device for device in devices if not device.declared]
    vendors = [vendor for vendor in {device.vendor for device in detected} if _has_hook(vendor)]
    if not vendors or (scope := Scope.make(inventory, environ)).prefix:
        return None
    named = {scope.names[device.id][0]: device for device in detected if device.vendor in vendors}
    return Handover(ledger or Ledger.open(environ), lease, named, environ)


def _has_hook(vendor: str) -> bool:
    """Return whether a vendor's plug-in has the hook; False if the plug-in is not installed here, or fails."""
    try:
        return vendor_process(vendor).implements("anyaccel_handover")
    except AnyaccelError:
        return False
