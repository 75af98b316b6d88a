"""NVIDIA GPUs and MIG devices for anyaccel: asked of NVML, seen in files where NVML cannot be asked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from anyaccel.kit import (
    Card,
    Catalog,
    Fault,
    FaultError,
    Vendor,
    condition,
    fail,
    inventory,
    kernel_log,
    pci_name,
    tag,
    text,
    try_query,
    warn,
)
from anyaccel.plugin import (
    ContainerEdits,
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Mount,
    PciFunction,
    ProbeContext,
    QueryError,
    Stats,
    Term,
)

from . import detection, faults, masks, mps, nvml, shares
from .detection import DRIVER, WSL_NODE
from .masks import is_mig, nvml_index

SHARED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
WSL_LIBRARIES = "/usr/lib/wsl"
UNITS_PER_PERCENT = 100
A100_40G_AT_MOST = 60 << 30

NO_NAME = ("", "NVIDIA Graphics Device", "Graphics Device")
"""What NVML and the driver's files call a GPU that the driver is too old to know."""
NO_GPU = ("DGX Display", "NVIDIA DGX Display")
"""A display adapter that CUDA does not offer; NVIDIA's go-nvlib skips it likewise."""


class Nvidia(Vendor):
    """NVIDIA's GPUs, and their MIG devices in place of those that are divided.

    A device's id is the full UUID. Its index is its position among ours; the number that CUDA gives its GPU in PCI
    order is the attribute ``nvml_index``. A GPU that another kernel driver has, named by the attribute ``driver``, is
    listed and can be in no mask.
    """

    key, resource, kind, brand, driver = "nvidia", "GPU", "gpu", "NVIDIA", "nvidia"
    url = "https://pypi.org/project/anyaccel-nvidia/"
    runtimes = ("libcuda.so",)
    pci_vendors = (0x10DE,)
    pci_classes = (0x0300, 0x0302)  # VGA and 3D controllers: neither audio functions nor NVSwitch bridges
    catalog = Catalog(__file__)
    mask, variables = masks.GPUS, (masks.ORDER, *shares.VARIABLES)
    control_nodes = (*SHARED_NODES, WSL_NODE)
    nameless = "driver"
    registered = False  # files alone may not tell the number of the node

    # What a device is.

    def tags(self, device: Device) -> Sequence[str]:
        """Name the type as Ray does, the exact model, the memory class, and a GeForce without its line.

        A MIG device never carries the tag of its whole GPU, so that nobody who asks for an ``A100`` gets a seventh of
        one: its first tag is ``A100-MIG-1g.5gb``.
        """
        name, _, profile = device.model.partition(" MIG ")
        # Drivers write "NVIDIA" before most names since release 465, and "Tesla" before few: it is the same card.
        name = re.sub(r"^(NVIDIA\s+)?(Tesla\s+)?", "", name.strip())
        family = ray_type(name)
        if is_mig(device):
            suffixes = [f"MIG-{tag(profile.replace('+', '.'))}", "MIG"] if profile else ["MIG"]
            found = [f"{family}-{suffixes[0]}", f"{tag(name)}-{suffixes[0]}", *suffixes]
        else:
            found = [family, tag(name), family.removeprefix("GeForce-")]
            if family == "A100" and device.memory_bytes:  # Ray has a name for each of its two sizes
                found.insert(2, "A100-40G" if device.memory_bytes <= A100_40G_AT_MOST else "A100-80G")
        return tuple(dict.fromkeys(filter(None, found))) or (self.brand,)

    def fractional(self, device: Device) -> Fractional:
        """Shared by agreement or under an MPS daemon; not where the compute mode admits one process."""
        whole = not self.maskable(device) or shares.exclusive(device)
        return Fractional.NO if whole else Fractional.SHARED

    # What is on the machine.

    def present(self, ctx: ProbeContext) -> bool:
        """Whether an NVIDIA GPU can be here without a PCI function. WSL and Tegra have none: there NVML decides."""
        signs = (DRIVER, "/dev/nvidiactl", WSL_NODE)
        return any(map(ctx.exists, signs)) or bool(ctx.glob("/dev/nvidia[0-9]*")) or detection.is_tegra(ctx)

    def driver_version(self, ctx: ProbeContext) -> str:
        """Version of the loaded kernel module; empty when unknown."""
        match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text(ctx, f"{DRIVER}/version"))
        return match[1] if match else ""

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Look at every GPU by files alone, those that the driver was told to leave alone apart."""
        return [card for card in super().survey(ctx) if not card.attributes["excluded"]]

    def card(self, ctx: ProbeContext, function: PciFunction) -> Card:
        """Look at one GPU by files: who has it, and what the driver tells of it."""
        card = Card(ctx, f"nvidia-{function.address}", function)
        card.attributes["pci_device"] = f"{function.device:04x}"
        detection.read_information(card)
        if function.driver != self.driver:
            card.attributes["driver"] = function.driver or "none"
            if function.driver == "nouveau":
                remedy = "install NVIDIA's driver and bind the GPU to it"
                card.blame("the driver 'nouveau' has it, which CUDA cannot use", remedy)
            self.bound(card)
        return card

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find the GPUs and MIG devices of a machine.

        Raises:
            FaultError: When the driver is there and does not answer: that is no machine without GPUs.
        """
        if not (self.functions(ctx) or self.present(ctx)):
            return None
        try:
            system = ctx.query("nvml/system", nvml.system)
        except QueryError as error:
            return self._without_nvml(ctx, error)
        found, lost = _ask_each(ctx, system["count"])
        known = {card.address or "": card for card in self.survey(ctx)}
        daemon = detection.mps_daemon(ctx)
        cards = [card for facts in found for card in detection.gpu_cards(ctx, facts, system, known, daemon)]
        for facts in found:
            known.pop(detection.pci_address(facts["bus_id"]) if facts["bus_id"] else "", None)
        cards += _lost_cards(ctx, lost, [card for card in known.values() if detection.is_ours(ctx, card)])
        cards.sort(key=lambda card: card.number or 0)
        links = detection.links(ctx, found)
        for card in cards:
            card.links = links.get(card.id, {})
        cards += [card for card in known.values() if "driver" in card.attributes]
        return self._detected(
            [card for card in cards if card.model not in NO_GPU],
            system["driver"] or self.driver_version(ctx),
            [str(remark) for facts in found for remark in faults.remarks(facts)],
            partial=bool(lost),
        )

    def _without_nvml(self, ctx: ProbeContext, error: QueryError) -> Detected | None:
        """List the GPUs from files where NVML is not there: without memory and health. Where it fails, fail."""
        why = faults.not_asked(error)
        if why is None:
            raise FaultError(*faults.of_driver(error)) from error
        cards = self.survey(ctx)
        foreign = [card for card in cards if "driver" in card.attributes]
        mine = [card for card in cards if detection.is_ours(ctx, card)]
        if mine and error.value == faults.DRIVER_NOT_LOADED:
            reason = "NVML says that the kernel module is not loaded, while device nodes and a bound driver are here"
            raise FaultError(reason, "reload it ('modprobe nvidia') or start the container with /dev/nvidiactl")
        for index, card in enumerate(mine):  # both count in the order of PCI addresses
            card.attributes["nvml_index"] = index
            self.check_nodes(card)
            if ctx.glob(f"{DRIVER}/capabilities/{detection.driver_name(card.nodes)}/mig/gi[0-9]*"):
                card.blame("MIG is on, and only NVML can name its MIG devices", "install libnvidia-ml.so.1")
        tegra = not cards and detection.is_tegra(ctx)
        notes = [str(gap) for gap in faults.gaps(why, len(mine), len(cards) - len(foreign) - len(mine), tegra=tegra)]
        version = self.driver_version(ctx)
        if self.functions(ctx) or notes or version:
            return self._detected([*mine, *foreign], version, notes, partial=bool(mine))
        if error.kind == "ModuleNotFoundError":
            raise FaultError(f"only NVML can tell whether GPUs are here, and {why.reason}", why.remedy) from error
        return None  # WSL without an NVIDIA GPU, stale device nodes

    def _detected(self, cards: list[Card], version: str, notes: list[str], *, partial: bool) -> Detected:
        """Number and name the cards. Of the catalog only names are taken: what no machine told stays unknown."""
        for index, card in enumerate(cards):
            card.index = index
            if card.model in NO_NAME:
                card.model = self.unknown_model(card)
        return inventory(cards, version, notes, partial=partial)

    def unknown_model(self, card: Card) -> str:
        """Name a GPU by its PCI id as NVML would: by the catalog, else by the machine's list (``AD102 [RTX ...]``)."""
        function = card.function
        if function is None:
            return "NVIDIA GPU"
        subsystem = (function.subsystem_vendor or 0) << 16 | (function.subsystem_device or 0)
        if name := self.catalog.pci_name(function.device, subsystem):
            return name
        name = re.sub(r"^.*\[(.+)\].*$", r"\1", pci_name(card.ctx, function.vendor, function.device))
        return f"NVIDIA {name or f'Device {function.device:04x}'}"

    # What a process is told.

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """One MIG device per worker; no shares of a GPU that admits one process, and none too small for MPS."""
        if fault := _never_together(devices):
            return str(fault)
        for device in devices if term.fraction else ():
            if fault := shares.exclusive(device):
                return str(fault)
            if "mps_pipe" in device.attributes and term.units < UNITS_PER_PERCENT:
                return "an MPS share is at least 1 percent of a GPU: ask for 0.01 or more"
        return super().validate(term, devices)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Show exactly these devices; an empty list hides all, where an inherited one would show all.

        All are named by UUID or all by number, since CUDA takes no mixture. Under MPS the daemon's own mask may have
        renumbered the GPUs, so there UUIDs are the only safe names.
        """
        if fault := _never_together(devices):
            raise FaultError(*fault)
        if not devices:
            return EnvEdits(set={masks.VARIABLE: masks.GPUS.nothing})
        by_id = ctx.mask == "id" or any(is_mig(device) or "mps_pipe" in device.attributes for device in devices)
        mask = masks.GPUS if by_id and _have_uuids(devices) else masks.NUMBERS
        values = {masks.VARIABLE: self.write_mask(devices, mask), masks.ORDER: masks.PCI_ORDER}
        share = ctx.shares.get(devices[0].id)
        if share is None or share.whole or len(devices) > 1:  # caps count for every GPU that a program sees
            return EnvEdits(set=values)
        return shares.edits(devices[0], share, ctx.environ, values)

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the mask as CUDA does, with a warning about what CUDA takes without a word."""
        seen = masks.read(environ, [device for device in devices if self.maskable(device)])
        if seen is None:
            return None
        if odd := masks.oddity(environ[masks.VARIABLE], len(seen)):
            warnings.warn(f"{odd.reason}. To mend it, {odd.remedy}.", stacklevel=1)
        return [device.id for device in seen]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """Nodes, pipes of MPS daemons, on WSL its libraries, and what NVIDIA's container runtime is told.

        The runtime brings the libraries of the host's driver, which only it can find; it reads NVIDIA_VISIBLE_DEVICES,
        CUDA does not. ``void`` keeps it from adding devices that the image asks for.
        """
        if not devices:
            return ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": "void"})
        own = tuple(dict.fromkeys(node for device in devices for node in device.nodes))
        pipes = sorted({str(device.attributes["mps_pipe"]) for device in devices if "mps_pipe" in device.attributes})
        mounts = [Mount(source=pipe, target=pipe, read_only=False) for pipe in pipes]
        if wsl := WSL_NODE in own:
            mounts.append(Mount(source=WSL_LIBRARIES, target=WSL_LIBRARIES))
        names = (masks.GPUS if _have_uuids(devices) else masks.NUMBERS).write(devices)
        return ContainerEdits(
            nodes=own if wsl else (*SHARED_NODES, *own),
            mounts=tuple(mounts),
            env={"NVIDIA_VISIBLE_DEVICES": names, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
        )

    # How it is now.

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Ask NVML how each device is by itself: those of which it does not know are left out."""
        found = {}
        for device in filter(self.maskable, devices):
            try:
                facts = ctx.query(f"nvml/stats/{device.id}", partial(nvml.stats, device.id, nvml_index(device)))
            except QueryError as error:
                if error.value is not None and error.value not in faults.DRIVER_ERRORS:
                    found[device.id] = Stats(**condition(faults.of_gpu(error)))
                continue
            found[device.id] = _stats(ctx, device, facts)
        return found

    def diagnose(self, ctx: ProbeContext) -> Sequence[Finding]:
        """Look at what detection leaves out: excluded GPUs, settings, the binding and the kernel log."""
        try:
            detected = self.detect(ctx)
        except (OSError, ValueError):  # the core reports what detection raised
            return [*_binding(ctx), *_kernel_log(ctx, ())]
        if detected is None:
            return []
        return [
            *self._excluded(ctx),
            *_settings(ctx, detected.devices),
            *self._beside_mps(ctx, detected.devices),
            *_binding(ctx),
            *_kernel_log(ctx, detected.devices),
        ]

    def _beside_mps(self, ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
        """Say what a daemon of MPS that listens does not hold: itself silent, or processes that are no clients."""
        served = [device for device in devices if "mps_pipe" in device.attributes]
        silent = [device for device in served if "mps_protocol" not in device.attributes]
        if silent:
            reason = f"the MPS daemon in {silent[0].attributes['mps_pipe']} does not answer {mps.TOOL}"
            remedy = "start one of your own ('anyaccel mps start'), or remove what an ended one has left"
            yield warn(f"{reason}: shares are by agreement", remedy)
        pipes = {str(device.attributes["mps_pipe"]) for device in served if device not in silent}
        answers = [try_query(ctx, f"mps/{pipe}", partial(mps.look, pipe)) for pipe in pipes]
        known = {pid for answer in answers if answer for pid in (*answer["servers"], *answer["clients"])}
        for device in served if pipes and all(answers) else ():
            seen = self.stats([device], ctx).get(device.id)
            for process in (seen.processes if seen else None) or ():
                if process.pid not in known:
                    reason = f"process {process.pid} uses {device.id} and is no client of the MPS daemon"
                    yield warn(f"{reason}: nothing holds it to a share", "start it with 'anyaccel run'")

    def _excluded(self, ctx: ProbeContext) -> Iterator[Finding]:
        for card in super().survey(ctx):
            if card.attributes["excluded"]:
                name = self.unknown_model(card) if card.model in NO_NAME else card.model
                reason = f"the driver was told to leave {name} {card.id} alone (GPU Excluded: Yes)"
                remedy = "remove it from the module option NVreg_ExcludedGpus (NVreg_GpuBlacklist before 470)"
                yield warn(reason, f"{remedy} and reload the driver")


def ray_type(name: str) -> str:
    """The type as Ray 2.60 derives it from a name with ``NVIDIA`` (``python/ray/_private/accelerators/nvidia_gpu.py``).

    Words in capitals up to and including the first one that holds a digit, cut at a hyphen; the whole name where
    nothing fits. Blanks become hyphens. What no tag may hold is dropped, which Ray does not do (``Orin (nvgpu)``).

    Args:
        name: Name as current drivers write it, without ``NVIDIA`` and ``Tesla``: Ray itself would call an old driver's
            ``GeForce GTX 1080 Ti`` a ``GTX-1080``, which is a smaller card.
    """
    match = re.match(r"(?:(?:Quadro|GRID)\s+)?((?:[A-Z]+\s+)*[A-Z0-9]*[0-9][A-Z0-9]*)", name)
    return tag(match[1] if match and len(match[1]) > 1 else name)


def _have_uuids(devices: Sequence[Device]) -> bool:
    return all(device.id.startswith(("GPU-", "MIG-")) for device in devices)


def _never_together(devices: Sequence[Device]) -> Fault | None:
    if len(devices) > 1 and any(map(is_mig, devices)):
        reason = "one process sees one MIG device, and MIG devices have no path to each other"
        return Fault(reason, "ask for 1 MIG device per worker, or for whole GPUs")
    return None


def _ask_each(ctx: ProbeContext, count: int) -> tuple[list[Any], dict[int, QueryError]]:
    """Ask about each GPU by itself, so that a bad one hides no other: answers, and errors by NVML's index."""
    found, lost = [], {}
    for index in range(count):
        try:
            found.append(ctx.query(f"nvml/device/{index}", partial(nvml.device, index)))
        except QueryError as error:
            lost[index] = error
    return found, lost


def _lost_cards(ctx: ProbeContext, lost: Mapping[int, QueryError], left: Sequence[Card]) -> Iterator[Card]:
    """The GPUs that NVML counts and cannot describe. Which ones they are, the files say where only one answer fits."""
    for position, (index, error) in enumerate(lost.items()):
        exact = len(left) == len(lost)  # NVML counts in the order of PCI addresses
        card = left[position] if exact else Card(ctx, f"nvidia-unidentified-{index}")
        card.number = card.attributes["nvml_index"] = index
        card.blame(*faults.of_gpu(error))
        yield card


def _stats(ctx: ProbeContext, device: Device, facts: Mapping[str, Any]) -> Stats:
    used, busy, milliwatts, processes = (facts[key] for key in ("memory_used", "utilization", "power", "processes"))
    if used is None and device.attributes.get("unified_memory"):
        total, available = detection.host_memory(ctx, "MemTotal"), detection.host_memory(ctx, "MemAvailable")
        used = total - available if total is not None and available is not None else None
    clock, memory_clock = (mhz and mhz * 1_000_000 for mhz in facts.get("clocks", (None, None)))
    corrected, uncorrected = facts.get("ecc_errors", (None, None))
    holders = None if processes is None else tuple(DeviceProcess(pid=pid, memory_bytes=size) for pid, size in processes)
    return Stats(
        memory_used_bytes=used,
        utilization=None if busy is None else busy / 100,
        temperature_celsius=facts["temperature"],
        power_watts=None if milliwatts is None else milliwatts / 1000,
        clock_hz=clock,
        memory_clock_hz=memory_clock,
        ecc_errors_corrected=corrected,
        ecc_errors_uncorrected=uncorrected,
        **condition(faults.judge(facts)),
        processes=holders,
    )


def _settings(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    """Settings that cost time or keep GPUs from being shared."""
    indexes = {nvml_index(device) for device in devices if "nvml_index" in device.attributes}
    found, _ = _ask_each(ctx, max(indexes, default=-1) + 1)
    if any(facts["index"] in indexes and facts.get("persistence") == 0 for facts in found):
        reason = "persistence is off: idle GPUs are initialized at each start, 1 to 3 s each, and forget their settings"
        yield warn(reason, "systemctl enable --now nvidia-persistenced")
    for fault in filter(None, (shares.exclusive(device) for device in devices if device.usable)):
        yield warn(*fault)


def _binding(ctx: ProbeContext) -> Iterator[Finding]:
    if "pynvml" in (try_query(ctx, "nvml/binding", nvml.binding) or ()):
        reason = "the package pynvml is installed, which is not NVIDIA's and claims the module of nvidia-ml-py"
        yield warn(reason, "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py")


def _kernel_log(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    for address, code, advice in faults.xids(kernel_log(ctx)):
        names = [address, *(device.id for device in devices if (device.pci_bus_id or "").startswith(address))]
        yield fail(f"the kernel log shows XID {code} for the GPU at {', '.join(names)}", advice)


plugin = Nvidia()
