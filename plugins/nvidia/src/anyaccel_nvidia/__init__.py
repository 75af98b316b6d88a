"""NVIDIA GPUs and MIG devices for anyaccel: from NVML, or from files if NVML is unavailable."""

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
    cap_frameworks,
    condition,
    fail,
    host_memory,
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
"""Names that NVML and the driver's files give to a GPU newer than the driver."""
NO_GPU = ("DGX Display", "NVIDIA DGX Display")
"""A display adapter without CUDA; NVIDIA's go-nvlib skips it, too."""


class Nvidia(Vendor):
    """NVIDIA's GPUs. A GPU with MIG on is replaced by its MIG devices.

    A device's id is the full UUID. Its index is its position among NVIDIA's devices; the number of its GPU in CUDA's
    PCI order is the attribute ``nvml_index``. A GPU bound to another kernel driver, named by the attribute ``driver``,
    is listed, and no mask can name it.
    """

    key, resource, kind, brand, driver = "nvidia", "GPU", "gpu", "NVIDIA", "nvidia"
    url = "https://pypi.org/project/anyaccel-nvidia/"
    runtimes = ("libcuda.so",)
    pci_vendors = (0x10DE,)
    pci_classes = (0x0300, 0x0302)  # VGA and 3D controllers: neither audio functions nor NVSwitch bridges
    catalog = Catalog(__file__)
    mask, variables = masks.GPUS, (masks.ORDER, *shares.VARIABLES)
    caps = shares.CAPS
    control_nodes = (*SHARED_NODES, WSL_NODE)
    nameless = "driver"
    registered = False  # files alone may not tell the number of the node

    # What a device is.

    def tags(self, device: Device) -> Sequence[str]:
        """Return Ray's type, the exact model, the memory class, and for a GeForce the model without ``GeForce``.

        A MIG device never carries the tag of its whole GPU, or a request for an ``A100`` would get a seventh of one:
        its first tag is ``A100-MIG-1g.5gb``.
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
            if family == "A100" and device.memory_bytes:
                # Ray has a type for each of the two sizes.
                found.insert(2, "A100-40G" if device.memory_bytes <= A100_40G_AT_MOST else "A100-80G")
        return tuple(dict.fromkeys(filter(None, found))) or (self.brand,)

    def fractional(self, device: Device) -> Fractional:
        """Return SHARED, by agreement or under an MPS daemon; NO if the compute mode admits one process."""
        whole = not self.maskable(device) or shares.exclusive(device)
        return Fractional.NO if whole else Fractional.SHARED

    # What is on the machine.

    def present(self, ctx: ProbeContext) -> bool:
        """Return True if an NVIDIA GPU may exist without a PCI function, as on WSL and Tegra. NVML decides there."""
        signs = (DRIVER, "/dev/nvidiactl", WSL_NODE)
        return any(map(ctx.exists, signs)) or bool(ctx.glob("/dev/nvidia[0-9]*")) or detection.is_tegra(ctx)

    def driver_version(self, ctx: ProbeContext) -> str:
        """Return the version of the loaded kernel module; empty if unknown."""
        match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text(ctx, f"{DRIVER}/version"))
        return match[1] if match else ""

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Read the files of every GPU, except GPUs excluded in the driver's settings."""
        return [card for card in super().survey(ctx) if not card.attributes["excluded"]]

    def card(self, ctx: ProbeContext, function: PciFunction) -> Card:
        """Read the files of a GPU: its bound driver, and the driver's information."""
        card = Card(ctx, f"nvidia-{function.address}", function)
        card.attributes["pci_device"] = f"{function.device:04x}"
        detection.read_information(card)
        if function.driver != self.driver:
            card.attributes["driver"] = function.driver or "none"
            # nouveau is the one foreign driver that a user gets by default, so the remedy is exact.
            if function.driver == "nouveau":
                remedy = "install NVIDIA's driver and bind the GPU to it"
                card.blame("the driver 'nouveau' has it, which CUDA cannot use", remedy)
            self.bound(card)
        return card

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Return the GPUs and MIG devices of a machine.

        Raises:
            FaultError: The driver is loaded and does not answer. An empty inventory would hide the failure.
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
            # Cards left in "known" after this loop are GPUs that NVML did not describe.
            known.pop(detection.pci_address(facts["bus_id"], known) if facts["bus_id"] else "", None)
        cards += _lost_cards(ctx, lost, [card for card in known.values() if detection.is_ours(ctx, card)])
        cards.sort(key=lambda card: card.number or 0)
        # Topology is a question about pairs, so it comes after every GPU is known.
        links = detection.links(ctx, found)
        for card in cards:
            card.links = links.get(card.id, {})
        # GPUs of other drivers come last: CUDA does not count them, so they must not shift its numbers.
        cards += [card for card in known.values() if "driver" in card.attributes]
        return self._detected(
            [card for card in cards if card.model not in NO_GPU],
            system["driver"] or self.driver_version(ctx),
            [str(remark) for facts in found for remark in faults.remarks(facts)],
            partial=bool(lost),
        )

    def _without_nvml(self, ctx: ProbeContext, error: QueryError) -> Detected | None:
        """List the GPUs from files if NVML is missing, without memory and health; raise an error if NVML fails."""
        why = faults.absence_fault(error)
        if why is None:
            raise FaultError(*faults.driver_fault(error)) from error
        cards = self.survey(ctx)
        foreign = [card for card in cards if "driver" in card.attributes]
        mine = [card for card in cards if detection.is_ours(ctx, card)]
        # A container without /dev/nvidiactl, or a module that was replaced on disk: both contradict what sysfs shows.
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
        # Any of the three proves that an NVIDIA driver or GPU is on this machine, even if no device can be listed.
        if self.functions(ctx) or notes or version:
            return self._detected([*mine, *foreign], version, notes, partial=bool(mine))
        if error.kind == "ModuleNotFoundError":
            raise FaultError(f"only NVML can tell whether GPUs are here, and {why.reason}", why.remedy) from error
        return None  # WSL without an NVIDIA GPU, stale device nodes

    def _detected(self, cards: list[Card], version: str, notes: list[str], *, partial: bool) -> Detected:
        """Number and name the cards. The catalog adds names only; facts not reported by the machine stay unknown."""
        for index, card in enumerate(cards):
            card.index = index
            if card.model in NO_NAME:
                card.model = self.unknown_model(card)
        return inventory(cards, version, notes, partial=partial)

    def unknown_model(self, card: Card) -> str:
        """Name a GPU by PCI id as NVML would: from the catalog, else from the machine's ``pci.ids``."""
        function = card.function
        if function is None:
            return "NVIDIA GPU"
        # NVIDIA sells several products with one device id; the subsystem of the board tells them apart.
        subsystem = (function.subsystem_vendor or 0) << 16 | (function.subsystem_device or 0)
        if name := self.catalog.pci_name(function.device, subsystem):
            return name
        name = pci_name(card.ctx, function.vendor, function.device)
        return f"NVIDIA {name or f'Device {function.device:04x}'}"

    # What a process is told.

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Refuse several MIG devices per worker, shares of a one-process GPU, and shares too small for MPS."""
        if fault := _never_together(devices):
            return str(fault)
        for device in devices if request.fraction else ():
            if fault := shares.exclusive(device):
                return str(fault)
            if "mps_pipe" in device.attributes and request.units < UNITS_PER_PERCENT:
                return "an MPS share is at least 1 percent of a GPU: ask for 0.01 or more"
        return super().validate(request, devices)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask to exactly these devices. An empty list hides every GPU; without a mask, a worker would see all.

        The mask names every device by UUID or every device by number: CUDA accepts no mixture. Under MPS, the daemon's
        own mask may have renumbered the GPUs, so only UUIDs are safe.
        """
        if fault := _never_together(devices):
            raise FaultError(*fault)
        if not devices:
            # Not unset: without the variable CUDA shows every GPU.
            return EnvEdits(set={masks.VARIABLE: masks.GPUS.nothing})
        # A MIG device has no number that CUDA accepts without its UUID.
        by_id = ctx.mask == "id" or any(is_mig(device) or "mps_pipe" in device.attributes for device in devices)
        mask = masks.GPUS if by_id and _have_uuids(devices) else masks.NUMBERS
        values = {masks.VARIABLE: self.write_mask(devices, mask), masks.ORDER: masks.PCI_ORDER}
        edits = cap_frameworks(self.caps, EnvEdits(set=values), devices, ctx)
        share = ctx.shares.get(devices[0].id) if len(devices) == 1 else None
        return edits if share is None or share.whole else shares.enforce(edits, devices[0], share, ctx.environ)

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the mask as CUDA does, with a warning about entries that CUDA drops silently."""
        seen = masks.read(environ, [device for device in devices if self.maskable(device)])
        if seen is None:
            return None
        if odd := masks.oddity(environ[masks.VARIABLE], len(seen)):
            warnings.warn(f"{odd.reason}. To mend it, {odd.remedy}.", stacklevel=1)
        return [device.id for device in seen]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return nodes, pipes of MPS daemons, WSL's libraries, and variables for NVIDIA's container runtime.

        The container runtime adds the libraries of the host's driver, which only the runtime can locate. It reads
        NVIDIA_VISIBLE_DEVICES; CUDA does not. ``void`` prevents the runtime from adding devices named by the image.
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
        """Ask NVML about each device separately; a device unknown to NVML has no entry."""
        found = {}
        for device in filter(self.maskable, devices):
            try:
                facts = ctx.query(f"nvml/stats/{device.id}", partial(nvml.stats, device.id, nvml_index(device)))
            except QueryError as error:
                # An error of the driver as a whole says nothing about this GPU; its health stays as detected.
                if error.value is not None and error.value not in faults.DRIVER_ERRORS:
                    found[device.id] = Stats(**condition(faults.gpu_fault(error)))
                continue
            found[device.id] = _stats(ctx, device, facts)
        return found

    def diagnose(self, ctx: ProbeContext) -> Sequence[Finding]:
        """Return findings beyond detection: excluded GPUs, settings, MPS, the Python binding and the kernel log."""
        try:
            detected = self.detect(ctx)
        except (OSError, ValueError):  # the core reports what detection raised
            return [*_binding(ctx), *_kernel_log(ctx, ())]
        if detected is None:
            return []
        return [
            *self._excluded(ctx),
            *_settings(ctx, detected.devices),
            *self._mps_findings(ctx, detected.devices),
            *_binding(ctx),
            *_kernel_log(ctx, detected.devices),
        ]

    def _mps_findings(self, ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
        """Yield findings on an MPS daemon: the daemon is silent, or a process on its GPU is not a client."""
        served = [device for device in devices if "mps_pipe" in device.attributes]
        silent = [device for device in served if "mps_protocol" not in device.attributes]
        if silent:
            reason = f"the MPS daemon in {silent[0].attributes['mps_pipe']} does not answer {mps.TOOL}"
            remedy = "start one of your own ('anyaccel mps start')"
            yield warn(f"{reason}: shares are by agreement", remedy)
        pipes = {str(device.attributes["mps_pipe"]) for device in served if device not in silent}
        # Asked again, since clients come and go.
        answers = [try_query(ctx, f"mps/{pipe}", partial(mps.query_daemon, pipe)) for pipe in pipes]
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
    """Return the type as Ray 2.60 derives it from a name (``python/ray/_private/accelerators/nvidia_gpu.py``).

    Words in capitals up to and including the first word with a digit, cut at a hyphen; the whole name if nothing
    matches. Blanks become hyphens. Characters forbidden in tags are dropped, which Ray does not do (``Orin (nvgpu)``).

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
    """Query each GPU separately, so that a bad GPU hides no other: answers, and errors by NVML's index."""
    found, lost = [], {}
    for index in range(count):
        try:
            found.append(ctx.query(f"nvml/device/{index}", partial(nvml.device, index)))
        except QueryError as error:
            lost[index] = error
    return found, lost


def _lost_cards(ctx: ProbeContext, lost: Mapping[int, QueryError], left: Sequence[Card]) -> Iterator[Card]:
    """Yield cards for the GPUs that NVML counts and cannot describe.

    The files identify them if the number of GPUs left over there is the same.
    """
    for position, (index, error) in enumerate(lost.items()):
        # NVML counts in the order of PCI addresses, as the files are read.
        exact = len(left) == len(lost)
        card = left[position] if exact else Card(ctx, f"nvidia-unidentified-{index}")
        card.number = card.attributes["nvml_index"] = index
        card.blame(*faults.gpu_fault(error))
        yield card


def _stats(ctx: ProbeContext, device: Device, facts: Mapping[str, Any]) -> Stats:
    used, busy, milliwatts, processes = (facts[key] for key in ("memory_used", "utilization", "power", "processes"))
    # Integrated GPUs have no memory of their own; the host's memory in use is the only answer there is.
    if used is None and device.attributes.get("unified_memory"):
        total, available = host_memory(ctx), host_memory(ctx, "MemAvailable")
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
    """Yield findings on settings that cost time or prevent sharing."""
    indexes = {nvml_index(device) for device in devices if "nvml_index" in device.attributes}
    # Detection asked the same questions, so a recording has the answers.
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
    for address, code, advice in faults.xids(kernel_log(ctx, faults.XID)):
        names = [address, *(device.id for device in devices if (device.pci_bus_id or "").startswith(address))]
        yield fail(f"the kernel log shows XID {code} for the GPU at {', '.join(names)}", advice)


plugin = Nvidia()
