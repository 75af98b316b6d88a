"""AWS Inferentia and Trainium for anyaccel: the NeuronCores of a machine, a device per logical core."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from anyaccel.kit import Fault, FaultError, Mask, Numbers, Vendor, condition, fail, inventory, kernel_log, warn
from anyaccel.plugin import Detected, Device, DeviceProcess, EnvContext, EnvEdits, Finding, ProbeContext, Stats, Term

from anyaccel_neuron import chips
from anyaccel_neuron.chips import LNC_CONFIG, LNC_CONFIG_OLD, Chip
from anyaccel_neuron.monitor import Use, cores_in_use
from anyaccel_neuron.neuron_ls import NO_CORE, Listed

VISIBLE_CORES, NUM_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
HARDWARE_ERROR = r"NEURON_HW_ERR=(\w+)[^\n]*?\bnd-id=(\d+)"  # in the kernel's log: Neuron problem detector


class CoreList(Mask):
    """Ids and ranges of cores, in a contiguous increasing run; else a number of cores in another variable.

    Sources: "Neuron Runtime configuration" and the ``nrt`` developer guide of the AWS Neuron documentation;
    aws-neuron-sdk#1024 for lists and ranges in the same value.
    """

    def write(self, devices: Sequence[Device]) -> str:
        """Write increasing ids with commas between them, the form that the runtime, Ray and vLLM read.

        No form suits every reader: optimum-neuron 0.4.5 takes ``0,1,2,3`` for one core and ``0-3`` for four, while Ray
        and vLLM take ``0-3`` for one. Doctor names the range.
        """
        in_order = sorted(devices, key=lambda device: device.index)
        reason = _gap([device.index for device in in_order])
        if reason:
            raise FaultError(reason, "take cores that follow each other")
        return super().write(in_order)

    def read(self, environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device] | None:
        """Return the visible cores; the list wins over the number.

        The number leaves the choice to the runtime; the lowest cores stand for them. An empty list is read as "none":
        the runtime's reading is not documented, and only narrowing is safe.
        """
        if VISIBLE_CORES not in environ:
            return self._lowest(environ.get(NUM_CORES, "").strip(), sorted(devices, key=lambda device: device.index))
        found = super().read(environ, devices)
        if _gap([device.index for device in found or ()]):
            raise self.refusal(environ[VISIBLE_CORES])
        return found

    def _lowest(self, told: str, in_order: list[Device]) -> list[Device] | None:
        """Return the lowest cores; a list gives the sizes of groups of cores (AWS note on parallel execution, Inf1)."""
        if not told:
            return None
        count = sum(map(int, told.split(","))) if re.fullmatch(r"[0-9]{1,5}(\s*,\s*[0-9]{1,5})*", told) else -1
        if not 0 <= count <= len(in_order):
            reason = f"{NUM_CORES} must be a number of cores, at most {len(in_order)} here, 0 for all (got {told!r})"
            raise FaultError(reason, f"correct or unset {NUM_CORES}")
        return in_order[:count] if count else None


class Neuron(Vendor):
    """Inferentia and Trainium.

    A device is a logical core with the runtime's number, since the mask takes these; nodes and mounts belong to its
    chip, the parent. Detection opens no node and never loads the runtime, which takes every core.
    """

    key, resource, kind, brand, driver = "neuron", "neuron_cores", "neuron", "Neuron", "neuron"
    url = "https://awsdocs-neuron.readthedocs-hosted.com"
    runtimes = ("libnrt.so",)
    pci_vendors, pci_known = (0x1D0F,), True  # Amazon's network adapters and disks have that vendor id, too
    catalog = chips.CATALOG
    entry_attribute = "device_name"
    # The runtime documents no value for "none", and without a value takes every core of the machine, so hiding must not
    # rest on an empty value. It refuses a core beyond the machine.
    mask = CoreList(
        VISIBLE_CORES,
        Numbers(ranges=True),
        nothing=str(NO_CORE),
        unknown="error",
        repeated="error",
        entries="ids of cores that are here, or ranges such as 0-3, in one contiguous, increasing run",
        remedy=f"correct or unset {VISIBLE_CORES}",
    )
    variables = (NUM_CORES, LNC_CONFIG, LNC_CONFIG_OLD)
    exclusive = "a NeuronCore belongs to one process, and programs are compiled for whole cores"

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find the logical cores, each with its chip as parent.

        Raises:
            FaultError: The number of cores of the chips is unknown, or their configuration is malformed.
        """
        functions = self.functions(ctx)
        found, problem = chips.find(ctx, functions)
        loaded = bool(found) or self.present(ctx) or any(each.driver == chips.PCI_DRIVER for each in functions)
        if not (functions or loaded):
            return None
        chips.number_cores(found, problem)
        everything = found + chips.without_driver(ctx, functions, found, loaded=loaded)
        chips.identify(everything)
        chips.connect(found)
        notes = [problem] if problem else []
        if functions and not everything:
            notes.append(
                f"the machine has {len(functions)} Neuron devices and none is here: start the container with"
                " --device=/dev/neuron0 and so on"
            )
        cores = [core for chip in everything for core in chip.logical_cores()]
        partial = any(chip.partial for chip in everything)
        return inventory(cores, self.driver_version(ctx), notes, partial=partial)

    def tags(self, device: Device) -> Sequence[str]:
        """Return a core's accelerator types: Ray's, equal for each chip, then chip, family, size of the core."""
        entry = self.entry(device)
        names = entry.tags[:3] if entry else self.catalog.entries[0].tags[:1]
        return (*names, f"{names[1]}-lnc{device.attributes['lnc']}") if self.sized(device) else names

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask; on chips with several sizes of cores also the size, since ids count logical cores.

        Raises:
            FaultError: The cores are not a contiguous run, which the runtime refuses.
        """
        values, unset = {VISIBLE_CORES: self.write_mask(devices)}, {NUM_CORES}
        # One size for all devices: the variable is global to the process.
        if devices and self.sized(devices[0]):
            values[LNC_CONFIG] = str(devices[0].attributes["lnc"])
            unset.add(LNC_CONFIG_OLD)
        return EnvEdits(set=values, unset=frozenset(unset))

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Return the reason why the runtime cannot use exactly these cores.

        On any chip: whole cores, in a contiguous run. On Trainium, collectives also need either cores of a single chip,
        or a power of two starting at a multiple of itself (optimum-neuron#619): such runs are pairs, rows and squares
        of the torus.
        """
        cores = sorted(device.index for device in devices)
        refusal, count = super().validate(request, devices) or _gap(cores), len(cores)
        entry = self.entry(devices[0]) if devices else None
        if refusal or entry is None or not entry.model.startswith("Trainium"):
            return refusal
        # Cores of one chip need no alignment.
        per_chip = _per_chip(devices[0])
        if cores[0] // per_chip == cores[-1] // per_chip:
            return None
        if count & (count - 1):
            return f"{entry.model} takes 1 to {per_chip} cores of one chip, or a power of two of them (got {count})"
        if cores[0] % count:
            run = f"{cores[0]}-{cores[-1]}"
            return f"{count} cores of {entry.model} must begin at a multiple of {count} (got cores {run})"
        return None

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return the nodes of simulated chips. A chip can be mounted; there is no node for every chip."""
        return [f"/dev/neuron{device.index // _per_chip(device)}" for device in devices if not device.nodes]

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Observe cores. Temperature is not available, nor power: the tools show a share of an unpublished maximum."""
        found, _ = chips.find(ctx, self.functions(ctx))
        # Nodes are unique per chip, also in a container that renumbers chips.
        by_nodes = {chip.nodes: chip for chip in found}
        use = cores_in_use(ctx)
        observed = {}
        for device in devices:
            chip = by_nodes.get(device.nodes)
            gone = Fault(device.health_reason or "its device node is gone", device.health_remedy or "reload the driver")
            shares = [cores.get(str(device.index)) for cores in (use or {}).values()]
            observed[device.id] = Stats(
                memory_used_bytes=chip.memory_used(device) if chip else None,
                utilization=next((share for share in shares if share is not None), None),
                processes=_processes(chip, device, use),
                **condition(chip.fault if chip else gone, sound=chip is not None and chip.sound),
            )
        return observed

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on variables in conflict with each other or the machine, and hardware errors in the log."""
        if VISIBLE_CORES in ctx.environ and NUM_CORES in ctx.environ:
            yield warn(f"{NUM_CORES} is ignored beside {VISIBLE_CORES}", f"unset {NUM_CORES}")
        if "," in ctx.environ.get(VISIBLE_CORES, ""):
            value = ctx.environ[VISIBLE_CORES]
            reason = f"{VISIBLE_CORES}={value} is one core for optimum-neuron, which reads ranges only"
            first, last = (re.split(r"[,-]", value)[end].strip() for end in (0, -1))
            yield warn(reason, f"for optimum-neuron, write {VISIBLE_CORES}={first}-{last}")
        sizes = sorted({str(device.attributes["lnc"]) for device in detected.devices if "lnc" in device.attributes})
        for name in (LNC_CONFIG, LNC_CONFIG_OLD):
            value = ctx.environ.get(name, "").strip()
            if value and sizes and value not in sizes:
                reason = f"{name}={value} and the cores here are of size {', '.join(sizes)}, so ids differ"
                yield warn(reason, f"unset {name}, or configure the machine in {chips.LNC_FILE}")
        for kind, chip in dict.fromkeys(re.findall(HARDWARE_ERROR, kernel_log(ctx, HARDWARE_ERROR))):
            yield fail(f"the driver reported {kind} on device {chip}", chips.REPLACE)

    def sized(self, device: Device) -> bool:
        """Return True if a core's chip has several sizes of cores."""
        entry = self.entry(device)
        return entry is not None and entry.attributes["lnc"] > 1 and "lnc" in device.attributes


def _per_chip(device: Device) -> int:
    """Return the logical cores per chip: ids run through the chips in turn."""
    return max(1, int(device.attributes.get("cores_per_device", 1)))


def _processes(chip: Chip | None, device: Device, use: Use | None) -> tuple[DeviceProcess, ...] | None:
    """Return the processes on a core; None without an answer of the monitor and ``neuron-ls``.

    The monitor reports the cores of a process. ``neuron-ls`` reports only its chip: a process known to ``neuron-ls``
    alone may be on any core of the chip, and counts on each.
    """
    listed = chip.listed if chip else Listed()
    if not listed.nc_count and use is None:
        return None
    placed = [pid for pid, cores in (use or {}).items() if str(device.index) in cores]
    unplaced = [pid for pid in listed.pids if not (use or {}).get(pid)]
    return tuple(DeviceProcess(pid=pid) for pid in dict.fromkeys((*placed, *unplaced)))


def _gap(cores: Sequence[int]) -> str | None:
    """Return the reason why the runtime would refuse these ids in this order, or None."""
    if all(after == core + 1 for core, after in pairwise(cores)):
        return None
    given = ",".join(map(str, cores))
    return f"the Neuron runtime takes one contiguous, increasing run of cores such as 4-7 (got {given})"


plugin = Neuron()
