"""Ray's own interface to a vendor's accelerators, implemented by any plug-in.

For frameworks that were written for ``ray._private.accelerators.AcceleratorManager``: :func:`accelerator_manager`
returns a class with Ray's static methods. No method loads a vendor's library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from importlib import import_module
from typing import Any

from anyaccel import detect
from anyaccel.errors import UnknownNameError
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Device,
    EnvContext,
    Fractional,
    Inventory,
    Product,
    Share,
    Term,
    VendorState,
)
from anyaccel.probe import Machine, parse_machine
from anyaccel.vendors import simulate, vendor_process
from anyaccel_export.ray import mask_switch, slice_labels, slice_resources

_log = logging.getLogger("anyaccel_ray")


def accelerator_manager(vendor: str, machine: str | Machine | None = None) -> type[Any]:
    """Make a class with the static methods of Ray's ``AcceleratorManager`` from a vendor's plug-in.

    The class is a subclass of Ray's if Ray is installed. Three differences to Ray's own managers are intended: a
    quantity that the hardware can never serve is refused, broken devices have no id, and the type is None if the node
    has devices of several types.

    Args:
        vendor: Key of the vendor.
        machine: The machine that stands for this node; see :func:`anyaccel.detect`.

    Raises:
        PluginError: When the plug-in is not installed, or fails.
        MachineError: When ``machine`` names no machine.
    """
    backend = _Backend(vendor, parse_machine(machine) if isinstance(machine, str) else machine)
    members = {name: staticmethod(getattr(backend, name)) for name in METHODS}
    members["validate_resource_request_quantity"] = staticmethod(cache(backend.validate_resource_request_quantity))
    name = f"{''.join(part.title() for part in vendor.split('_'))}AcceleratorManager"
    doc = f"The devices of {vendor}, as its anyaccel plug-in detects them."
    return type(name, (_base(),), {**members, "__doc__": doc, "__module__": __name__})


def _base() -> type:
    try:
        found: type = import_module("ray._private.accelerators.accelerator").AcceleratorManager
    except ImportError:
        return object
    return found


class _Backend:
    """The methods of Ray's interface for a vendor, to become static methods."""

    def __init__(self, vendor: str, machine: Machine | None) -> None:
        self._plugin = vendor_process(vendor)
        self._vendor = vendor
        self._machine = machine
        self._detected: tuple[tuple[str | None, ...], Inventory] | None = None

    def get_resource_name(self) -> str:
        """Return the resource of the devices."""
        return self._plugin.info.resource

    def get_visible_accelerator_ids_env_var(self) -> str | None:
        """Return the mask variable: the first variable of the plug-in; None without variables."""
        return next(iter(self._plugin.info.env_vars), None)

    def get_current_node_num_accelerators(self) -> int:
        """Return the number of devices on the node, with hidden and broken devices: Ray's ids count each."""
        return len(self._devices())

    def get_current_node_accelerator_type(self) -> str | None:
        """Return the type of the devices; None without devices, or with several types."""
        types = {device.type for device in self._devices() if device.usable}
        return types.pop() if len(types) == 1 else None

    def get_current_node_additional_resources(self) -> dict[str, float] | None:
        """Return the additional resources of a host of a slice; None without any."""
        return {name: float(count) for name, count in slice_resources(self._devices()).items()} or None

    def get_current_node_accelerator_labels(self) -> dict[str, str] | None:
        """Return the labels of a host of a slice; None without any."""
        return slice_labels(self._devices()) or None

    def get_current_process_visible_accelerator_ids(self) -> list[str] | None:
        """Return the ids of the visible devices of this process, in the order of the mask; None without a mask.

        An id is the index of a device, or its own id if that is in the mask.
        """
        devices = self._devices()
        variable = self.get_visible_accelerator_ids_env_var()
        mask = os.environ.get(variable) if variable else None
        if mask is None and all(device.usable for device in devices):
            return None
        named = {item.strip() for item in (mask or "").split(",")}
        usable = sorted((device for device in devices if device.usable), key=lambda device: device.order)
        return [device.id if device.id in named else str(device.index) for device in usable]

    def set_current_process_visible_accelerator_ids(self, ids: Sequence[str | int]) -> None:
        """Set every variable with which this process and children see exactly the given devices.

        Args:
            ids: Indexes or ids of devices.

        Raises:
            UnknownNameError: When there is no such device.
            ValueError: When no process can hold these devices together.
        """
        environ: MutableMapping[str, str] = os.environ
        variable = self.get_visible_accelerator_ids_env_var()
        if variable is None or environ.get(mask_switch(self._plugin.info), "").lower() in ("1", "true"):
            return
        everything = self._devices()
        known = {str(device.index): device for device in everything} | {device.id: device for device in everything}
        missing = [str(item) for item in ids if str(item) not in known]
        if missing:
            raise UnknownNameError(
                f"{self._vendor} has no device {', '.join(missing)} on this node; there are"
                f" {', '.join(str(device.index) for device in everything) or 'none'}"
            )
        devices = tuple({known[str(item)].id: known[str(item)] for item in ids}.values())
        if reason := self._refusal(devices):
            raise ValueError(reason)
        edits = self._plugin.env(
            devices,
            EnvContext(
                devices=everything,
                shares={device.id: Share(device=device, memory_bytes=device.memory_bytes) for device in devices},
                environ=dict(environ),
                mask="index" if all(str(item).isdecimal() for item in ids) else "id",
            ),
        )
        for name in edits.unset:
            environ.pop(name, None)
        environ.update(edits.set)

    def get_ec2_instance_num_accelerators(self, instance_type: str, instances: Mapping[str, Any]) -> int | None:  # noqa: ARG002
        """Return the number of devices of a cloud instance type; None if the plug-in does not know it."""
        product = self._product_of(instance_type)
        return None if product is None else product.instance_types[instance_type]

    def get_ec2_instance_accelerator_type(self, instance_type: str, instances: Mapping[str, Any]) -> str | None:  # noqa: ARG002
        """Return the type of the devices of a cloud instance type; None if the plug-in does not know it."""
        product = self._product_of(instance_type)
        return None if product is None else product.name

    def validate_resource_request_quantity(self, quantity: float | Decimal | Fraction) -> tuple[bool, str | None]:
        """Return whether any machine of this vendor can serve a quantity; and the reason if not."""
        resource = self.get_resource_name()
        if not 0 <= quantity < float("inf"):
            return False, f"a quantity of {resource} must be 0 or more (got {quantity})"
        whole = quantity == int(quantity)
        if quantity > 1 and not whole:
            return False, f"a quantity of {resource} above 1 must be a whole number (got {quantity})"
        if quantity == 0:
            return True, None
        count = max(1, int(quantity))
        sets = list(self._imagined(count))
        if not whole:
            # Ray's ids name whole devices: a share of a device that is divided by position would get all of it.
            shared = not sets or any(
                self._plugin.ask("fractional", [device]) is Fractional.SHARED for devices in sets for device in devices
            )
            return (
                shared,
                None if shared else f"{resource} cannot be shared: a quantity must be a whole number (got {quantity})",
            )
        reasons = [self._refusal(devices) for devices in sets]
        return (True, None) if not reasons or None in reasons else (False, reasons[0])

    def _product_of(self, instance_type: str) -> Product | None:
        return next((each for each in self._plugin.ask("products") if instance_type in each.instance_types), None)

    def _imagined(self, count: int) -> list[tuple[Device, ...]]:
        """Return a set of so many devices for each known product and size of machine that is large enough."""
        sets = []
        for product in self._plugin.ask("products"):
            sizes = [size for size in product.counts if size >= count] or [count]
            machines = [
                simulate.simulate(self._vendor, [simulate.Cards(product=product, number=size)]).devices
                for size in sizes
            ]
            sets += [machine[:count] for machine in machines]
        return sets

    def _refusal(self, devices: Sequence[Device]) -> str | None:
        term = Term(names=(self.get_resource_name(),), units=max(1, len(devices)) * UNITS_PER_DEVICE)
        return self._plugin.validate(term, devices) if devices else None

    def _devices(self) -> tuple[Device, ...]:
        """Return the vendor's devices on the node by index, as the masks of this process leave them.

        Detection runs once for each value of the vendor's variables. If the plug-in fails, there are no devices and a
        warning is logged, so that the node can start.
        """
        state = tuple(os.environ.get(name) for name in self._plugin.info.env_vars)
        if self._detected is None or self._detected[0] != state:
            inventory = detect(self._machine)
            self._detected = state, inventory
            report = inventory.report(self._vendor)
            if report is not None and report.state is VendorState.FAILED:
                _log.warning("%s; its devices are not counted", report.problem)
        return tuple(sorted(self._detected[1].of_vendor(self._vendor), key=lambda device: device.index))


METHODS = tuple(name for name in vars(_Backend) if not name.startswith("_"))
"""The methods of Ray's interface."""
