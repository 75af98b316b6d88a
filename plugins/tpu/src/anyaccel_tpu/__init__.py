"""Google TPU chips, v2 to tpu7x, for anyaccel.

Nothing of Google's is loaded: not libtpu, JAX, torch_xla or tpu-info. Chips come from PCI and device nodes; facts about
the slice from GKE's variables and, on Google's machines, from the metadata server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from anyaccel.kit import Card, Fault, FaultError, Mask, Vendor, board_links, condition, inventory, numbered, text, warn
from anyaccel.plugin import (
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Finding,
    Health,
    PciFunction,
    ProbeContext,
    Stats,
    Term,
)

from anyaccel_tpu.slices import CATALOG, SKIP_METADATA, V2_OR_V3, Slice, SliceShape, pod_type, slice_shape

__all__ = ["SliceShape", "plugin", "pod_type", "slice_shape"]

GOOGLE = 0x1AE0
VFIO = "/dev/vfio/vfio"
"""The node of vfio itself, needed to open any group."""
IOMMU_GROUPS = "/sys/kernel/iommu_groups"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
LOCK_FILE = "/tmp/libtpu_lockfile"  # noqa: S108 - the name is libtpu's

# Both names of a pair are set to the same value: libtpu reads both, and a stale value under the other name would
# survive otherwise.
MASK_NAMES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
MASKS = [Mask(name, ordered=False, entries="chip numbers separated by commas, such as 0,1") for name in MASK_NAMES]
PATHS = "TPU_VISIBLE_DEVICE_PATHS"
CHIP_BOUNDS = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
PROCESS_BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
ALONE = {"CLOUD_TPU_TASK_ID": "0", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
PORTS = ("TPU_PROCESS_PORT", "TPU_PROCESS_ADDRESSES", "TPU_RUNTIME_METRICS_PORTS")
MEGASCALE = tuple(f"MEGASCALE_{name}" for name in ("COORDINATOR_ADDRESS", "NUM_SLICES", "PORT", "SLICE_ID"))
RIVALS = ("CHIPS_PER_HOST_BOUNDS", "HOST_BOUNDS", *MEGASCALE)
"""GKE's second spelling of the bounds, and variables of multislice: a part of a host is in no slice."""
SLICE = (*CHIP_BOUNDS, *PROCESS_BOUNDS, *ALONE, *PORTS, SKIP_METADATA)
PROCESS_PORT = 8471
"""First port of libtpu's processes in Google's recipes; 8482 is JAX's and must stay free."""
METRICS_PORT = 8431
"""First port of libtpu's metrics."""
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "1,4,1"}
"""The bounds of Ray (``_private/accelerators/tpu.py``), JAX (``test_multiprocess.py``) and vLLM's tpu-inference."""


class Tpu(Vendor):
    """TPU v2 to tpu7x, counted in chips: never in TensorCores, chiplets or devices of JAX.

    Only libtpu knows memory in use, load, temperature and power, inside the running workload, behind a gRPC service of
    its own; they are unknown here.
    """

    key, resource, kind, brand = "tpu", "TPU", "tpu", "TPU"
    url = "https://pypi.org/project/anyaccel-tpu/"
    runtimes = ("libtpu.so",)
    pci_vendors = (GOOGLE,)
    catalog = CATALOG
    entry_attribute = "generation"
    mask = MASKS[0]
    variables = (MASK_NAMES[1], PATHS, *SLICE, *RIVALS)
    held = "every"  # a chip of two functions has two nodes, and its holder opens both
    counts = (1, 2, 4, 8)  # sizes of rectangles
    exclusive = "a chip is opened by one process at a time and has no partitions"

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find chips: PCI functions first, device nodes to confirm them, IOMMU groups if PCI is hidden.

        Raises:
            ValueError: sysfs shows a function of Google's with a malformed device id.
        """
        notes: list[str] = []
        # Without a class: TPU functions have the class "unassigned" on most generations.
        cards = self._slots(ctx, ctx.pci(GOOGLE)) or self._slots(ctx, _behind_vfio(ctx, notes))
        partial = bool(notes)
        # /dev/accel<n> without a PCI function: a container without /sys, or another vendor's driver.
        accel = [] if cards else [path for path in numbered(ctx, "/dev/accel").values() if ctx.node(path)]
        hint = accel or notes or ctx.environ.get("TPU_ACCELERATOR_TYPE")
        # A visible PCI bus without a TPU is proof of absence; a hidden bus is not.
        if not cards and (ctx.glob("/sys/bus/pci/devices/*") or not hint):
            return None
        facts = Slice(ctx, tpu_seen=bool(cards))
        named = facts.generation
        if not cards and named is not None:
            # Other vendors use the name /dev/accel<n>, too: without PCI, only Google's own facts identify a TPU.
            for path in accel:
                card = Card(ctx, f"tpu-{path.removeprefix('/dev/')}", entry=named)
                card.nodes = (path,)
                cards.append(card)
        if not cards:
            if facts.accelerator_type:
                notes.append(
                    f"the accelerator type is said to be {facts.accelerator_type}, and neither PCI nor a device node"
                    " that sysfs vouches for shows a chip; pass the nodes and /sys of the host into the container"
                )
            return Detected(partial=partial, notes=tuple(notes)) if notes else None
        attributes = facts.attributes(len(cards))
        for index, card in enumerate(cards):
            card.index = index
            self._find_nodes(card)
            # The PCI id fits both.
            if named and card.entry and card.entry.key == V2_OR_V3 and named.key in ("v2", "v3"):
                card.entry = named
            card.attributes = dict(attributes)
            self.identify(card)
        if named and cards[0].entry and cards[0].entry.key not in (named.key, V2_OR_V3):
            notes.append(
                f"the accelerator type is said to be {facts.accelerator_type}, and PCI shows {cards[0].model}; PCI was"
                " believed"
            )
        # Every chip of a host is wired to each other chip; pairs and quads are the rectangles of the runtime.
        board_links(dict(enumerate(cards)))
        return inventory(cards, "", (*notes, *facts.notes), partial=partial)

    def _slots(self, ctx: ProbeContext, functions: Iterable[PciFunction]) -> list[Card]:
        """Build a card of the functions in each slot with a TPU's id, in the order of ``tpu-info``.

        A chip of tpu7x has two functions and two IOMMU groups; counting either finds eight chips instead of four. Chips
        behind vfio are in the order of the groups of their first functions: the minor number of a group's node, and the
        order of a directory, mean nothing. There is no public serial number; the PCI address is stable over reboots.
        """
        slots: dict[str, list[PciFunction]] = {}
        # Sorted, so that the first function of a slot, which orders the chips, comes first.
        for function in sorted(functions, key=lambda function: function.address):
            slots.setdefault(function.address.rpartition(".")[0], []).append(function)
        cards = []
        for members in slots.values():
            for member in members:
                entry = CATALOG.by_pci(member.device, subsystem=member.subsystem_device)
                if entry is not None:
                    card = Card(ctx, f"tpu-{member.address}", member, entry=entry)
                    nodes = dict.fromkeys(f"/dev/vfio/{each.iommu_group}" for each in members if each.iommu_group)
                    card.nodes = tuple(nodes)
                    cards.append(card)
                    break
        groups = {card.id: card.nodes[0].rpartition("/")[2] if card.nodes else "" for card in cards}
        # A chip without a group would have no place in this order, so then the order of addresses stays.
        if all(groups[card.id].isdecimal() and card.entry and card.entry.facts["vfio"] for card in cards):
            cards.sort(key=lambda card: int(groups[card.id]))
        return cards

    def _find_nodes(self, card: Card) -> None:
        """Find the nodes of a chip. Both families are tried, whatever the generation."""
        ctx, entry, function = card.ctx, card.entry, card.function
        # The driver numbers /dev/accel<n> in the order of PCI addresses.
        accel, expected = f"/dev/accel{card.index}", card.nodes
        card.nodes = tuple(filter(ctx.node, expected))
        if function is not None and not card.nodes and (ctx.node(accel) or not (entry and entry.facts["vfio"])):
            expected, card.nodes = (accel,), tuple(filter(ctx.node, (accel,)))
        card.sound = function is not None
        if function is not None and function.driver is None and not card.nodes:
            runtime = entry.facts.get("runtime") if entry else None
            version = f" (for {entry.model}: {runtime})" if entry and runtime else ""
            card.blame(
                f"no driver is bound to {card.address} and it has no device node",
                f"create the VM with the TPU software version of its generation{version}, or reinstall the driver after"
                " a kernel upgrade",
            )
        if not expected:
            card.blame("its device node is missing", "pass it into the container with --device, or restart the TPU VM")
        # A group cannot be opened without the node of vfio itself.
        control = (VFIO,) if any(path.startswith("/dev/vfio/") for path in card.nodes) else ()
        for path in (*expected, *control):
            closed = f"look at the owner with 'ls -l {path}' and join the group, or run as root"
            card.check_node(path, missing="restart the TPU VM", closed=closed)

    def tags(self, device: Device) -> Sequence[str]:
        """Return Ray's tag, other names of the generation, and the type of the slice such as ``v4-16``."""
        entry = self.entry(device)
        types = (device.attributes.get("pod_type"), device.attributes.get("accelerator_type"))
        return tuple(dict.fromkeys((*(entry.tags if entry else ()), *(str(name) for name in types if name))))

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Require whole chips, in numbers and rectangles valid for the runtime.

        The rules come from Ray (1, 2, 4 or 8 chips), JAX (pairs of a host of 4) and vLLM's tpu-inference (halves of 8).
        """
        # Every chip of a host is linked to each other chip, so each names the rest.
        count, total = len(devices), max((len({device.id, *device.links}) for device in devices), default=0)
        reason = super().validate(request, devices)
        if reason or count == total:
            return reason
        entry = self.entry(devices[0])
        if entry and "counts" not in entry.facts:
            return f"the bounds of {entry.model} are not published: take all {total} chips of the host"
        if count > 1 and (count, total) not in ((2, 4), (4, 8)):
            legal = {2: "1 or 2 chips", 4: "1, 2 or 4 chips", 8: "1, 4 or 8 chips"}.get(total, "1 chip")
            return f"a process takes {legal} of a TPU host with {total}, not {count}"
        indexes = sorted(device.index for device in devices)
        sets = [list(range(first, first + count)) for first in range(0, total, count)]
        if indexes not in sets:
            return (
                f"{count} chips of a TPU host with {total} must be {' or '.join(map(_csv, sets))} (got {_csv(indexes)})"
            )
        return None

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set mask, bounds and ports for a part of the host; remove every restriction for the whole host.

        Chips are written in ascending order: the runtime numbers them by their place in the grid.

        Raises:
            FaultError: A process cannot hold exactly these chips.
        """
        if not devices:
            # Set, not unset: without a mask libtpu takes every chip.
            return EnvEdits(set=dict.fromkeys(MASK_NAMES, ""), unset=frozenset({PATHS}))
        reason = self.validate(Term(names=(self.resource,)), devices)
        if reason:
            raise FaultError(reason)
        # The whole host may belong to a slice of several hosts, whose variables must stay.
        if {device.id for device in devices} >= {device.id for device in ctx.devices}:
            return _everything(len(devices), ctx.environ)
        indexes = sorted(device.index for device in devices)
        # Ports by the first chip: disjoint parts of a host never collide.
        port = PROCESS_PORT + indexes[0]
        variables = {
            **dict.fromkeys(MASK_NAMES, _csv(indexes)),
            **dict.fromkeys(CHIP_BOUNDS, BOUNDS[len(devices)]),
            **dict.fromkeys(PROCESS_BOUNDS, "1,1,1"),
            **ALONE,
            "TPU_PROCESS_PORT": str(port),
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_RUNTIME_METRICS_PORTS": str(METRICS_PORT + indexes[0]),
        }
        if devices[0].attributes.get("slice_hosts", 1) != 1:
            # The metadata server would name the other hosts, and libtpu would wait for them (pytorch/xla#7714).
            variables[SKIP_METADATA] = "1"
        return EnvEdits(set=variables, unset=frozenset({PATHS, *RIVALS}))

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Return the chips visible in an environment, in the order of their indexes.

        Paths of nodes win over numbers, the newer name over the older name, and an empty value counts as unset if the
        other name has a value. Numbers are the host's own; a number without a chip shows nothing; the order of a mask
        is ignored.

        Raises:
            FaultError: A mask contains anything but numbers.
        """
        chips = sorted(devices, key=lambda device: device.index)
        paths = {path.strip() for path in environ.get(PATHS, "").split(",") if path.strip()}
        if paths:
            return [device.id for device in chips if paths & set(device.nodes)]
        # libtpu falls back to the older name if the newer is empty.
        mask = next((mask for mask in MASKS if environ.get(mask.variable, "").strip()), None)
        if mask is None:
            return [] if any(name in environ for name in MASK_NAMES) else None
        return [device.id for device in mask.read(environ, chips) or ()]

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return the node of vfio itself: passing the directory passes nothing."""
        return [VFIO] if any(path.startswith("/dev/vfio/") for device in devices for path in device.nodes) else []

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Return the holders of each chip, and its health. Nodes vanish after a driver restart (jax#13260)."""
        processes = self.processes(ctx, devices)
        found = {}
        for device in devices:
            gone = [path for path in device.nodes if ctx.node(path) is None]
            fault = Fault(device.health_reason, device.health_remedy) if device.health is Health.UNHEALTHY else None
            # A recorded node that vanished wins over the health of detection.
            if gone:
                fault = Fault(f"{' and '.join(gone)} is gone", "restart the TPU VM")
            state = condition(fault, sound=device.health is Health.HEALTHY)
            found[device.id] = Stats(**state, processes=processes[device.id])
        return found

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on contradicting variables, a lock file left behind, and small pages."""
        environ, devices = ctx.environ, detected.devices
        for newer, older in (MASK_NAMES, CHIP_BOUNDS, PROCESS_BOUNDS):
            if environ.get(newer) and environ.get(older) and environ[newer] != environ[older]:
                reason = f"{newer}={environ[newer]} and {older}={environ[older]} name one setting and differ"
                yield warn(reason, f"unset {older}")
        if environ.get(PATHS) and any(map(environ.get, MASK_NAMES)):
            yield warn(f"{PATHS} is set beside {MASK_NAMES[0]} and wins over it", f"unset {PATHS}")
        for name in CHIP_BOUNDS:
            # GKE's bounds describe the machine type, so a chip that is missing here was lost.
            if _chips(environ.get(name, ""), 0) > len(devices):
                reason = f"{name}={environ[name]} announces more chips than the {len(devices)} of this host"
                yield warn(reason, f"replace the host if a chip is missing, else unset {name}")
        names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
        hosts = devices[0].attributes.get("slice_hosts") if devices else None
        if hosts and names not in ([], ["localhost"]) and len(names) != hosts:
            reason = f"the slice has {hosts} hosts and TPU_WORKER_HOSTNAMES names {len(names)}"
            yield warn(reason, "start one worker on every host of the slice, all together")
        yield from self._lock(ctx, devices)
        entry, pages = self.entry(devices[0]) if devices else None, text(ctx, HUGE_PAGES)
        if entry and entry.facts["vfio"] and pages and "[always]" not in pages:
            reason = f"transparent huge pages are not always on, which makes {entry.model} start slowly"
            yield warn(reason, f"echo always | sudo tee {HUGE_PAGES}")

    def _lock(self, ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
        """Yield a finding on a lock file without a holder, which keeps the next process out (jax#10192)."""
        if not ctx.exists(LOCK_FILE):
            return
        holders = self.processes(ctx, devices).values()
        if not any(holders):
            nodes = " ".join(path for device in devices for path in device.nodes)
            # "fuser" as root sees every process, where this scan did not.
            complete = holders and None not in holders
            first = "" if complete else f"if 'sudo fuser -v {nodes}' shows no holder: "
            yield warn(f"{LOCK_FILE} was left behind and no process holds a chip", f"{first}rm {LOCK_FILE}")


def _behind_vfio(ctx: ProbeContext, notes: list[str]) -> list[PciFunction]:
    """Return Google's functions behind the groups in /dev/vfio; a group unknown to sysfs is not a TPU."""
    functions = []
    groups = [(str(group), path) for group, path in numbered(ctx, "/dev/vfio/").items() if ctx.node(path)]
    for group, path in groups:
        try:
            functions += [_function(ctx, device, group) for device in ctx.glob(f"{IOMMU_GROUPS}/{group}/devices/*")]
        except OSError as error:
            notes.append(f"{path} was left out: what is behind it cannot be read ({error})")
    return [function for function in functions if function.vendor == GOOGLE]


def _function(ctx: ProbeContext, path: str, group: str) -> PciFunction:
    numa_node = ctx.read_int(f"{path}/numa_node")
    return PciFunction(
        address=path.rpartition("/")[2].lower(),
        vendor=ctx.read_int(f"{path}/vendor") or 0,
        device=ctx.read_int(f"{path}/device") or 0,
        class_code=0,
        subsystem_device=ctx.read_int(f"{path}/subsystem_device"),
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        iommu_group=group,
    )


def _everything(count: int, environ: Mapping[str, str]) -> EnvEdits:
    """Return the edits for the whole host: no restriction, and GKE's facts about the slice stay.

    Bounds of fewer chips are left-overs of a process with a part of the host (Ray reuses workers); then the other
    variables of the part go, too.
    """
    restricted = any(_chips(environ.get(name, ""), count) < count for name in CHIP_BOUNDS)
    stale = (name for name in SLICE if restricted or name not in environ)
    return EnvEdits(unset=frozenset({*MASK_NAMES, PATHS, *stale}))


def _chips(bounds: str, unknown: int) -> int:
    """Return the number of chips in bounds such as ``2,2,1``; ``unknown`` for malformed bounds."""
    parts = [part.strip() for part in bounds.split(",")]
    return prod(map(int, parts)) if all(part.isdecimal() for part in parts) else unknown


def _csv(indexes: Iterable[int]) -> str:
    return ",".join(map(str, indexes))


plugin = Tpu()
