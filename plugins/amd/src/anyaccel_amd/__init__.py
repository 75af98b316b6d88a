"""AMD GPUs for anyaccel: Instinct and Radeon, whole or in compute partitions, from the KFD topology and PCI."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import (
    Cap,
    Card,
    Catalog,
    Entry,
    Fault,
    Vendor,
    cap_frameworks,
    number,
    pci_name,
    physical_function,
    tag,
    text,
    warn,
)
from anyaccel.plugin import (
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Health,
    PciFunction,
    ProbeContext,
    QueryError,
    Stats,
    Term,
    VisiblePart,
    replace,
)

from anyaccel_amd import kfd, masks, sensors, smi, units

CUDA_VENDOR = 0x10DE
DISPLAY_VGA, DISPLAY_3D, DISPLAY_OTHER, PROCESSING = 0x0300, 0x0302, 0x0380, 0x1200
KFD_NODE = "/dev/kfd"
WSL_NODE, WSL_LIBRARY = "/dev/dxg", "/opt/rocm*/lib/librocdxg.so*"
CAPS = (
    Cap(
        "JAX",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "fraction",
        rival="XLA_CLIENT_MEM_FRACTION",  # the newer name: JAX refuses to start with both
        void=("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "cuda_async", "vmm"),
    ),
    Cap("CuPy", "CUPY_GPU_MEMORY_LIMIT", "bytes"),
)
"""Frameworks whose ROCm builds read the same variables as their CUDA builds."""
INEXACT = r"/| chip$|\bSeries\b|^(AMD )?(Radeon|FirePro)?( RX| Pro)?( Graphics)?$|^AMD GPU\b"
"""Names for several products, such as ``Radeon RX 470/480`` and ``AMD Radeon Graphics``."""
DEAD = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)
"""The driver's errors for a GPU in a hang or a reset, or off the bus."""


class AMD(Vendor):
    """GPUs, each a card or a partition of a card.

    A device's index is its position among the readable KFD nodes, which is the number in ROCm's runtime. A GPU missing
    in KFD is listed behind the others: it has no number there, and no mask can name it.
    """

    key, resource, kind, brand, driver = "amd", "GPU", "gpu", "AMD", "amdgpu"
    url = "https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html"
    runtimes = ("libamdhip64.so", "libhsa-runtime64.so")
    pci_vendors, pci_classes = (0x1002,), (DISPLAY_VGA, DISPLAY_3D, DISPLAY_OTHER, PROCESSING)
    catalog = Catalog(__file__)
    mask, cleared = masks.HIP, (masks.CUDA,)
    variables = (masks.CUDA, masks.ROCR, masks.OPENCL, units.MASK)
    caps = CAPS
    control_nodes = (KFD_NODE,)
    # Holders of a GPU are isolated by agreement, or by masks of its compute units if wanted. Partitions are devices.
    sharing = Fractional.SHARED
    number_remedy = "look for kfd and amdgpu in 'dmesg': ROCm's runtime numbers only GPUs that KFD lists"
    node_missing = "load the driver with 'modprobe amdgpu'"
    node_closed = (
        "add the user to the group that owns it ('sudo usermod -aG render $USER', then log in again; in a container"
        " '--group-add' with the host's number)"
    )

    # What the devices are.

    def fractional(self, device: Device) -> Fractional:
        """Return PARTITIONED where shares are sets of compute units."""
        return Fractional.PARTITIONED if device.slots > 1 else super().fractional(device)

    def entry(self, device: Device) -> Entry | None:
        """Return the product by PCI device id and revision; for a virtual function, the product of the card."""
        return self._product(device.attributes)[0]

    def tags(self, device: Device) -> Sequence[str]:
        """Return the tags of the product, the gfx name (the target of binaries) and the profile of a partition.

        A product without an entry is named by the public lists, the driver or amdsmi if any has an unambiguous name,
        else by its chip; and by ``AMD-<device id>``, which only a user who has seen the device can ask for.
        """
        entry, device_id, name = self._product(device.attributes)
        names = [*entry.tags, *entry.facts.get("also", ())] if entry else []
        if not entry and device_id:
            chip = device.attributes.get("chip") or name.removesuffix(" chip") * name.endswith(" chip")
            exact = next(filter(_is_exact, (name, device.model)), str(chip))
            names = [*([tag(f"AMD {exact.removeprefix('AMD ')}")] if exact else []), f"AMD-{device_id:04x}"]
        names.append(str(device.attributes.get("gfx", "")))
        if device.parent is not None:
            modes = (device.attributes.get(f"{kind}_mode") for kind in ("compute", "memory"))
            names.append("_".join(str(mode) for mode in modes if mode))
        return tuple(dict.fromkeys(filter(None, names))) or ("AMD-GPU",)

    def _product(self, attributes: Mapping[str, object]) -> tuple[Entry | None, int, str]:
        """Return the product by a device's attributes, the PCI device id, and the name in the public lists."""
        device_id, revision = (int(str(attributes.get(name) or "0"), 16) for name in ("device_id", "revision"))
        known = revision if attributes.get("revision") else None
        name = self.catalog.pci_name(device_id, known)
        return self.catalog.by_pci(device_id, revision=known) or self.catalog.by_name(name), device_id, name

    def _name(self, card: Card) -> str:
        """Return the name of a card; empty if unknown to the catalog, the public lists and the card's own files."""
        entry, device_id, name = self._product(card.attributes)
        if entry or not device_id:
            return entry.model if entry else name
        listed = pci_name(card.ctx, self.pci_vendors[0], device_id)
        own = (name, text(card.ctx, f"{card.folders[0]}/product_name"), f"{self.brand} {listed}" if listed else "")
        return next(filter(_is_exact, own), next(filter(None, own), ""))

    def _chip(self, card: Card) -> str | None:
        """Return the name of a card's chip if no name of a product is known, from the public lists or ``pci.ids``."""
        entry, device_id, name = self._product(card.attributes)
        if entry or not device_id or _is_exact(card.model):
            return None
        listed = name.removesuffix(" chip") if name.endswith(" chip") else ""
        return listed or pci_name(card.ctx, self.pci_vendors[0], device_id, chip=True) or None

    # What is on the machine.

    def notes(self, ctx: ProbeContext) -> Iterator[str]:
        """Yield notes on closed GPUs, GPUs of other drivers, and WSL."""
        functions = self.functions(ctx)
        if denied := kfd.count_denied(ctx):
            yield (
                f"{denied} GPU nodes of the host are closed to this container. The others are numbered from 0,"
                " as ROCm does."
            )
        foreign: dict[str, list[str]] = {}
        for function in functions:
            if function.driver not in (None, self.driver):
                foreign.setdefault(str(function.driver), []).append(function.address)
        for driver, addresses in foreign.items():
            yield f"The driver {driver} has the GPUs at {', '.join(addresses)}: they are in use otherwise and left out."
        if not functions and ctx.exists(WSL_NODE) and ctx.glob(WSL_LIBRARY):
            yield "ROCm runs here on WSL, which does not tell which GPUs it uses: none can be given out."

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Read the GPUs of KFD, in KFD's order, then GPUs that only PCI shows."""
        functions = {function.address: function for function in self.functions(ctx)}
        nodes = kfd.read(ctx, functions)
        cards = [self._kfd_card(ctx, node, functions.get(node.card)) for node in nodes]
        known = {node.card for node in nodes}
        # A GPU bound to another driver, and a virtual function, is for virtual machines.
        rest = [
            function
            for address, function in functions.items()
            if address not in known and function.driver in (None, self.driver) and not physical_function(ctx, address)
        ]
        # If KFD hides a node or fails to read one, it is unknown which PCI function belongs to that node.
        if rest and not any(node.error for node in nodes) and not kfd.count_denied(ctx):
            cards += [self.card(ctx, function) for function in rest]
        return cards

    def read_card(self, card: Card) -> None:
        """Blame a GPU that has the driver and is missing in KFD: ROCm gives it no number."""
        card.blame(
            "the driver does not offer it for computing: ROCm does not support it, or its start or reset failed",
            "see 'dmesg | grep -e kfd -e amdgpu'",
        )

    def card(self, ctx: ProbeContext, function: PciFunction) -> Card:
        """Read a GPU missing in KFD, from PCI."""
        card = super().card(ctx, function)
        card.attributes = {**_identity(card), "numbered": False}
        return card

    def _kfd_card(self, ctx: ProbeContext, node: kfd.Node, function: PciFunction | None) -> Card:
        """Read a GPU of KFD."""
        if node.error:
            # KFD shows nothing but the directory. The card is kept in the list, or later GPUs would get its number.
            card = Card(ctx, f"amd-kfd-node-{node.number}")
            card.attributes = {"kfd_node": node.number, "kfd_gpu_id": node.gpu_id}
            card.blame(node.error, "see 'dmesg | grep amdgpu', then reset the GPU or restart the machine", partial=True)
            return card
        properties, device = node.properties, node.properties.get("device_id", 0)
        if function is None:  # a container may hide PCI
            function = PciFunction(address=node.card, vendor=self.pci_vendors[0], device=device, class_code=PROCESSING)
        card = Card(ctx, f"amd-{node.card}/{node.partition}" if node.divided else f"amd-{node.card}", function)
        card.parent = f"amd-{node.card}" if node.divided else None
        identity, folder = _identity(card), card.folders[0]
        entry = self._product(identity)[0]
        card.attributes = {
            **identity,
            "partition": node.partition if node.divided else None,
            "compute_mode": text(ctx, f"{folder}/current_compute_partition").lower() or None,
            "memory_mode": text(ctx, f"{folder}/current_memory_partition").lower() or None,
            "gfx": node.gfx or (entry.attributes.get("gfx") if entry else None),
            "codename": text(ctx, f"{kfd.NODES}/{node.number}/name") or None,
            "compute_units": properties.get("simd_count", 0) // (properties.get("simd_per_cu") or 1) or None,
            "unique_id": f"{properties['unique_id']:016x}" if properties.get("unique_id") else None,
            "hive_id": f"{properties['hive_id']:016x}" if properties.get("hive_id") else None,
            "kfd_node": node.number,
            "kfd_gpu_id": node.gpu_id,
            "render_minor": properties.get("drm_render_minor") or None,
            "virtual_function": (entry is not None and device in entry.facts.get("virtual", ())) or None,
            "integrated": node.gfx in self.catalog.data["integrated_gfx"] or None,
        }
        card.memory_bytes = kfd.memory_bytes(ctx, node)
        # Some drivers list no banks; sysfs counts the memory of the card as a whole.
        if card.memory_bytes is None and not node.divided:
            card.memory_bytes = number(ctx, f"{folder}/mem_info_vram_total") or None
        # The carve-out is a small part of an integrated GPU's memory; the rest (GTT) is memory of the host.
        if card.memory_bytes and card.attributes["integrated"]:
            card.memory_bytes += number(ctx, f"{folder}/mem_info_gtt_total") or 0
        card.slots = units.slots(card.attributes["compute_units"], ctx.environ)
        # The minor is read, never computed: cards reserve minors for their partitions.
        minor = card.attributes["render_minor"]
        card.nodes = (KFD_NODE, f"/dev/dri/renderD{minor}") if minor else (KFD_NODE,)
        self.check_nodes(card)
        card.sound = True
        return card

    def check_nodes(self, card: Card) -> None:
        """Blame a GPU that does not answer the driver, or whose nodes this user cannot open."""
        if len(card.nodes) == 1:
            card.blame("the driver gives it no render node", "see 'dmesg | grep amdgpu' and reload the driver")
        try:
            # Reading this file asks the hardware; most other files answer from the driver's memory.
            card.ctx.read(f"{card.folders[0]}/mem_info_vram_used")
        except OSError as error:
            if error.errno in DEAD:
                reset = "see 'dmesg | grep amdgpu', then reset it with 'sudo amd-smi reset -G' or restart the machine"
                card.blame(f"the GPU at {card.address} does not answer the driver ({error.strerror})", reset)
        for node in card.nodes:
            card.check_node(node, missing=self.node_missing, closed=self.node_closed)

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Name the devices: from catalog, sysfs and ``pci.ids``, else from amdsmi, which is slow."""
        # Beside an NVIDIA card, CUDA_VISIBLE_DEVICES belongs to that card's plug-in.
        cuda = bool(ctx.pci(CUDA_VENDOR, (DISPLAY_VGA, DISPLAY_3D)))
        for card in cards:
            card.model = self._name(card) if card.function else "AMD GPU"
            card.attributes["beside_cuda"] = (cuda and "render_minor" in card.attributes) or None
            card.attributes["chip"] = self._chip(card)
        # amdsmi takes seconds, so it is asked only for GPUs without any name that a request could use.
        entries = {card.id for card in cards if self._product(card.attributes)[0]}
        known = [card for card in cards if card.id in entries or card.attributes["chip"] or _is_exact(card.model)]
        unnamed = [card for card in cards if card.function and card not in known]
        if not unnamed:
            return
        names = {}
        try:
            names = {entry["bdf"]: entry["market_name"] for entry in smi.ask(ctx, "names")}
        except QueryError as error:
            if error.kind not in smi.NOT_INSTALLED:
                yield f"amdsmi could not name the devices that are not in our table: {error}"
        for card in unnamed:
            told, fallback = names.get(card.address) or "", f"AMD GPU {card.attributes['device_id'] or ''}".strip()
            card.model = told if _is_exact(told) else card.model or told or fallback

    def identify(self, card: Card) -> None:
        """Do nothing: names are set, and memory of another edition, or of a whole card, would be wrong."""

    def arrange(self, cards: list[Card]) -> None:
        """Mark integrated GPUs beside a card as secondary: a request gets one only by name."""
        super().arrange(cards)
        if any(card.attributes.get("numbered", True) and not card.attributes.get("integrated") for card in cards):
            for card in cards:
                card.attributes["secondary"] = card.attributes.get("integrated")

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Add the XGMI links."""
        nodes = ((card.attributes.get("kfd_node"), card) for card in cards if card.function)
        gpus = {node: card for node, card in nodes if isinstance(node, int)}
        for node, card in gpus.items():
            links, hive = kfd.links(ctx, node), card.attributes["hive_id"]
            if not links and hive:
                # Virtual machines show only the hive: connected, at an unknown distance.
                links = {other: 1 for other, gpu in gpus.items() if gpu.attributes["hive_id"] == hive}
            card.links = {gpus[other].id: links[other] for other in sorted(links) if other in gpus and other != node}

    # What a process is told.

    def maskable(self, device: Device) -> bool:
        """Return True if ROCm's runtime numbers a device."""
        return device.attributes.get("numbered") is not False

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Refuse integrated GPUs beside a card, too, unless requested by name: programs crash on them."""
        for device in devices:
            names = self.tags(device) if device.attributes.get("secondary") else ()
            if names and not {name.lower() for name in names} & {name.lower() for name in request.names}:
                return (
                    f"{device.id} is the GPU inside the CPU, and is given out beside a card only by its name;"
                    f" ask for {names[0]}"
                )
        return super().validate(request, devices)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask for HIP and OpenCL, and unset the mask of the layer below, which would count twice.

        Frameworks are limited to a share of the only visible GPU. The kernel's name for a GPU's memory is passed for
        every share; an integrated GPU has none, since most of its memory is the host's, which the kernel counts
        elsewhere.
        """
        edits = masks.edits(self.write_mask(devices), devices, ctx)
        if any(not share.whole for share in ctx.shares.values()):
            cards = [device for device in devices if device.pci_bus_id and not device.attributes.get("integrated")]
            regions = {device.id: f"drm/{device.pci_bus_id}/vram" for device in cards}
            edits = replace(edits, memory_regions=regions)
        if mask := units.mask(devices, ctx.shares, relative=bool(edits.set.get(masks.ROCR))):
            held = all(share.whole or share.slots for share in ctx.shares.values())
            edits = replace(edits, set={**edits.set, units.MASK: mask}, compute_by=units.HELD if held else "")
        return cap_frameworks(self.caps, edits, devices, ctx)

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
        """Return the devices, or slots of devices, visible to a HIP program."""
        numbered = [device for device in devices if self.maskable(device)]
        found = masks.visible(environ, numbered)
        if found is None and units.MASK in environ and any(device.slots > 1 for device in numbered):
            found = [device.id for device in numbered]
        return None if found is None else units.visible(found, environ, numbered)

    # How it is now.

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Observe the devices: health, memory in use, utilization, temperature, power and processes."""
        seen = [device for device in devices if device.attributes.get("render_minor")]
        library = sensors.ask_library(ctx, seen)
        users = kfd.processes(ctx)
        cards = {card.id: card for card in self.survey(ctx)}
        found = {}
        for device in seen:
            facts = library.get(str(device.attributes["card"]), {})
            health, fault = self.judge(device, cards.get(device.id))
            if health is Health.HEALTHY and (worn := sensors.worn_out(facts)):
                health, fault = Health.UNHEALTHY, worn
            # KFD lists processes by this id, which changes with the partitioning.
            gpu = device.attributes.get("kfd_gpu_id")
            found[device.id] = Stats(
                **sensors.measure(ctx, device, facts),
                health=health,
                health_reason=fault.reason,
                health_remedy=fault.remedy,
                processes=users.get(gpu, ()) if users is not None and isinstance(gpu, int) else None,
            )
        return found

    def judge(self, device: Device, card: Card | None) -> tuple[Health, Fault]:
        """Return the current health. A GPU missing in KFD did not come back from a reset."""
        if card is None or "kfd_node" not in card.attributes:
            reason = f"KFD node {device.attributes.get('kfd_node')} is gone, as after a failed reset"
            return Health.UNHEALTHY, Fault(reason, "see 'dmesg | grep amdgpu' and detect again")
        return super().judge(device, card)

    # What is wrong here.

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on memory errors, lost partitions, variables and the amdsmi library."""
        devices = [device for device in detected.devices if self.maskable(device)]
        for card, count in sensors.uncorrectable(ctx, devices).items():
            yield warn(
                f"{card} has had {count} uncorrectable memory errors since the driver was loaded",
                "reset the GPU when it is idle ('sudo amd-smi reset -G'); have it replaced when the number rises",
            )
        # A kernel has 64 DRM nodes: a machine with 64 partitions and a display chip loses a partition
        # (ROCm/amdsmi#99).
        # Cards are divided alike, so the largest count is the complete one.
        partitions = Counter(device.parent for device in devices if device.parent is not None)
        for parent, count in partitions.items():
            if count < max(partitions.values()):
                yield warn(
                    f"{count} partitions of {parent} are to be seen where other cards have {max(partitions.values())}",
                    "give the container all of them, or unload the driver of the display chip (often 'ast')",
                )
        yield from masks.conflicts(ctx.environ, devices)
        yield from smi.faults(ctx)


def _is_exact(name: str) -> bool:
    """Return True if a name stands for a single product: not for several, a series, or whatever has graphics."""
    return bool(name) and not re.search(INEXACT, name)


def _identity(card: Card) -> dict[str, str | int | float | bool | None]:
    """Return the attributes that identify a card, with or without KFD; unknown ones are None."""
    revision, device = number(card.ctx, f"{card.folders[0]}/revision"), card.function.device if card.function else 0
    return {
        "card": card.address,
        "device_id": f"0x{device:04x}" if device else None,
        "revision": None if revision is None else f"0x{revision:02x}",
    }


plugin = AMD()
