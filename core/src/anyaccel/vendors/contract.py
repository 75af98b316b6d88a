"""The table of hooks, and the checks of their answers. A check names all faults of an answer at once.

A hook is a function in :mod:`anyaccel.hookspecs`, which names the arguments, and a row of ``HOOKS``. The facade of the
plug-in, its task in the vendor's process, the call from our process and the conformance suite follow from these two.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType

from anyaccel.model import (
    MOST_SLOTS,
    PCI_ADDRESS,
    UNITS_PER_DEVICE,
    ContainerEdits,
    Detected,
    Device,
    EnvEdits,
    Finding,
    Fractional,
    PluginInfo,
    Product,
    Stats,
    Value,
    VisiblePart,
    faults,
    parts_of,
)
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Arguments = Mapping[str, Any]

VENDOR = r"[a-z][a-z0-9_]{0,31}"
RESOURCE = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"
KIND = r"[a-z][a-z0-9_-]{0,31}"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
TAG = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
DEVICE_ID = r"[!#-&(-+\--~]{1,128}"
"""Printable ASCII without space, comma and quotes."""
PART = r"(?=.{1,128}$)/sys(/(?!\.{1,2}(/|$))[A-Za-z0-9:@+_.-]+)+"
"""A directory below ``/sys``, written in one way only."""
LIBRARY = r"[^/\s]{7,128}"
"""Beginning of the file name of a shared library, at least as long as ``libx.so``."""
MOST_GROUP = (1 << 32) - 2
"""Highest number of a group that Linux gives."""
SLOTS = tuple(count for count in range(1, MOST_SLOTS + 1) if UNITS_PER_DEVICE % count == 0)
"""Numbers of slots that a device may have: each slot is a whole number of 1/10000."""
MOST_VALUE = 64 << 10  # MAX_ARG_STRLEN of execve(2) is 128 KiB, for name and value together
"""Bytes that the value of a variable may have; the kernel takes twice as many."""
NOT_A_VENDORS = r"PATH|HOME|USER|SHELL|IFS|LD_.*|PYTHON.*|ANYACCEL_.*"
"""Variables that no plug-in may own, since they decide what code runs."""
PATTERNS = (VENDOR, RESOURCE, KIND, VARIABLE, TAG, DEVICE_ID, PART, LIBRARY, NOT_A_VENDORS, PCI_ADDRESS)
"""The patterns of the rules, as text: a vendor's process, which compares no rules, need not compile these."""


def info_faults(value: Any, arguments: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_info``."""
    vendor = arguments["vendor"]
    if value.vendor != vendor:
        yield (
            f"PluginInfo.vendor must equal the name of the entry point (got {value.vendor!r}, the entry point is"
            f" {vendor!r}); change one of the two"
        )
    yield from _mismatches(VENDOR, "PluginInfo.vendor", [value.vendor])
    yield from _mismatches(RESOURCE, "PluginInfo.resource", [value.resource])
    yield from _mismatches(KIND, "PluginInfo.kind", [value.kind])
    yield from _mismatches(VARIABLE, "PluginInfo.env_vars", value.env_vars)
    # A short beginning such as "lib" would take every process for one that has loaded the runtime.
    yield from _mismatches(LIBRARY, "PluginInfo.runtimes", value.runtimes)
    yield from _mismatches(VARIABLE, "PluginInfo.ray_switch", filter(None, [value.ray_switch]))
    if any(count < 1 for count in value.counts) or list(value.counts) != sorted(set(value.counts)):
        yield f"PluginInfo.counts must be numbers of devices from 1 on, in ascending order (got {value.counts})"
    yield from _unprintable("PluginInfo.control_nodes", value.control_nodes, path=True)
    yield from _unprintable("PluginInfo.masked_software", [value.masked_software])
    yield from _unprintable("PluginInfo.exclusive", [value.exclusive])
    yield from _variable_faults(value)


def _variable_faults(info: PluginInfo) -> Iterator[str]:
    for name in info.env_vars:
        if re.fullmatch(NOT_A_VENDORS, name):
            yield f"PluginInfo.env_vars must not hold {name!r}: that variable belongs to the system"
    for field, names in (("borrowed", info.borrowed), ("cleared", info.cleared)):
        for name in names:
            if name not in info.env_vars:
                yield f"PluginInfo.{field} must hold variables of env_vars (got {name!r}); add it there"
    for name in info.cleared:
        if name in info.borrowed:
            yield f"PluginInfo.cleared must not hold {name!r}, which is borrowed: the vendor's runtime obeys it"


def detected_faults(value: Any, arguments: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_detect`` other than None."""
    devices = value.devices
    yield from _mismatches(DEVICE_ID, "Device.id", (device.id for device in devices))
    yield from _mismatches(
        PCI_ADDRESS, "Device.pci_bus_id", (d.pci_bus_id for d in devices if d.pci_bus_id is not None)
    )
    yield from _division_faults(devices)
    parts = [part for device in devices for part in device.occupies]
    yield from _mismatches(PART, "Device.occupies", parts)
    yield from _unprintable("Device.nodes", (node for device in devices for node in device.nodes), path=True)
    yield from _repeated("a part in Device.occupies", parts)
    yield from _repeated("Device.id", [device.id for device in devices])
    yield from _repeated("Device.index", [device.index for device in devices])
    for device in devices:
        if device.id.startswith(
            f"{arguments['vendor']}/"
        ):  # the core makes such ids where two vendors use the same one
            yield f"Device.id must not begin with the vendor and a slash (got {device.id!r})"
        if device.index < 0:
            yield f"Device.index must not be negative (got {device.index} for {device.id!r})"
        if device.memory_bytes is not None and device.memory_bytes <= 0:
            yield f"Device.memory_bytes must be positive or None (got {device.memory_bytes} for {device.id!r})"


def _division_faults(devices: Sequence[Device]) -> Iterator[str]:
    """Yield the faults of slots and parents."""
    yield from _mismatches(DEVICE_ID, "Device.parent", (d.parent for d in devices if d.parent is not None))
    parts = parts_of(devices)
    for device in devices:
        # A circle of parents would block each device by itself.
        if device.parent == device.id or device.parent in parts.get(device.id, ()):
            yield f"Device.parent must not be the device or a part of it (got {device.parent!r} for {device.id!r})"
        if device.slots not in SLOTS:
            allowed = ", ".join(map(str, SLOTS))
            yield f"Device.slots must be one of {allowed} (got {device.slots} for {device.id!r})"


def fractional_faults(value: Any, arguments: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_fractional``."""
    if arguments["device"].slots > 1 and value is not Fractional.PARTITIONED:
        yield f"a device with slots is shared by these: it must return Fractional.PARTITIONED (got {value!r})"


def tags_faults(value: Any, _: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_tags``."""
    yield from _mismatches(TAG, "a tag", value)


def env_faults(value: Any, arguments: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_env``."""
    for name in sorted({*value.set, *value.unset} - {*arguments["info"].env_vars}):
        yield f"it may only touch variables that PluginInfo.env_vars lists (got {name!r}); add it there"
    for name in sorted(value.unset & set(value.set)):
        yield f"it must not set and unset {name!r} at once"
    yield from _value_faults(value.set)


def visible_faults(value: Any, arguments: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_visible`` other than None."""
    parts = [item for item in value if isinstance(item, VisiblePart)]
    known = {device.id: device for device in arguments["devices"]}
    ids = [item.id if isinstance(item, VisiblePart) else item for item in value]
    if unknown := [repr(item) for item in ids if item not in known]:
        yield f"it must return ids of the given devices (got {', '.join(unknown)})"
    yield from _repeated("a visible id", ids)
    for part in parts:
        count = known[part.id].slots if part.id in known else MOST_SLOTS
        if not part.slots or len(set(part.slots)) < len(part.slots) or not set(part.slots) <= set(range(count)):
            yield f"VisiblePart.slots must be some of the {count} slots of {part.id!r} (got {part.slots!r})"


def reason_faults(value: Any, _: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_validate`` other than None."""
    if not value.strip():
        yield f"it must return a sentence with the rule, or None (got {value!r})"


def stats_faults(value: Any, _: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_stats``."""
    counted = ("clock_hz", "memory_clock_hz", "ecc_errors_corrected", "ecc_errors_uncorrected")
    for device_id, seen in value.items():
        for name in counted:
            if (getattr(seen, name) or 0) < 0:
                yield f"Stats.{name} must not be negative (got {getattr(seen, name)} for {device_id!r})"


def container_faults(value: Any, _: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_container``."""
    yield from _mismatches(VARIABLE, "a variable of ContainerEdits.env", value.env)
    yield from _value_faults(value.env)
    for group in value.groups:
        if not 0 <= group <= MOST_GROUP:
            yield f"ContainerEdits.groups must be numbers of groups, from 0 to {MOST_GROUP} (got {group})"
    mounted = (path for mount in value.mounts for path in (mount.source, mount.target))
    yield from _unprintable("paths in ContainerEdits", (*value.nodes, *mounted), path=True)


def product_faults(value: Any, _: Arguments) -> Iterator[str]:
    """Yield the faults of an answer of ``anyaccel_products``."""
    names = {product.name for product in value}
    allowed = ", ".join(map(str, SLOTS))
    for product in value:
        if product.slots not in SLOTS:
            yield f"Product.slots must be one of {allowed} (got {product.slots} for {product.name!r})"
        for part, count in product.parts.items():
            if part not in names - {product.name} or count < 1:
                yield (
                    "Product.parts must name other products of this plug-in, with how many there are of each"
                    f" (got {part!r}: {count} for {product.name!r})"
                )


def _unprintable(what: str, texts: Iterable[str], *, path: bool = False) -> Iterator[str]:
    """Yield the texts that are not printable, or no absolute paths."""
    for text in texts:
        if not text.isprintable() or (path and not text.startswith("/")):
            yield f"{what} must be {'absolute paths of ' * path}printable text (got {text!r:.80})"


def _mismatches(pattern: str, what: str, values: Iterable[str]) -> Iterator[str]:
    for value in values:
        if not re.fullmatch(pattern, value):
            yield f"{what} must match {pattern} (got {value!r})"


def _value_faults(values: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of variables that the kernel would refuse."""
    for name, content in values.items():
        if "\0" in content:
            yield f"the value of {name!r} must not hold a NUL character"
        try:
            size = len(os.fsencode(content))  # as os.execve() will encode the value
        except UnicodeEncodeError:
            yield f"the value of {name!r} must be text that can be encoded (got {content!r:.60})"
            continue
        if size > MOST_VALUE:
            yield f"the value of {name!r} must have at most {MOST_VALUE} bytes (got {size})"


def _repeated(what: str, values: list[Any]) -> Iterator[str]:
    counts = Counter(map(repr, values))
    for value in sorted(value for value, count in counts.items() if count > 1):
        yield f"{what} must be unique (got {value} more than once)"


class Hook(Value):
    """A row of the table of hooks.

    Attributes:
        name: Name of the hook, without ``anyaccel_``.
        answer: Type of an answer; a list may stand for a tuple.
        check: Yields the faults of an answer of the right type, given the arguments of the call, the key of the
            ``vendor`` and the plug-in's ``info``. Not called for None.
        shape: Name of the answer, for messages; of the items where the answer is a tuple.
        due: What the hook must return, for messages; ``shape`` if empty.
        required: Whether every plug-in must have the hook.
        default: Makes the answer for a plug-in without the hook, given the arguments of the call.
        seconds: Deadline; None where the hook touches the machine: then the caller sets the deadline.
        changes: Whether the hook changes devices.
    """

    name: str
    answer: Any
    check: Callable[[Any, Arguments], Iterable[str]] = lambda *_: ()
    shape: str = "the answer"
    due: str = ""
    required: bool = False
    default: Callable[[Arguments], Any] = lambda _: None
    seconds: float | None = 5.0
    changes: bool = False

    @property
    def pure(self) -> bool:
        """Whether an answer follows from the arguments alone."""
        return self.seconds is not None and not self.changes

    def type_faults(self, value: Any) -> list[str]:
        """Return the faults of the type of an answer."""
        kinds = self.answer.__args__ if isinstance(self.answer, UnionType) else (self.answer,)
        classes = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
        listed = tuple in classes
        whole = tuple(value) if listed and isinstance(value, list) else value
        if isinstance(whole, classes):
            return faults(whole, self.answer, self.shape)
        due = "a list or tuple of " * listed + (self.due or self.shape)
        way_out = f"; write ({value!r},)" if listed and isinstance(value, str) else ""
        return [f"it must return {due} (got {shown(value)} that is a {type(value).__name__}){way_out}"]

    def broken_rules(self, value: Any, arguments: Arguments) -> list[str]:
        """Return the faults of an answer of the right type; see :attr:`check`."""
        return [] if value is None else list(self.check(value, arguments))


def _device_nodes(arguments: Arguments) -> ContainerEdits:
    nodes = (node for device in arguments["devices"] for node in device.nodes)
    return ContainerEdits(nodes=tuple(dict.fromkeys(nodes)))


_TABLE = (
    Hook(name="info", answer=PluginInfo, check=info_faults, shape="PluginInfo", required=True),
    Hook(
        name="detect",
        answer=Detected | None,
        check=detected_faults,
        shape="Detected",
        due="Detected(devices=tuple(devices)) or None",
        required=True,
        seconds=None,
    ),
    Hook(
        name="fractional",
        answer=Fractional,
        check=fractional_faults,
        due="Fractional.NO, Fractional.SHARED or Fractional.PARTITIONED",
        required=True,
    ),
    Hook(name="tags", answer=tuple[str, ...], check=tags_faults, shape="tags", required=True),
    Hook(name="env", answer=EnvEdits, check=env_faults, shape="EnvEdits", required=True),
    Hook(name="visible", answer=tuple[str | VisiblePart, ...] | None, check=visible_faults, shape="device ids"),
    Hook(name="validate", answer=str | None, check=reason_faults, due="a sentence with the rule, or None"),
    Hook(
        name="stats", answer=Mapping[str, Stats], check=stats_faults, shape="stats", default=lambda _: {}, seconds=None
    ),
    Hook(
        name="container", answer=ContainerEdits, check=container_faults, shape="ContainerEdits", default=_device_nodes
    ),
    Hook(name="handover", answer=type(None), due="None, and raise an exception on failure", seconds=10.0, changes=True),
    Hook(name="diagnose", answer=tuple[Finding, ...], shape="Findings", default=lambda _: (), seconds=None),
    Hook(
        name="products",
        answer=tuple[Product, ...],
        check=product_faults,
        shape="Products",
        default=lambda _: (),
        seconds=10.0,
    ),
)
HOOKS: Mapping[str, Hook] = {hook.name: hook for hook in _TABLE}
"""Every hook, by its name without ``anyaccel_``."""
RECORDED = tuple(hook.name for hook in _TABLE if hook.seconds is None)
"""Hooks that touch the machine, and that a recording can answer."""
