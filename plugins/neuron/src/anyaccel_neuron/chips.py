"""The chips of a machine, and the logical cores that each consists of.

Device nodes say which chips this process may open; ``neuron-ls`` says the most about them, the driver's sysfs and the
PCI ids enough where the tool is missing or broken. Files are only ever read: writing to some of them resets a chip.
Paths are those of the "Neuron Sysfs User Guide"; drivers differ in what they show and to whom, so each may be absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anyaccel.kit import Card, Catalog, Entry, FaultError, node_fault, number, text
from anyaccel.plugin import Device, DeviceNode, PciFunction, ProbeContext

from anyaccel_neuron.neuron_ls import Listed, Listing

CATALOG = Catalog(__file__)
CLASS = "/sys/class/neuron_device"
PCI_DRIVER = "neuron-driver"
"""Name of the PCI driver (``neuron_pci.c``); the module is called ``neuron``."""
PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"
"""Instance type, as the firmware of EC2 instances on Nitro says it."""

LNC_FILE = "/opt/aws/neuron/logical_nc_config"
LNC_CONFIG, LNC_CONFIG_OLD = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"

UNKNOWN_MODEL = "NeuronDevice"
"""What ``lspci`` prints for every chip; the model where nothing tells them apart."""

SAME_CHIP, LINKED_CHIP = 2, 1

REPLACE = "stop and start the instance to move to other hardware"
RESETS = {
    0: ("it is being reset", "try again in a minute"),
    2: ("its state is invalid after a reset", REPLACE),
}
COUNTERS = {
    "sram_ecc_uncorrected": ("uncorrected errors of the on-chip memory", REPLACE),
    "mem_ecc_uncorrected": ("uncorrected errors of the device memory", REPLACE),
    "mem_ecc_repairable_uncorrected": (
        "repairable errors of the device memory",
        "reload the driver with 'sudo rmmod neuron && sudo modprobe neuron'",
    ),
}
"""Counters under ``stats/hardware`` that make a chip unfit as soon as they are not 0 (Neuron problem detector)."""


class Shown(NamedTuple):
    """One chip in sysfs, which shows those of the host also inside a container (optimum-neuron#544).

    Attributes:
        path: Its directory.
        index: Index of the chip as the host counts.
        number: Numbers of its device node as ``major:minor`` (``neuron_cdev.c``), or an empty string when unknown.
        entry: Its product, by the name that the driver gives it, or None.
    """

    path: str
    index: int
    number: str
    entry: Entry | None


class Chip(Card):
    """One chip and everything that its cores have in common.

    Attributes:
        node: Its device node, or None when it has none.
        shown: What the driver shows of it, or None.
        listed: What the tool lists of it, or None.
        lnc: Physical cores in one logical core, or None when nothing tells.
        cores: Ids of its logical cores, as the runtime counts.
    """

    def __init__(self, ctx: ProbeContext, index: int, function: PciFunction | None = None) -> None:
        """Begin to look at a chip; ``index`` is its index here."""
        super().__init__(ctx, "", function)
        self.index = index
        self.node: DeviceNode | None = None
        self.shown: Shown | None = None
        self.listed: Listed | None = None
        self.lnc: int | None = None
        self.cores: Sequence[int] = ()

    @property
    def address(self) -> str | None:
        """PCI address, as the tool or the bus tells."""
        return (self.listed.address if self.listed else None) or super().address

    def count(self, name: str) -> int | None:
        """A counter in sysfs, which is a file, or a directory whose file ``total`` counts since the driver loaded."""
        if self.shown is None:
            return None
        value = number(self.ctx, f"{self.shown.path}/{name}")
        return number(self.ctx, f"{self.shown.path}/{name}/total") if value is None else value

    def tell(self, name: str) -> str:
        """The content of a file in sysfs; empty when it is absent or, as many are before driver 2.28, only for root."""
        return text(self.ctx, f"{self.shown.path}/{name}") if self.shown else ""

    def check(self) -> None:
        """Read the state that the driver shows."""
        ready = self.count("reset")
        if ready in RESETS:
            self.blame(*RESETS[ready])
        self.sound = ready is not None
        for counter, (meaning, remedy) in COUNTERS.items():
            errors = self.count(f"stats/hardware/{counter}")
            self.sound |= errors is not None
            if errors:
                self.blame(f"{counter} is {errors}, {meaning}", remedy)
        broken = self.tell("stats/hardware/health_status/unhealthy_components")
        if broken.lower() not in ("", "0", "none"):
            self.blame(f"the driver calls {', '.join(broken.split())[:200]} unhealthy", REPLACE)

    def physical(self, position: int, size: int | None = None) -> range:
        """The physical cores of a logical one, as the driver numbers those of a chip: L of size 2 is 2L and 2L+1."""
        size = size or self.lnc or 1
        return range(position * size, (position + 1) * size)

    def core_id(self, position: int) -> str:
        """Name a core by its physical ones: users with different sizes of cores must not mean two by one name."""
        physical = self.physical(position)
        return f"{self.id}-nc{'-'.join(map(str, sorted({physical[0], physical[-1]})))}"

    def devices(self, linked: Sequence[Chip]) -> list[Device]:
        """Make its cores, each linked to those of this chip and, less closely, to those of linked chips."""
        listed, entry, total = self.listed, self.entry, None
        if listed and listed.memory_bytes:
            total = listed.memory_bytes
        elif entry and entry.memory_bytes:
            total = entry.memory_bytes * int(entry.attributes["cores_per_device"])
        numa_node = listed.numa_node if listed else None
        if numa_node is None and self.function:
            numa_node = self.function.numa_node
        attributes = {**(entry.attributes if entry else {}), **({"lnc": self.lnc} if self.lnc else {})}
        attributes |= {"cores_per_device": len(self.cores), "device_index": self.index}
        if listed and listed.instance_type:
            attributes["instance_type"] = listed.instance_type
        # The driver gives the node of a chip the chip's index as its minor number (neuron_cdev.c) and makes a directory
        # for each physical core (neuron_sysfs_metrics.c). A container may rename the node, and not give it other numbers.
        folder = f"{CLASS}/neuron{self.node.minor}" if self.node else ""
        ids = [self.core_id(position) for position in range(len(self.cores))]
        links = {core: LINKED_CHIP for other in linked for core in map(other.core_id, range(len(other.cores)))}
        reason, remedy = self.fault or ("", "")
        return [
            Device(
                id=ids[position],
                index=index,
                model=entry.model if entry else UNKNOWN_MODEL,
                memory_bytes=total // len(ids) if total else None,
                pci_bus_id=self.address,
                numa_node=numa_node,
                parent=self.id,
                links={**links, **{core: SAME_CHIP for core in ids if core != ids[position]}},
                nodes=(self.node.path,) if self.node else (),
                occupies=tuple(f"{folder}/neuron_core{core}" for core in self.physical(position) if folder),
                health=self.health,
                health_reason=reason,
                health_remedy=remedy,
                attributes={**attributes, "core": position},
            )
            for position, index in enumerate(self.cores)
        ]


def functions(ctx: ProbeContext) -> list[PciFunction]:
    """The PCI functions that are chips: network adapters and disks of an instance have Amazon's vendor id, too.

    They are in the order of addresses, which is not the order of indexes.
    """
    return [function for function in ctx.pci(0x1D0F) if CATALOG.by_pci(function.device)]


def nodes(ctx: ProbeContext) -> dict[int, DeviceNode]:
    """The chips that this process may open, by index: ``/dev/neuron0`` and so on, character devices only."""
    found = ((_index(path), ctx.node(path)) for path in ctx.glob("/dev/neuron[0-9]*"))
    return {index: node for index, node in found if index is not None and node}


def find(ctx: ProbeContext, here: Mapping[int, DeviceNode], listing: Listing) -> list[Chip]:
    """Describe the chips that have a device node; others belong to other containers, whatever sysfs shows."""
    on_bus = functions(ctx)
    sole = on_bus[0] if len(on_bus) == len(here) == 1 else None
    shown = [
        Shown(path, index, text(ctx, f"{path}/dev"), _named(ctx, f"{path}/info/architecture/device_name"))
        for path in ctx.glob(f"{CLASS}/neuron[0-9]*")
        if (index := _index(path)) is not None
    ]
    common = _common(ctx, [CATALOG.by_pci(function.device) for function in on_bus] or [each.entry for each in shown])
    chips = []
    for index, node in here.items():
        listed = listing.chips.get(index)
        address = listed.address if listed else None
        chip = Chip(ctx, index, next((each for each in on_bus if each.address == address), None) if address else sole)
        chip.node, chip.listed, chip.shown = node, listed, _behind(node, index, shown)
        by_type = CATALOG.by_name(listed.instance_type) if listed else None
        by_pci = CATALOG.by_pci(chip.function.device) if chip.function else None
        chip.entry = (chip.shown.entry if chip.shown else None) or by_type or by_pci or common
        if index in listing.faults:
            chip.blame(listing.faults[index], "run 'neuron-ls' by hand, then reset the device", partial=True)
        closed = node_fault(ctx, node.path, closed=f"run 'sudo chmod 0666 {node.path}'")
        if closed:
            chip.blame(*closed, partial=True)
        chips.append(chip)
    return chips


def _index(path: str) -> int | None:
    match = re.fullmatch(r"neuron([0-9]+)", path.rpartition("/")[2])
    return int(match[1]) if match else None


def _named(ctx: ProbeContext, path: str) -> Entry | None:
    """The product that a file names; one whose name it is, or whose instance type or family."""
    return CATALOG.by_name(text(ctx, path))


def _common(ctx: ProbeContext, told: Sequence[Entry | None]) -> Entry | None:
    """The product of every chip of the machine: an instance has one kind, which PCI, sysfs or the firmware names."""
    named = {entry.key: entry for entry in told if entry}
    if named:
        return next(iter(named.values())) if len(named) == 1 else None
    return _named(ctx, PRODUCT_NAME)


def _behind(node: DeviceNode, index: int, shown: Sequence[Shown]) -> Shown | None:
    """What sysfs shows of the chip behind a node: by its numbers, since a container may give nodes other names.

    Names decide only where sysfs shows no numbers.
    """
    if any(each.number for each in shown):
        return next((each for each in shown if each.number == f"{node.major}:{node.minor}"), None)
    return next((each for each in shown if each.index == index), None)


def without_driver(ctx: ProbeContext, chips: Sequence[Chip], *, loaded: bool) -> list[Chip]:
    """Describe the chips on the PCI bus that no driver serves: they are here and cannot be used.

    Where the driver is loaded, only those count whose binding sysfs shows to be missing: the others belong to
    containers. Their ids follow those of the usable chips, since the runtime does not count them.
    """
    on_bus = functions(ctx)
    known = {chip.address for chip in chips}
    start = max((core for chip in chips for core in chip.cores), default=-1) + 1
    index = max((chip.index for chip in chips), default=-1) + 1
    found = []
    for function in on_bus:
        if function.address in known or function.driver == PCI_DRIVER:
            continue
        if loaded and not any(each.driver for each in on_bus):
            continue
        chip = Chip(ctx, index, function)
        if function.driver:
            chip.blame(f"it is bound to the driver {function.driver}", f"bind it to {PCI_DRIVER}", partial=True)
        elif loaded:
            remedy = "look for its address in dmesg, then stop and start the instance"
            chip.blame("the Neuron driver did not take it", remedy, partial=True)
        else:
            remedy = (
                "install the headers of the running kernel, reinstall the package aws-neuronx-dkms, then run 'sudo"
                " modprobe neuron'"
            )
            chip.blame("the Neuron driver is not loaded", remedy, partial=True)
        chip.entry = CATALOG.by_pci(function.device)
        count = _size(chip)
        chip.cores = range(start, start + count)
        found.append(chip)
        start, index = start + count, index + 1
    return found


def number_cores(chips: Sequence[Chip], problem: str) -> None:
    """Fill in the ids of the cores, from the tool or else counted through the chips.

    Args:
        chips: Those that have a device node.
        problem: What went wrong with the tool.

    Raises:
        FaultError: When nothing tells how many cores the chips have, or the size of logical cores is malformed.
    """
    counts = [_size(chip) for chip in chips]
    known = Counter((chip.lnc, count) for chip, count in zip(chips, counts, strict=True) if count)
    if chips and not known:
        paths = ", ".join(chip.node.path for chip in chips if chip.node)
        why = problem or "; ".join(chip.fault.reason for chip in chips if chip.fault) or "neuron-ls lists none of them"
        raise FaultError(f"nothing tells how many NeuronCores {paths} have: {why}", "install aws-neuronx-tools")
    taken = {core for chip in chips if chip.listed for core in chip.listed.cores or ()}
    for chip, told in zip(chips, counts, strict=True):
        count = told
        if not count:  # like its siblings, and unusable: it must not shift the ids of the others
            chip.lnc, count = known.most_common(1)[0][0]
            reason = f"neither neuron-ls nor sysfs tells the cores of device {chip.index}"
            chip.blame(reason, "reset it", partial=True)
        chip.cores = (chip.listed.cores if chip.listed else None) or ()
        if not chip.cores:
            start = chip.index * count
            if not taken.isdisjoint(range(start, start + count)):
                start = max(taken) + 1
            chip.cores = range(start, start + count)
            taken.update(chip.cores)


def _size(chip: Chip) -> int:
    """Settle the size of a chip's logical cores and tell how many there are; 0 when unknown."""
    listed, default = chip.listed, chip.entry.attributes if chip.entry else {}
    physical = default.get("lnc", 0) * default.get("cores_per_device", 0)
    if listed is None:
        chip.lnc = _configured(chip.ctx, default["lnc"]) if default else None
        return physical // chip.lnc if chip.lnc else 0
    chip.lnc = listed.lnc or (max(1, physical // listed.count) if physical else None)
    if listed.lnc and listed.cores is None and listed.count == physical:
        # Tools of SDK 2.21 print the physical cores beside the configuration ("NEURON CORES 8, LOGICAL NC 4").
        return physical // listed.lnc
    return listed.count


def _configured(ctx: ProbeContext, default: int) -> int:
    """Physical cores in one logical core: from the environment, the file of the machine, or the chip's default.

    Raises:
        FaultError: When the environment or the file says something else than 1 or 2, or the file cannot be read.
    """
    if default == 1:  # a chip that knows no other size
        return default
    told = [(name, ctx.environ.get(name, "").strip()) for name in (LNC_CONFIG, LNC_CONFIG_OLD)]
    source, value = next((each for each in told if each[1]), (LNC_FILE, ""))
    if not value:
        try:
            content = ctx.read(LNC_FILE) or ""
        except OSError as error:
            reason = f"{LNC_FILE} cannot be read ({error.strerror}), and what the core ids mean depends on it"
            raise FaultError(reason, f"let everybody read it, or set {LNC_CONFIG}") from error
        match = re.search(rf"^\s*{LNC_CONFIG}\s*=\s*(\S*)", content, re.MULTILINE)
        if not match:
            return default
        value = match[1]
    if value not in ("1", "2"):
        raise FaultError(
            f"{source}: a logical NeuronCore is 1 or 2 physical ones (got {value!r})", "correct or remove it"
        )
    return int(value)


def identify(chips: Sequence[Chip]) -> None:
    """Name each chip: by serial number, else by PCI address, else, where neither is known, by its index on the host."""
    told = [chip.tell("info/serial_number").lower().removeprefix("0x") for chip in chips]
    for chip, serial in zip(chips, told, strict=True):
        # The driver shows 16 hexadecimal digits, or a blank when it cannot read them.
        lasting = re.fullmatch(r"[0-9a-f]{8,32}", serial) and serial.strip("0") and told.count(serial) == 1
        index = chip.shown.index if chip.shown else chip.index
        chip.id = f"neuron-{serial if lasting else chip.address or f'device{index}'}"


def linked(chips: Sequence[Chip]) -> dict[int, set[int]]:
    """Say which chips are linked, by their index here.

    Tool and driver name neighbours as the host counts, also in a container that counts from 0. They are only believed
    where the host's index of every chip is known, or where all the chips that they name are here.
    """
    found: dict[int, set[int]] = {chip.index: set() for chip in chips}
    usable = [chip for chip in chips if chip.node]
    if any(chip.entry and chip.entry.facts.get("switched") for chip in usable):
        # The driver shows the torus of older ones.
        return {chip.index: {other.index for other in usable if other is not chip} for chip in chips}
    neighbors = {
        chip.index: chip.listed.connected
        if chip.listed and chip.listed.connected
        else frozenset(map(int, re.findall(r"[0-9]+", chip.tell("connected_devices"))))
        for chip in usable
    }
    numbered = all(chip.shown and chip.shown.number for chip in usable)
    here = {chip.shown.index if numbered and chip.shown else chip.index: chip.index for chip in usable}
    complete = all(other in here and other != index for index, others in neighbors.items() for other in others)
    for index, others in neighbors.items():
        for other in others if numbered or complete else ():
            if other in here and here[other] != index:
                found[index].add(here[other])
                found[here[other]].add(index)
    return found
