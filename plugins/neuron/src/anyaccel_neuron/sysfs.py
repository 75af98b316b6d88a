"""What the Neuron driver shows under ``/sys``. Files are only ever read: writing to some of them resets a chip.

Paths are those of the "Neuron Sysfs User Guide"; drivers differ in what they show and to whom, so each may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from anyaccel.plugin import DeviceNode, PciFunction, ProbeContext

from anyaccel_neuron.products import FAMILIES, PCI_FAMILIES, PCI_VENDOR, Family

CLASS = "/sys/class/neuron_device"
MODULE = "/sys/module/neuron"
DRIVER = "neuron-driver"
"""Name of the PCI driver (``neuron_pci.c``)."""

LNC_FILE = "/opt/aws/neuron/logical_nc_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One chip in sysfs, which shows those of the host also inside a container (optimum-neuron#544).

    Attributes:
        path: Its directory.
        index: Index of the chip as the host counts.
        number: Numbers of its device node as ``major:minor``, or an empty string when unknown.
    """

    path: str
    index: int
    number: str = ""


def nodes(ctx: ProbeContext) -> dict[int, DeviceNode]:
    """The chips that this process may open, by index: ``/dev/neuron0`` and so on, character devices only."""
    found = {}
    for path in ctx.glob("/dev/neuron[0-9]*"):
        match = re.fullmatch(r"/dev/neuron([0-9]+)", path)
        node = ctx.node(path) if match else None
        if match and node:
            found[int(match[1])] = node
    return found


def pci_functions(ctx: ProbeContext) -> list[PciFunction]:
    """The PCI functions that are Neuron chips, in the order of addresses, which is not the order of indexes."""
    return [function for function in ctx.pci(vendor=PCI_VENDOR) if function.device in PCI_FAMILIES]


def entries(ctx: ProbeContext) -> list[Entry]:
    """The chips that the driver of the host shows."""
    found = []
    for path in ctx.glob(f"{CLASS}/neuron[0-9]*"):
        match = re.fullmatch(r"neuron([0-9]+)", path.rpartition("/")[2])
        if match:
            found.append(Entry(path=path, index=int(match[1]), number=text(ctx, f"{path}/dev")))
    return found


def entry_of(node: DeviceNode, index: int, shown: Iterable[Entry]) -> Entry | None:
    """The entry behind a device node: the one with its numbers, since a container may give nodes other names.

    The driver creates each entry with the numbers of its node (``neuron_cdev.c``). Names decide only where no entry
    shows any.
    """
    shown = list(shown)
    if any(entry.number for entry in shown):
        return next((entry for entry in shown if entry.number == f"{node.major}:{node.minor}"), None)
    return next((entry for entry in shown if entry.index == index), None)


def text(ctx: ProbeContext, path: str) -> str:
    """The content of a file, stripped; empty when it is absent or, as many are before driver 2.28, only for root."""
    try:
        return (ctx.read(path) or "").strip()
    except OSError:
        return ""


def number(ctx: ProbeContext, path: str) -> int | None:
    """A counter, which is a file, or a directory whose file ``total`` counts since the driver was loaded."""
    for where in (path, f"{path}/total"):
        value = text(ctx, where)
        if re.fullmatch(r"[0-9]{1,20}", value):
            return int(value)
    return None


def family(ctx: ProbeContext, entry: Entry) -> Family | None:
    """The family of a chip by the name that the driver gives it."""
    return FAMILIES.get(text(ctx, f"{entry.path}/info/architecture/device_name").lower())


def serial(ctx: ProbeContext, entry: Entry) -> str:
    """The serial number of a chip, 16 hexadecimal digits; empty when the driver cannot read it."""
    value = text(ctx, f"{entry.path}/info/serial_number").lower().removeprefix("0x")
    return value if re.fullmatch(r"[0-9a-f]{8,32}", value) and value.strip("0") else ""


def connected(ctx: ProbeContext, entry: Entry) -> frozenset[int]:
    """Indexes, as the host counts, of the chips that a chip is linked to."""
    value = text(ctx, f"{entry.path}/connected_devices")
    return frozenset(int(item) for item in re.findall(r"[0-9]+", value))


def driver_version(ctx: ProbeContext) -> str:
    """Version of the kernel driver, or an empty string."""
    return text(ctx, f"{MODULE}/version")


def logical_core_size(ctx: ProbeContext, chip: Family) -> int:
    """Physical cores in one logical core: from the environment, the file of the machine, or the chip's default.

    Raises:
        ValueError: When the environment or the file says something else than 1 or 2, or the file cannot be read.
    """
    if len(chip.lncs) == 1:
        return chip.lnc
    for source in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
        if value := ctx.environ.get(source, "").strip():
            return _lnc(value, source)
    try:
        content = ctx.read(LNC_FILE) or ""
    except OSError as error:
        raise ValueError(
            f"{LNC_FILE} cannot be read ({error.strerror}), and what the core ids mean depends on it; let everybody"
            " read it, or set NEURON_LOGICAL_NC_CONFIG"
        ) from error
    match = re.search(r"^\s*NEURON_LOGICAL_NC_CONFIG\s*=\s*(\S*)", content, re.MULTILINE)
    return _lnc(match[1], LNC_FILE) if match else chip.lnc


def _lnc(value: str, source: str) -> int:
    if value not in ("1", "2"):
        raise ValueError(
            f"{source}: a logical NeuronCore is 1 or 2 physical ones (got {value!r}); correct or remove it"
        )
    return int(value)
