"""The chips of a machine, and their logical cores.

Device nodes prove which chips this process may open; ``neuron-ls`` reports the most about them, the driver's sysfs and
the PCI ids enough without the tool. Files are only read: writing to some of them resets a chip. Paths are those of the
"Neuron Sysfs User Guide"; drivers differ in the files and permissions, so each file may be absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy

from anyaccel.kit import Card, Catalog, FaultError, number, numbered, text
from anyaccel.plugin import Device, PciFunction, ProbeContext

from anyaccel_neuron import neuron_ls

CATALOG = Catalog(__file__)
CLASS = "/sys/class/neuron_device"
DEVICE_NAME = "info/architecture/device_name"
PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"  # instance type, by the firmware of EC2 on Nitro
PCI_DRIVER = "neuron-driver"
"""Name of the PCI driver (``neuron_pci.c``); the module is called ``neuron``."""

LNC_CONFIG, LNC_CONFIG_OLD = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"
LNC_FILE = "/opt/aws/neuron/logical_nc_config"
SAME_CHIP, LINKED_CHIP = 2, 1

REPLACE = "stop and start the instance to move to other hardware"
REBUILD_DRIVER = (
    "install the headers of the running kernel, reinstall the package aws-neuronx-dkms, then run 'sudo modprobe neuron'"
)


class Chip(Card):
    """A chip, and the facts that its cores share."""

    parts: str = ""  # beginning of the names of its physical cores' directories; empty without a device node
    listed: neuron_ls.Listed = neuron_ls.Listed()
    lnc: int | None = None  # physical cores in a logical core, or None if unknown
    cores: Sequence[int] = ()  # runtime ids of its logical cores

    @property
    def host_index(self) -> int:
        """Index on the host, if sysfs shows it: a container may count from 0."""
        return int(self.folders[0].removeprefix(f"{CLASS}/neuron")) if self.folders else self.index

    def read_text(self, name: str) -> str:
        """Read a file in sysfs; empty if absent or, before driver 2.28, readable by root alone."""
        return "".join(text(self.ctx, f"{folder}/{name}") for folder in self.folders)

    def count(self, name: str) -> int | None:
        """Read a counter in sysfs: a file, or a directory with a file ``total`` since the driver loaded."""
        values = (number(self.ctx, f"{folder}/{name}{end}") for folder in self.folders for end in ("", "/total"))
        return next((value for value in values if value is not None), None)

    def check(self) -> None:
        """Read the driver's state of the chip."""
        ready = self.count("reset")
        if fault := CATALOG.faults("resets").get(str(ready)):
            self.blame(*fault)
        self.sound = ready is not None
        for counter, (meaning, remedy) in CATALOG.faults("counters").items():
            errors = self.count(f"stats/hardware/{counter}")
            self.sound |= errors is not None
            if errors:
                self.blame(f"{counter} is {errors}, {meaning}", remedy)
        broken = self.read_text("stats/hardware/health_status/unhealthy_components")
        if broken.lower() not in ("", "0", "none"):
            self.blame(f"the driver calls {', '.join(broken.split())[:200]} unhealthy", REPLACE)

    def divide(self) -> int:
        """Set the size of the logical cores and return their number; 0 if unknown."""
        known = self.entry.attributes if self.entry else {"lnc": 1, "cores_per_device": 0}
        # An unknown product has no physical count; then only the tool can tell.
        count, physical = self.listed.nc_count, known["lnc"] * known["cores_per_device"]
        if not count:
            size = (configured_size(self.ctx) if known["lnc"] > 1 else None) or known["lnc"]
            self.lnc = size
            return physical // size
        self.lnc = self.listed.lnc or (max(1, physical // count) if physical else None)
        # Tools of SDK 2.21 print the physical cores beside the configuration ("NEURON CORES 8, LOGICAL NC 4").
        both = self.listed.lnc and not self.listed.cores and count == physical
        return count // self.listed.lnc if self.listed.lnc and both else count

    def memory_used(self, device: Device) -> int | None:
        """Add up the memory of a logical core's physical cores; None if unknown.

        ``present`` is read: on idle hardware ``total`` was seen to be 0 despite memory in use (lablup/all-smi#417).
        """
        names = (part.rpartition("/")[2] for part in device.occupies)
        used = [self.count(f"{name}/stats/memory_usage/device_mem/present") for name in names]
        return None if None in used or not used else sum(filter(None, used))

    @property
    def spans(self) -> list[range]:
        """Physical cores of each logical core, by the driver's numbers in a chip: L of size 2 is 2L and 2L+1."""
        size = self.lnc or 1
        return [range(position * size, (position + 1) * size) for position in range(len(self.cores))]

    @property
    def core_ids(self) -> list[str]:
        """Ids of the cores by physical cores: users with other core sizes must not mean different cores by an id."""
        return [f"{self.id}-nc{'-'.join(map(str, sorted({span[0], span[-1]})))}" for span in self.spans]

    def logical_cores(self) -> Iterator[Card]:
        """Build the cores, linked closely to each other, and like the chip to cores of other chips."""
        ids, known = self.core_ids, self.entry.attributes if self.entry else {}
        total = self.listed.memory_bytes
        if total is None and self.entry and self.entry.memory_bytes:
            total = self.entry.memory_bytes * known["cores_per_device"]
        for position, index in enumerate(self.cores):
            core = copy(self)
            core.id, core.index, core.parent = ids[position], index, self.id
            core.model = self.entry.model if self.entry else "NeuronDevice"  # lspci's name of every chip
            core.memory_bytes = total // len(ids) if total else None
            core.links = {**self.links, **{other: SAME_CHIP for other in ids if other != core.id}}
            core.occupies = tuple(f"{self.parts}{part}" for part in self.spans[position] if self.parts)
            core.attributes = {
                **known,
                "lnc": self.lnc,
                "cores_per_device": len(ids),
                "device_index": self.index,
                "core": position,
                "instance_type": self.listed.instance_type,
            }
            yield core


def configured_size(ctx: ProbeContext) -> int | None:
    """Return the physical cores per logical core, from the environment or the machine's file; None if neither has it.

    Raises:
        FaultError: The size is neither 1 nor 2, or the file cannot be read.
    """
    told = [(name, ctx.environ.get(name, "").strip()) for name in (LNC_CONFIG, LNC_CONFIG_OLD)]
    source, value = next((each for each in told if each[1]), (LNC_FILE, ""))
    if not value:
        try:
            match = re.search(rf"^\s*{LNC_CONFIG}\s*=\s*(\S*)", ctx.read(LNC_FILE) or "", re.MULTILINE)
        except OSError as error:
            reason = f"{LNC_FILE} cannot be read ({error.strerror}), and what the core ids mean depends on it"
            raise FaultError(reason, f"let every user read it ('chmod a+r'), or set {LNC_CONFIG}") from error
        if not match:
            return None
        value = match[1]
    if value not in ("1", "2"):
        reason = f"{source}: a logical NeuronCore is 1 or 2 physical ones (got {value!r})"
        raise FaultError(reason, "correct or remove it")
    return int(value)


def find(ctx: ProbeContext, functions: Sequence[PciFunction]) -> tuple[list[Chip], str]:
    """Describe the chips with a device node; other chips in sysfs belong to other containers.

    Returns:
        The chips in the order of their indexes, and the tool's problem; empty if the tool works.
    """
    # A plain file by that name is no chip; ctx.node() returns character devices only.
    nodes = {index: node for index, path in numbered(ctx, "/dev/neuron").items() if (node := ctx.node(path))}
    if not nodes:
        return [], ""
    listed, problem = neuron_ls.ask(ctx)
    shown = {path: text(ctx, f"{path}/dev") for path in numbered(ctx, f"{CLASS}/neuron").values()}
    # An instance has chips of one kind, which PCI, sysfs or the firmware names.
    names = (text(ctx, f"{path}/{DEVICE_NAME}") for path in shown)
    seen = [CATALOG.by_pci(function.device) for function in functions] or [*filter(None, map(CATALOG.by_name, names))]
    seen = seen or [CATALOG.by_name(text(ctx, PRODUCT_NAME))]
    common = seen[0] if all(entry is seen[0] for entry in seen) else None
    chips = []
    for index, node in nodes.items():
        # The driver makes each directory with the numbers of its node (neuron_cdev.c). A container, to which sysfs
        # shows the host's chips (optimum-neuron#544), may give nodes other names: they count where numbers are hidden.
        by_name = None if any(shown.values()) else f"{CLASS}/neuron{index}"
        own = (path for path, numbers in shown.items() if path == by_name or numbers == f"{node.major}:{node.minor}")
        told = listed.get(index, neuron_ls.Listed())
        alone = not told.function and len(functions) == len(nodes) == 1
        same = (each for each in functions if alone or (told.function and each.address == told.function.address))
        chip = Chip(ctx, "", next(same, told.function))
        chip.index, chip.listed, chip.nodes, chip.folders = index, told, (node.path,), [*own]
        # The driver gives the node of a chip the chip's index as its minor number (neuron_cdev.c) and makes a directory
        # for each physical core (neuron_sysfs_metrics.c). A container may give the node another name, not another
        # number. Which parts there are depends on no user's setting, so no core is leased twice under two names.
        chip.parts = f"{CLASS}/neuron{node.minor}/neuron_core"
        chip.entry = CATALOG.by_name(chip.read_text(DEVICE_NAME)) or CATALOG.by_name(told.instance_type or "") or common
        if told.fault:
            chip.blame(told.fault, "run 'neuron-ls' by hand, then reset the device", partial=True)
        chip.check_node(node.path, closed=f"run 'sudo chmod 0666 {node.path}'", partial=True)
        chip.check()
        chips.append(chip)
    return chips, problem


def number_cores(chips: Sequence[Chip], problem: str) -> None:
    """Set the ids of the cores, from the tool or by counting through the chips; ``problem`` is the tool's.

    Raises:
        FaultError: The number of cores is unknown, or the size of logical cores is malformed.
    """
    counts = [chip.divide() for chip in chips]
    known = Counter((chip.lnc, count) for chip, count in zip(chips, counts, strict=True) if count)
    if chips and not known:
        paths = ", ".join(path for chip in chips for path in chip.nodes)
        why = problem or "; ".join(chip.fault.reason for chip in chips if chip.fault) or "neuron-ls lists none of them"
        raise FaultError(f"nothing tells how many NeuronCores {paths} have: {why}", "install aws-neuronx-tools")
    taken = {core for chip in chips for core in chip.listed.cores}
    for chip, count in zip(chips, counts, strict=True):
        size = count
        if not count:  # assumed like its siblings: it must not shift the ids of later chips
            chip.lnc, size = known.most_common(1)[0][0]
            chip.blame("neither neuron-ls nor sysfs tells how many cores it has", "reset it", partial=True)
        start = chip.index * size
        # The tool's ids of other chips may already occupy this range.
        if not taken.isdisjoint(range(start, start + size)):
            start = max(taken) + 1
        chip.cores = chip.listed.cores or range(start, start + size)
        taken.update(chip.cores)


def without_driver(
    ctx: ProbeContext, functions: Sequence[PciFunction], chips: Sequence[Chip], *, loaded: bool
) -> list[Chip]:
    """Describe chips on the PCI bus without a driver: present, and not usable.

    With the driver loaded, only functions whose missing binding sysfs shows count: the rest belongs to containers.
    Their ids follow those of the usable chips, since the runtime does not count them.
    """
    known = {chip.address for chip in chips}
    start = max((core for chip in chips for core in chip.cores), default=-1) + 1
    index = max((chip.index for chip in chips), default=-1) + 1
    found: list[Chip] = []
    # Sandboxes hide the links to drivers for every function at once.
    shown = not loaded or any(each.driver for each in functions)
    for function in functions:
        if not shown or function.address in known or function.driver == PCI_DRIVER:
            continue
        chip = Chip(ctx, "", function, entry=CATALOG.by_pci(function.device))
        chip.index = index + len(found)
        if function.driver:
            chip.blame(f"it is bound to the driver {function.driver}", f"bind it to {PCI_DRIVER}", partial=True)
        elif loaded:
            remedy = "look for its address in dmesg, then stop and start the instance"
            chip.blame("the Neuron driver did not take it", remedy, partial=True)
        else:
            chip.blame("the Neuron driver is not loaded", REBUILD_DRIVER, partial=True)
        chip.cores = range(start, start + chip.divide())
        start += len(chip.cores)
        found.append(chip)
    return found


def identify(chips: Sequence[Chip]) -> None:
    """Set the id of each chip: serial number, else PCI address, else index on the host."""
    told = [chip.read_text("info/serial_number").lower().removeprefix("0x") for chip in chips]
    for chip, serial in zip(chips, told, strict=True):
        # The driver shows 16 hexadecimal digits, or a blank when it cannot read them.
        # A serial number that two chips share is a placeholder.
        lasting = re.fullmatch(r"[0-9a-f]{8,32}", serial) and serial.strip("0") and told.count(serial) == 1
        chip.id = f"neuron-{serial if lasting else chip.address or f'device{chip.host_index}'}"


def connect(chips: Sequence[Chip]) -> None:
    """Add the links between usable chips.

    Tool and driver name neighbors by the host's numbers, even in a container that counts from 0. The names are used
    only if the host's index of every chip is known, or every named chip is visible here. Chips on a switch are linked
    all to all; the driver shows the torus of older chips.
    """
    numbered = all(chip.read_text("dev") for chip in chips)
    here = {chip.host_index if numbered else chip.index: chip for chip in chips}
    shown = {index: re.findall(r"[0-9]+", chip.read_text("connected_devices")) for index, chip in here.items()}
    told = {index: chip.listed.connected or [*map(int, shown[index])] for index, chip in here.items()}
    if any(chip.entry and chip.entry.facts.get("switched") for chip in chips):
        told = {index: list(here) for index in here}
    elif not numbered and any(other not in here or other == index for index in told for other in told[index]):
        return
    for index, chip in here.items():
        near = {other for other in here if other != index and (other in told[index] or index in told[other])}
        chip.links = {core: LINKED_CHIP for other in sorted(near) for core in here[other].core_ids}
