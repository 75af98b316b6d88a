"""AWS Inferentia and Trainium for anyaccel: the NeuronCores of a machine, one logical core a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from anyaccel.kit import Card, Fault, FaultError, Mask, Vendor, fail, kernel_log, number, warn
from anyaccel.plugin import (
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Finding,
    Health,
    PciFunction,
    ProbeContext,
    Stats,
    Term,
)

from anyaccel_neuron import chips, neuron_ls
from anyaccel_neuron.chips import LNC_CONFIG, LNC_CONFIG_OLD, Chip
from anyaccel_neuron.monitor import Monitor

VISIBLE_CORES, NUM_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"

HARDWARE_ERROR = re.compile(r"NEURON_HW_ERR=(\w+)[^\n]*?\bnd-id=(\d+)")
"""What the driver writes into the kernel's log (Neuron problem detector)."""


class CoreList(Mask):
    """The variables that choose cores: ids and ranges in one contiguous increasing run, or a number of cores.

    Sources: "Neuron Runtime configuration" and the ``nrt`` developer guide of the AWS Neuron documentation;
    aws-neuron-sdk#1024 for lists and ranges in one value.
    """

    def __init__(self) -> None:
        """Say how the runtime reads the list.

        It documents no value for "none" and without a value takes every core of the machine, so hiding must not rest
        on what it makes of an empty one. A core that no machine has it refuses.
        """
        super().__init__(
            VISIBLE_CORES,
            nothing="65535",
            entries="core ids and ranges such as 0,1 or 0-3, in one contiguous, increasing run",
            remedy="correct or unset it",
        )

    def read(self, environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device] | None:
        """Say which cores are visible; the list wins over ``NEURON_RT_NUM_CORES``.

        That number leaves the choice of cores to the runtime; the lowest ones stand for them. An empty list is read
        as "none": nobody documents what the runtime makes of it, and only narrowing is safe.
        """
        in_order = sorted(devices, key=lambda device: device.index)
        value = environ.get(VISIBLE_CORES)
        if value is None:
            return self._lowest(environ.get(NUM_CORES, "").strip(), in_order)
        if value.strip() in ("", self.nothing):
            return []
        cores: list[int] = []
        for item in value.split(","):
            match = re.fullmatch(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?", item.strip())
            if match is None:
                raise self.refusal(value)
            cores += range(int(match[1]), int(match[2] or match[1]) + 1) or [-1]
        if _gap(cores):
            raise self.refusal(value)
        by_index = {device.index: device for device in in_order}
        unknown = [core for core in cores if core not in by_index]
        if unknown:
            known = f"cores {_runs(list(by_index))}" if by_index else "none"
            reason = f"{VISIBLE_CORES}={value!r} names core {unknown[0]}, and this machine has {known}"
            raise FaultError(reason, "correct or unset it")
        return [by_index[core] for core in cores]

    def _lowest(self, number: str, in_order: list[Device]) -> list[Device] | None:
        """The lowest cores; a list gives the sizes of groups of cores (AWS note on parallel execution, Inf1)."""
        if not number:
            return None
        remedy = f"correct or unset {NUM_CORES}"
        if not re.fullmatch(r"[0-9]{1,5}(\s*,\s*[0-9]{1,5})*", number):
            raise FaultError(f"{NUM_CORES} must be a number of cores, 0 for all (got {number!r})", remedy)
        count = sum(map(int, number.split(",")))
        if count > len(in_order):
            raise FaultError(f"{NUM_CORES}={number} is more than the {len(in_order)} cores of this machine", remedy)
        return in_order[:count] if count else None


class Neuron(Vendor):
    """Inferentia and Trainium.

    The device is the logical core as the runtime numbers it, since that is what the mask takes; what can be opened and
    mounted is the chip, its parent. No node is ever opened, and the runtime is never loaded: it takes every core.
    """

    key, resource, kind, brand, driver = "neuron", "neuron_cores", "neuron", "Neuron", "neuron"
    url = "https://awsdocs-neuron.readthedocs-hosted.com"
    catalog = chips.CATALOG
    entry_attribute = "device_name"
    mask, variables = CoreList(), (NUM_CORES, LNC_CONFIG, LNC_CONFIG_OLD)

    def functions(self, ctx: ProbeContext) -> list[PciFunction]:
        """The chips on the PCI bus."""
        return chips.functions(ctx)

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find the logical cores, each with the chip it is a part of as its parent.

        Raises:
            FaultError: When nothing tells how many cores the chips have, or what the machine says of their size is
                malformed.
        """
        found, listing = self._chips(ctx)
        if not (found or self._loaded(ctx)):
            return None
        linked = chips.linked(found)
        notes = [listing.problem] if listing.problem else []
        on_bus = self.functions(ctx)
        if on_bus and not found:
            notes.append(
                f"the machine has {len(on_bus)} Neuron devices and none is here: start the container with"
                " --device=/dev/neuron0 and so on"
            )
        return Detected(
            devices=tuple(
                core
                for chip in found
                for core in chip.devices([other for other in found if other.index in linked[chip.index]])
            ),
            driver_version=self.driver_version(ctx),
            partial=any(chip.partial for chip in found),
            notes=tuple(notes),
        )

    def _loaded(self, ctx: ProbeContext) -> bool:
        return self.present(ctx) or any(each.driver == chips.PCI_DRIVER for each in self.functions(ctx))

    def _chips(self, ctx: ProbeContext) -> tuple[list[Chip], neuron_ls.Listing]:
        here = chips.nodes(ctx)
        listing = neuron_ls.ask(ctx) if here else neuron_ls.Listing()
        found = chips.find(ctx, here, listing)
        chips.number_cores(found, listing.problem)
        found += chips.without_driver(ctx, found, loaded=bool(here) or self._loaded(ctx))
        chips.identify(found)
        for chip in found:
            chip.check()
        return found, listing

    def tags(self, device: Device) -> Sequence[str]:
        """Name a core's accelerator types: Ray's, which does not tell chips apart, chip, family, size of the core."""
        entry = self.entry(device)
        if entry is None:
            return self.catalog.entries[0].tags[:1]
        sized = entry.attributes["lnc"] > 1 and "lnc" in device.attributes
        return (*entry.tags[:3], f"{entry.tags[1]}-lnc{device.attributes['lnc']}") if sized else entry.tags[:3]

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Write the mask: increasing core ids as a comma list, which every reader of the variable understands.

        Raises:
            FaultError: When the cores are not one contiguous run, which the runtime refuses.
        """
        in_order = sorted(devices, key=lambda device: device.index)
        reason = _gap([device.index for device in in_order])
        if reason:
            raise FaultError(reason, "ask for cores that follow each other")
        values, unset = {VISIBLE_CORES: self.written(in_order)}, {NUM_CORES}
        entry = self.entry(devices[0]) if devices else None
        if entry and entry.attributes["lnc"] > 1 and "lnc" in devices[0].attributes:
            # Core ids count logical cores: they mean other hardware where the worker is configured differently.
            values[LNC_CONFIG] = str(devices[0].attributes["lnc"])
            unset.add(LNC_CONFIG_OLD)
        return EnvEdits(set=values, unset=frozenset(unset))

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Say why the runtime cannot serve a term with exactly these cores.

        Every chip: whole cores, in one contiguous run. On Trainium collectives also want either cores of one chip, or
        a power of two that starts at a multiple of itself (optimum-neuron#619): such runs are pairs, rows and squares
        of the torus.
        """
        if term.fraction:
            return (
                "a NeuronCore belongs to one process and programs are compiled for whole cores, so it cannot be shared:"
                f" ask for a whole number of cores (got {term.units / 10_000:g})"
            )
        cores = sorted(device.index for device in devices)
        reason = _gap(cores)
        if reason or not cores:
            return reason
        entry, count, per_chip = self.entry(devices[0]), len(cores), _per_chip(devices[0])
        one_chip = cores[0] // per_chip == cores[-1] // per_chip
        if entry is None or one_chip or not entry.model.startswith("Trainium"):
            return None
        if count & (count - 1):
            return f"{entry.model} takes 1 to {per_chip} cores of one chip, or a power of two of them (got {count})"
        if cores[0] % count:
            return f"{count} cores of {entry.model} must begin at a multiple of {count} (got cores {_runs(cores)})"
        return None

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """The nodes of chips that are simulated. A chip is what can be mounted, and there is no node for all."""
        return [f"/dev/neuron{device.index // _per_chip(device)}" for device in devices if not device.nodes]

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Observe cores. There is no temperature, and of power only the share of a maximum that is not published."""
        here = chips.nodes(ctx)
        found = chips.find(ctx, here, neuron_ls.ask(ctx) if here else neuron_ls.Listing())
        by_node = {chip.node.path: chip for chip in found if chip.node}
        monitor = Monitor(ctx)
        observed = {}
        for device in devices:
            chip = next((by_node[path] for path in device.nodes if path in by_node), None)
            if chip:
                chip.check()
            health, fault = self.judge(device, chip)
            observed[device.id] = Stats(
                memory_used_bytes=_memory(chip, device) if chip else None,
                utilization=monitor.utilization(device.index),
                processes=_processes(chip, device, monitor),
                health=health,
                health_reason=fault.reason,
                health_remedy=fault.remedy,
            )
        return observed

    def judge(self, device: Device, card: Card | None) -> tuple[Health, Fault]:
        """Say how a core is; ``card`` is its chip, or None when that has no node."""
        if card is not None:
            return super().judge(device, card)
        if device.health_reason:
            return Health.UNHEALTHY, Fault(device.health_reason, device.health_remedy)
        return Health.UNHEALTHY, Fault("its device node is gone", "reload the driver")

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Variables that contradict each other or the machine, and hardware errors that the driver reported."""
        environ = ctx.environ
        if VISIBLE_CORES in environ and NUM_CORES in environ:
            yield warn(f"{NUM_CORES} is ignored beside {VISIBLE_CORES}", f"unset {NUM_CORES}")
        sizes = {str(device.attributes["lnc"]) for device in detected.devices if "lnc" in device.attributes}
        for name in (LNC_CONFIG, LNC_CONFIG_OLD):
            value = environ.get(name, "").strip()
            if value and sizes and value not in sizes:
                reason = f"{name}={value} and the cores here are of size {', '.join(sorted(sizes))}, so ids differ"
                yield warn(reason, f"unset {name}, or configure the machine in {chips.LNC_FILE}")
        for kind, chip in dict.fromkeys(HARDWARE_ERROR.findall(kernel_log(ctx))):
            yield fail(f"the driver reported {kind} on device {chip}", chips.REPLACE)


def _per_chip(device: Device) -> int:
    """Logical cores of a chip: their ids run through the chips one after the other."""
    return max(1, int(device.attributes.get("cores_per_device", 1)))


def _memory(chip: Chip, device: Device) -> int | None:
    """Add up what the physical cores of a logical core hold.

    ``present`` is read: on idle hardware ``total`` was seen to be 0 whatever is held (lablup/all-smi#417).
    """
    if "lnc" not in device.attributes:
        return None
    position = int(device.attributes.get("core", device.index % _per_chip(device)))
    cores = chip.physical(position, int(device.attributes["lnc"]))
    used = [chip.count(f"neuron_core{core}/stats/memory_usage/device_mem/present") for core in cores]
    return None if None in used else sum(value for value in used if value is not None)


def _processes(chip: Chip | None, device: Device, monitor: Monitor) -> tuple[DeviceProcess, ...] | None:
    """The processes on a core; None where neither the monitor nor ``neuron-ls`` tells.

    The monitor says which cores a process uses. ``neuron-ls`` says which chip only: a process that it names and the
    monitor does not place may be on any core of the chip, and counts on each.
    """
    listed = chip.listed if chip else None
    if listed is None and not monitor.answered:
        return None
    placed = [pid for pid, cores in monitor.cores.items() if str(device.index) in cores]
    unplaced = [pid for pid in (listed.pids if listed else ()) if not monitor.cores.get(pid)]
    return tuple(DeviceProcess(pid=pid) for pid in dict.fromkeys((*placed, *unplaced)))


def _gap(cores: Sequence[int]) -> str | None:
    """Why the runtime would refuse these ids in this order, or None."""
    if all(after == core + 1 for core, after in pairwise(cores)):
        return None
    return f"the Neuron runtime takes one contiguous, increasing run of cores such as 4-7 (got {_runs(cores)})"


def _runs(cores: Sequence[int]) -> str:
    """Write core ids as ranges: ``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


plugin = Neuron()
