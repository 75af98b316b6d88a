"""Intel GPUs for anyaccel: Data Center GPU Max and Flex, Arc, Arc Pro, and GPUs inside a processor.

Detection reads sysfs: no library, no privileges, even with a broken runtime. File by file it follows the parsers of
intel/intel-resource-drivers-for-kubernetes (``pkg/gpu/discovery``) and intel/intel-device-plugins-for-kubernetes
(``cmd/gpu_plugin``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import (
    PCI_DEVICES,
    Card,
    Catalog,
    Entry,
    Fault,
    FaultError,
    Mask,
    Measures,
    Vendor,
    fail,
    kernel_log,
    number,
    pci_name,
    physical_function,
    text,
    warn,
)
from anyaccel.plugin import (
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Health,
    Mount,
    PciFunction,
    ProbeContext,
    Term,
    replace,
)

from anyaccel_intel import level_zero, observation, runtime, selector, xe_link
from anyaccel_intel.observation import DRIVERS

RIVALS = (0x10DE, 0x1002)
"""PCI vendors of discrete GPUs. Beside such a card an integrated GPU is not a compute device."""
PASSED_ON = ("vfio-pci", "xe-vfio-pci")
INTEGRATED = "ANYACCEL_INTEL_INTEGRATED"
BY_PATH = "/dev/dri/by-path"
DEAD_VARIABLE = "XPU_VISIBLE_DEVICES"
HOT_CELSIUS = 100.0  # above this, Intel's Kubernetes device plug-in takes a GPU out of service
SMALL_BAR = 256 << 20
GIB = 1 << 30
ADDRESS = r"([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
WEDGED = f"declared device {ADDRESS} as wedged"
STARTED = f"Initialized (?:xe|i915) .*for {ADDRESS} "


class Intel(Vendor):
    """GPUs bound to the drivers i915 and xe.

    A device is a device of Level Zero: a card, or a tile of a Max card unless the environment asks for cards. Its index
    is its number there. Integrated GPUs are left out beside a discrete card of any vendor, as in PyTorch.
    """

    key, resource, kind, brand, driver = "intel", "GPU", "gpu", "Intel", "xe or i915"
    modules = DRIVERS
    url = "https://pypi.org/project/anyaccel-intel/"
    runtimes = ("libze_intel_gpu.so",)
    pci_vendors = (0x8086,)
    pci_classes = (0x0300, 0x0301, 0x0302, 0x0380)  # VGA: Arc and integrated; display: Flex and Max; 3D
    catalog = Catalog(__file__)
    mask = Mask(level_zero.MASK, nothing=level_zero.NOTHING)  # the grammar is not the kit's: see level_zero
    variables = (level_zero.HIERARCHY, level_zero.PCI_ORDER, selector.SELECTOR)
    held = "every"  # either node opens the GPU
    sharing = Fractional.SHARED  # several processes may use one GPU, and nothing limits the memory that each takes

    # Which product it is.

    def entry(self, device: Device) -> Entry | None:
        """Return the product, by PCI id first."""
        return self.catalog.by_pci(_device_id(device)) or self.catalog.by_name(device.model)

    def tags(self, device: Device) -> Sequence[str]:
        """Return the product's tags, its size if sold in several, and ``tile`` or ``iGPU``."""
        entry = self.entry(device)
        family = "Intel-iGPU" if device.attributes.get("integrated") is True else "Intel-GPU"
        if entry is None:  # the bare name; without a name, the PCI id
            # Tags of unknown products: "Intel(R) Arc(TM) C770 Graphics" becomes Intel-GPU-Arc-C770.
            bare = re.sub(r"\((R|TM)\)|\[0x[0-9a-f]+\]|Intel|Graphics|Data Center GPU", " ", device.model)
            words = re.findall(r"[A-Za-z0-9._-]+", bare) or [str(device.attributes.get("device_id", "unknown"))]
            found = ["-".join((family, *words))]
        else:
            found = list(entry.tags)
            if device.memory_bytes and "sizes" in entry.facts:
                memory = device.memory_bytes
                # The driver reports a little less than the size on the box.
                found.append(f"{found[0]}-{min(entry.facts['sizes'], key=lambda gib: abs(gib * GIB - memory))}GB")
            if device.attributes.get("unit") == "tile":
                found.append(f"{found[0]}-tile")
        return tuple(dict.fromkeys([*found, *(["Intel-iGPU"] if family == "Intel-iGPU" else [])]))

    def unknown_model(self, card: Card) -> str:
        """Return the name in the machine's ``pci.ids``, else the driver's generic name."""
        device = card.function.device if card.function else 0
        return pci_name(card.ctx, self.pci_vendors[0], device) or f"Intel(R) Graphics [0x{device:04x}]"

    def _ids(self, fact: str) -> Sequence[int]:
        """Return the PCI ids with a property, beside the products."""
        ids: Sequence[int] = self.catalog.data["ids"][fact]
        return ids

    # What is on the machine.

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Read every GPU, divide cards into tiles as the runtime does, and sort by the runtime's order."""
        listed, aside, _ = self._classify(ctx)
        whole, unserved = [self.card(ctx, function) for function in listed], self._ids("unserved") if aside else ()
        # The kernel log is slow to read, and says nothing of GPUs without the driver.
        dead = _wedged(ctx) if any(function.driver in DRIVERS for function in listed) else frozenset[str]()
        for card in whole:
            if card.address in dead:
                driver = card.attributes["driver"]
                cure = f"unbind and bind it again below /sys/bus/pci/drivers/{driver}, or reboot"
                card.blame("the kernel has declared it wedged", cure)
                card.attributes["level_zero"] = False
            ahead = [each for each in aside if each.address < (card.address or "") and each.device not in unserved]
            card.attributes["unlisted_ahead"] = len(ahead) or None
        divided = [card.model for card in whole if card.attributes.get("tiles")]
        # With tiles in the mask, the environment gives us parts of cards, whatever the hierarchy counts.
        by_card = level_zero.composite(ctx.environ, divided) and "." not in ctx.environ.get(level_zero.MASK, "")
        pci_order = level_zero.pci_ordered(ctx.environ)

        def rank(card: Card) -> tuple[bool, bool, str]:
            # GPUs unknown to Level Zero come last, since they take no number.
            last = card.attributes["integrated"] is True and not pci_order
            # False sorts first: usable GPUs, then the rest.
            return card.attributes.get("level_zero") is False, last, card.address or ""

        return [unit for card in sorted(whole, key=rank) for unit in ([card] if by_card else _tiles(card))]

    def notes(self, ctx: ProbeContext) -> Iterator[str]:
        """Yield notes on GPUs that are left out."""
        for function in self.functions(ctx):
            if function.driver in PASSED_ON:
                yield f"GPU {function.address} is handed to a virtual machine ({function.driver}), not to us"
        _, aside, discrete = self._classify(ctx)
        if aside:
            yield (
                f"integrated GPU {', '.join(function.address for function in aside)} is left out beside the discrete"
                f" card {discrete}; set {INTEGRATED}=1 to list it"
            )

    def _classify(self, ctx: ProbeContext) -> tuple[list[PciFunction], list[PciFunction], str]:
        """Return the functions to report, the integrated GPUs to leave out, and the discrete card beside them."""
        own = [
            function
            for function in self.functions(ctx)
            if function.driver not in PASSED_ON
            # virtual functions of an integrated GPU add no GPU; unbound ones are for virtual machines
            and not (
                physical_function(ctx, function.address)
                and (self._integrated(ctx, function) or function.driver is None)
            )
        ]
        integrated = [function for function in own if self._integrated(ctx, function)]
        if not integrated or ctx.environ.get(INTEGRATED, "").lower() in ("1", "true", "yes"):
            return own, [], ""
        discrete = [function for function in own if function not in integrated]
        rivals = [function for maker in RIVALS for function in ctx.pci(maker, self.pci_classes)]
        if not (discrete or rivals):
            return own, [], ""
        return discrete, integrated, (discrete + rivals)[0].address

    def _integrated(self, ctx: ProbeContext, function: PciFunction) -> bool:
        """Return True if a GPU is part of the processor: by its id, else by the reserved PCI address.

        The address alone is misleading inside a virtual machine, where a card may have any address
        (intel/ipex-llm#12994).
        """
        entry = self.catalog.by_pci(function.device)
        if entry is not None:
            return entry.attributes["integrated"] is True
        if self.catalog.pci_name(function.device):
            return function.device not in self._ids("discrete")
        if not function.address.startswith("0000:00:02."):
            return False
        return not re.search(r"^flags\s*:.*\bhypervisor\b", ctx.read("/proc/cpuinfo") or "", re.MULTILINE)

    def card(self, ctx: ProbeContext, function: PciFunction) -> Card:
        """Read a whole GPU: memory, tiles, device nodes, and faults.

        A GPU that the runtime does not open has no number: its attribute ``level_zero`` is False.
        """
        entry, device, bound = self.catalog.by_pci(function.device), function.device, function.driver in DRIVERS
        integrated, physical = self._integrated(ctx, function), physical_function(ctx, function.address)
        card = Card(ctx, f"{self.key}-{function.address}", function, entry=entry)
        card.model = entry.model if entry else self.catalog.pci_name(device)
        card.parent = f"{self.key}-{physical}" if physical else None
        tiles: int = entry.attributes.get("tiles", 1) if entry else 1
        if not bound:
            fact = f"driver {function.driver!r} is bound to it" if function.driver else "no driver is bound to it"
            card.blame(fact, "load xe or i915 (Battlemage cards need xe and Linux 6.12 or newer)")
        elif device in self._ids("unserved"):
            card.blame("no release of Level Zero serves its generation", "give jobs another GPU; OpenCL may serve it")
        else:
            try:
                card.memory_bytes = None if integrated else _memory(ctx, function.address, physical)
            except (OSError, ValueError) as error:
                fact = f"its files cannot be read: {error}"
                card.blame(fact, "check the permissions and the kernel log", partial=True)
            else:
                # xe shows tiles as directories, i915 as GTs; neither in old drivers, where the product decides.
                tiles = 1 if integrated else len(card.glob("tile[0-9]*") or card.glob("drm/card*/gt/gt[0-9]*")) or tiles
                self.check_nodes(card)
        # A virtual function has the memory that the host gave it, never the product's.
        if entry and entry.memory_bytes and not (card.memory_bytes or card.partial or physical):
            card.memory_bytes = None if "sizes" in entry.facts else entry.memory_bytes * tiles
        card.attributes = {
            "device_id": f"0x{device:04x}",
            "integrated": integrated,
            "unit": "card",
            "driver": function.driver or "",
            "level_zero": False if card.fault and not card.partial else None,
            "tiles": tiles if tiles > 1 else None,
        }
        split = None if integrated or physical else number(ctx, f"{PCI_DEVICES}/{function.address}/sriov_numvfs")
        if split:
            cure = f"write 0 to {PCI_DEVICES}/{function.address}/sriov_numvfs to use it whole"
            card.blame(f"it is divided into {split} virtual functions, which are given out in its place", cure)
        # Files prove a bound driver and permission. Whether the runtime supports the GPU follows from its id.
        card.sound = bool(card.model) and device not in self._ids("uncertain")
        return card

    def check_nodes(self, card: Card) -> None:
        """List the device nodes, and blame a card that this user or the runtime cannot open."""
        card.nodes = card.drm_nodes()
        render = next((node for node in card.nodes if "renderD" in node), None)
        if render is None:
            card.blame("its driver has made no render node", f"{self.log_hint} for its errors")
            return
        closed = f"join the group that owns it (stat -c %g {render})"
        card.check_node(render, missing="run 'udevadm trigger'", closed=closed)
        # Without any link the folder was not mounted, which a finding reports for the machine as a whole.
        links = card.ctx.glob(f"{BY_PATH}/pci-*-render")
        if links and f"{BY_PATH}/pci-{card.address}-render" not in links:
            reason = f"{BY_PATH} has no link to it, and the runtime looks there"
            card.blame(reason, f"mount the whole folder {BY_PATH}")

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterator[str]:
        """Ask the runtime for names and memory missing in files, and xpu-smi for Xe Links."""
        yield from runtime.complete(ctx, cards, self.catalog)
        yield from xe_link.connect(ctx, cards)

    def identify(self, card: Card) -> None:
        """Name the remaining cards. Memory identifies no product here."""
        card.model = card.model or self.unknown_model(card)

    def arrange(self, cards: list[Card]) -> None:
        """Number the cards, which are in the runtime's order. By PCI address, GPUs that are left out count, too."""
        ahead = max((int(card.attributes.get("unlisted_ahead") or 0) for card in cards), default=0)
        first = ahead if cards and level_zero.pci_ordered(cards[0].ctx.environ) else 0
        for index, card in enumerate(cards, first):
            card.index = index

    # What a process is told.

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask, the variables that fix its numbers, and a selector if the inherited one hides devices.

        The kernel's driver ``xe`` counts the memory of each tile as a region. A card with several tiles has no single
        region, and an integrated GPU has none.
        """
        edits = level_zero.edits(devices, ctx)
        if all(share.whole for share in ctx.shares.values()):
            return edits
        regions = {
            device.id: f"drm/{device.pci_bus_id}/vram{device.attributes.get('tile', 0)}"
            for device in devices
            if device.pci_bus_id and not device.attributes.get("integrated")
            if device.attributes.get("unit") == "tile" or not device.attributes.get("tiles")
        }
        return replace(edits, memory_regions=regions)

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Return the devices left by masks and selectors, as the driver and the SYCL runtime read them."""
        return level_zero.visible(environ, devices)

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Refuse sets that PyTorch would show in part."""
        # One kind alone is as it should be.
        if len({device.attributes.get("integrated") is True for device in devices}) < 2:  # noqa: PLR2004 - both kinds
            return None
        return (
            "an integrated GPU is never given together with a discrete card, since PyTorch then shows the discrete"
            " cards alone; ask for one kind by its tag, for example Intel-iGPU"
        )

    def mounts(self, devices: Sequence[Device]) -> Iterable[Mount]:
        """Return the whole folder of links by PCI address, through which the driver finds devices.

        Single links have broken PyTorch (intel/intel-device-plugins-for-kubernetes#2158).
        """
        return (Mount(source=BY_PATH, target=BY_PATH),) if any(device.nodes for device in devices) else ()

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return the mask inside a container, where numbers start at 0 with the container's own cards."""
        return level_zero.mask(devices, devices)

    # How it is now.

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures]:
        """Measure memory, load, temperature and power by sysfs."""
        return observation.measure(ctx, devices)

    def power_group(self, device: Device) -> object:
        """Return the card of a tile: its tiles share a power sensor."""
        return device.parent if device.attributes.get("unit") == "tile" else None

    def processes(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, tuple[DeviceProcess, ...] | None]:
        """Return the holders of each GPU, with their memory."""
        return observation.processes(ctx, devices, super().processes(ctx, devices))

    def judge(self, device: Device, card: Card | None) -> tuple[Health, Fault]:
        """Return the health from files; a GPU that is too hot is unhealthy."""
        health, fault = super().judge(device, card)
        celsius = observation.temperature(card.ctx, card.address or "") if card else None
        if health is not Health.UNHEALTHY and celsius is not None and celsius > HOT_CELSIUS:
            return Health.UNHEALTHY, Fault(f"it has {celsius:.0f} degrees Celsius", "let it cool down")
        return health, fault

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on memory windows, misleading variables, and a runtime that lacks GPUs."""
        usable = [device for device in detected.devices if device.health is not Health.UNHEALTHY]
        # Once per card, not per tile.
        for device in {device.pci_bus_id: device for device in usable}.values():
            yield from self._product_findings(ctx, device)
        if usable and not ctx.glob(f"{BY_PATH}/pci-*-render"):
            reason = f"{BY_PATH} is missing, and oneCCL cannot start without it"
            yield warn(reason, f"give the container the folder: -v {BY_PATH}:{BY_PATH}")
        yield from _variables(ctx.environ)
        try:
            shown = self.visible(ctx.environ, detected.devices)
        except FaultError:
            return  # the core reports a mask that is refused
        expected = [device for device in usable if shown is None or device.id in shown]
        try:
            answer = runtime.list_gpus(ctx)
        except FaultError as error:
            yield warn(*error.fault)
            return
        # More devices than expected is no fault: the runtime may show tiles and cards.
        if answer and len(answer[1]) < len(expected):
            who, names = answer
            reason = f"sysfs shows {len(expected)} GPUs or tiles that should work, {who} shows {len(names)}"
            cure = "install intel-level-zero-gpu or intel-opencl-icd for this generation, and look into the kernel log"
            yield fail(reason, cure)

    def _product_findings(self, ctx: ProbeContext, device: Device) -> Iterator[Finding]:
        address, integrated = device.pci_bus_id or "", device.attributes.get("integrated") is True
        if _device_id(device) in self._ids("uncertain"):
            reason = (
                f"whether the runtime serves {device.model} ({address}) depends on its release, and files cannot tell"
            )
            cure = "try 'sycl-ls'; GPUs from Skylake to Ice Lake need intel-level-zero-gpu-legacy1, the release 24.35"
            yield warn(reason, cure)
        function = device.attributes.get("unit") == "card" and device.parent
        if not (integrated or function) and _window(ctx, address) == SMALL_BAR:
            reason = f"GPU {address}: the processor reaches 256 MiB of its memory at once"
            yield warn(reason, "switch on Resizable BAR (and Above 4G Decoding) in the firmware")


def _device_id(device: Device) -> int:
    return int(str(device.attributes.get("device_id", "0")), 16)


def _memory(ctx: ProbeContext, address: str, physical: str | None) -> int | None:
    """Return the memory reported by the driver, or assigned to a virtual function. The PCI window may be smaller."""
    tiles = ctx.glob(f"{PCI_DEVICES}/{address}/tile*/vram0/total_bytes")
    told = sum(_count(ctx, path) for path in tiles or ctx.glob(f"{PCI_DEVICES}/{address}/drm/card*/lmem_total_bytes"))
    if told or not physical:
        return told or None
    for link in ctx.glob(f"{PCI_DEVICES}/{physical}/virtfn*"):
        if (ctx.readlink(link) or "").rpartition("/")[2].lower() == address:
            folder = f"vf{int(link.rpartition('virtfn')[2]) + 1}"
            quotas = ctx.glob(f"{PCI_DEVICES}/{physical}/drm/card*/prelim_iov/{folder}/gt*/lmem_quota")
            return sum(_count(ctx, quota) for quota in quotas) or None
    return None


def _count(ctx: ProbeContext, path: str) -> int:
    """Read a non-negative number; 0 without the file, an error for other content."""
    told = (ctx.read(path) or "0").strip()
    if not told.isdecimal():
        raise ValueError(f"{path} must hold a number (got {told[:40]!r})")
    return int(told)


def _tiles(card: Card) -> list[Card]:
    """Divide a card into its tiles; a card with a single tile stays whole."""
    tiles = int(card.attributes.get("tiles") or 1)
    if tiles == 1:
        return [card]
    # Shallow copies: function, nodes and fault are the card's.
    parts = [copy.copy(card) for _ in range(tiles)]
    for tile, part in enumerate(parts):
        part.id, part.parent = f"{card.id}-tile{tile}", card.id
        part.memory_bytes = card.memory_bytes // tiles if card.memory_bytes else None
        part.attributes = {**card.attributes, "unit": "tile", "tile": tile}
    return parts


def _wedged(ctx: ProbeContext) -> frozenset[str]:
    """Find GPUs that the kernel gave up and has not started again.

    sysfs shows no sign of it. A user without permission to read the kernel log learns nothing here.
    """
    dead: set[str] = set()
    for line in kernel_log(ctx, f"{WEDGED}|{STARTED}").splitlines():
        if match := re.search(WEDGED, line):
            dead.add(match[1])
        elif match := re.search(STARTED, line):
            dead.discard(match[1])
    return frozenset(dead)


def _window(ctx: ProbeContext, address: str) -> int | None:
    """Return the size of the PCI window to a card's memory, its third resource."""
    try:
        start, end, _ = (
            int(word, 16) for word in text(ctx, f"{PCI_DEVICES}/{address}/resource").splitlines()[2].split()
        )
    except (IndexError, ValueError):
        return None
    return end - start + 1 if end > start else None


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on misleading variables."""
    if DEAD_VARIABLE in environ:
        reason = f"{DEAD_VARIABLE} is set, and nothing has read it since Intel Extension for PyTorch 1.13"
        yield warn(reason, f"unset it; {level_zero.MASK} is the variable that works")
    if environ.get(level_zero.MASK) == "":
        cure = f"unset it, or hide all with {level_zero.MASK}={level_zero.NOTHING}"
        yield warn(f"{level_zero.MASK} is empty, which shows every GPU", cure)
    if any(term.startswith("!") for term in environ.get(selector.SELECTOR, "").split(";")):
        reason = f"{selector.SELECTOR} discards devices, and by number that hides the whole backend"
        yield warn(reason, "name the devices that you want instead, for example level_zero:1,2")


plugin = Intel()
