"""Huawei Ascend NPUs for anyaccel: found on PCI and in /dev, numbered by npu-smi, masked by logic id."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import Fault, Mask, Numbers, Vendor, condition, fail, in_container, warn
from anyaccel.plugin import (
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Mount,
    ProbeContext,
    Stats,
    Term,
)

from anyaccel_ascend import npu_smi
from anyaccel_ascend.chips import CATALOG, identify
from anyaccel_ascend.machine import CONTROL_NODES, HOST_PATHS, PCI_CLASS, VENDORS, Machine

CONTAINER = "ASCEND_VISIBLE_DEVICES"
"""Physical ids, or vNPU ids, that Ascend Docker Runtime mounts into a container; no process reads it."""
CONTAINER_OPTIONS = "ASCEND_RUNTIME_OPTIONS"
"""``VIRTUAL`` makes the ids in ``ASCEND_VISIBLE_DEVICES`` those of vNPUs."""
SINGLE = "ASCEND_DEVICE_ID"
"""Older rival of the mask: a global number that a framework would take for one behind the mask."""


class LogicIds(Mask):
    """A mask of logic ids, read once by the CANN runtime at a process's first use; empty hides every NPU.

    Read as torch_npu's ``_parse_visible_devices`` and ``_device_count_ascend_hal`` do: any character other than digits
    and commas ends the list, and so does an empty item. A number not greater than the previous one leaves no device at
    all, so the list is written in the runtime's order; a number that is too large ends the list.
    """

    def read(self, environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device] | None:
        """Return the runtime's devices left by the variable, in the runtime's order."""
        if self.variable not in environ:
            return None
        known = {device.index: device for device in devices}
        numbers: list[int] = []
        # The parser of torch_npu stops at the first other character, and keeps the numbers before.
        for item in re.split("[^0-9,]", environ[self.variable], maxsplit=1)[0].split(","):
            if item and numbers and int(item) <= numbers[-1]:
                return []
            if not item or int(item) > max(known, default=-1):
                break
            numbers.append(int(item))
        return [known[number] for number in numbers if number in known]

    def fault(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Fault | None:
        """Return a fault if the value shows fewer NPUs than it lists, else None."""
        value, seen = environ.get(self.variable, ""), len(self.read(environ, devices) or ())
        wanted = sum(bool(item.strip()) for item in value.split(","))
        if seen == wanted:
            return None
        return Fault(
            f"{self.variable}={value!r} shows {seen} NPUs to the runtime instead of {wanted}: it takes ids below"
            f" {len(devices)}, the number of NPUs here (inside a container they begin at 0), in ascending order, with"
            " nothing but commas between",
            f"write it like {self.variable}=0,1 before anything imports torch_npu or CANN",
        )


def _vnpu(device: Device) -> int | None:
    """Return the number of a vNPU for containers of this host; None for a device that a process can use."""
    value = device.attributes.get("vnpu_id")
    return value if isinstance(value, int) else None


MASK = LogicIds("ASCEND_RT_VISIBLE_DEVICES", ordered=False)
VNPUS = Mask(
    CONTAINER,
    Numbers(lambda device: _vnpu(device) or 0, ranges=True),
    Numbers(
        lambda device: _vnpu(device) or 0,
        pattern=r"[A-Za-z][A-Za-z0-9]*-\d+",
        value=lambda entry: int(entry.rpartition("-")[2]),
    ),
    nothing="void",
    unknown="error",
    ordered=False,
    entries="numbers of vNPUs that are here, ascending ranges such as 100-103, or names such as Ascend910-100",
)
"""The container's list with ``VIRTUAL``. Ascend Docker Runtime starts no container for a value that it refuses."""


class Ascend(Vendor):
    """Ascend 310 to 950, whole and as vNPUs.

    A device's index is its logic id: CANN's number before masking. It differs from the physical number (attribute
    ``phy_id``, ``/dev/davinci<N>``) if a card is lost, or inside a container. A device without a number in the runtime
    has the attribute ``addressable`` False: lost cards, and vNPUs on a host (``vnpu_id``), which only a container can
    open.
    """

    key, resource, kind, brand, driver = "ascend", "NPU", "npu", "Ascend", "devdrv_device_driver"
    url = "https://pypi.org/project/anyaccel-ascend/"
    runtimes = ("libascendcl.so",)
    pci_vendors, pci_classes, pci_known = VENDORS, (PCI_CLASS,), True  # the vendor ids are also on network cards
    catalog = CATALOG
    mask, variables = MASK, (CONTAINER, CONTAINER_OPTIONS, SINGLE)

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find NPUs: device nodes and PCI first, then npu-smi."""
        return Machine(ctx, self.functions(ctx)).inventory()

    def fractional(self, device: Device) -> Fractional:
        """Return SHARED for a whole NPU, PARTITIONED for a split one, NO for a vNPU."""
        if device.attributes.get("split"):
            return Fractional.PARTITIONED
        return Fractional.NO if "template" in device.attributes else Fractional.SHARED

    def tags(self, device: Device) -> Sequence[str]:
        """Return the SoC first, as ``acl.get_soc_name()`` and therefore Ray would, then its family.

        On an A3 npu-smi does not show the number in ``Ascend910_9392``, so ``Ascend910C`` comes first there. A vNPU
        never has the tag of a whole chip.
        """
        chip, told = identify(device.model), device.attributes
        soc, family = str(told.get("soc", chip.soc)), str(told.get("family_tag", chip.tag))
        if template := told.get("template"):
            return tuple(dict.fromkeys((f"{soc}-{template}", f"{family}-{template}", f"{family}-vnpu", "vnpu")))
        raw = re.sub(r"[^A-Za-z0-9._-]", "", device.model)
        stem = re.sub(r"(?<=\d)C$", "", soc)
        # Names of variants, in the form of a type.
        variant = re.fullmatch(r"(?:Ascend)?(910(?:Pro[AB]|PremiumA|_93\d+))", raw)
        short = () if raw in ("910B", "Ascend910", "Ascend") or not raw else (raw,)
        return tuple(dict.fromkeys((soc, stem, family, *((f"Ascend{variant[1]}",) if variant else ()), *short)))

    def maskable(self, device: Device) -> bool:
        """Return True if the runtime has a number for a device."""
        return device.attributes.get("addressable") is not False

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Refuse devices without an address in the runtime, and mixtures of whole NPUs and vNPUs."""
        partitions = [device for device in devices if _vnpu(device) is not None]
        for device in devices:
            if device.attributes.get("split"):
                return f"{device.id} is split into vNPUs; ask for one of those by its tag, such as 'vnpu'"
            if request.fraction and "template" in device.attributes:
                return f"{device.id} is a vNPU, which is given out whole; ask for 1, or for a smaller template"
        if partitions and len(partitions) < len(devices):
            ids = ", ".join(device.id for device in partitions)
            return f"a worker gets either whole NPUs or vNPUs, not both (got the vNPUs {ids} among others)"
        # vNPUs are nameless for the mask by design; their list is the container's.
        return None if partitions else super().validate(request, devices)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask to exactly these devices; for vNPUs, the variables of a container."""
        partitions = [device for device in devices if _vnpu(device) is not None]
        wanted = {MASK.variable: self.write_mask([device for device in devices if device not in partitions])}
        if partitions:
            return EnvEdits(set={**wanted, **self.container_env(partitions)}, unset=frozenset({SINGLE}))
        # A host without vNPUs needs no change to the container's variables.
        split = any(_vnpu(device) is not None for device in ctx.devices)
        return EnvEdits(set=wanted, unset=frozenset({SINGLE, *((CONTAINER, CONTAINER_OPTIONS) if split else ())}))

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the mask, and for vNPUs the list of a container."""
        seen = self.read_mask(environ, devices)
        partitions = [device for device in devices if _vnpu(device) is not None]
        virtual = "VIRTUAL" in re.split(r"\s*,\s*", environ.get(CONTAINER_OPTIONS, "").strip())
        if not (partitions and virtual):
            return seen
        whole = [device.id for device in sorted(devices, key=lambda each: each.index) if self.maskable(device)]
        listed = VNPUS.read(environ, partitions) or ()
        return [*(whole if seen is None else seen), *(device.id for device in listed)]

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return the host's control nodes; for simulated devices, the nodes of the family."""
        if not devices:
            return ()
        # A simulated device lists no nodes of the host.
        known = CONTROL_NODES[:3] if devices[0].attributes.get("family") == "950" else CONTROL_NODES
        return _split_paths(devices[0], "control_nodes") or known

    def mounts(self, devices: Sequence[Device]) -> Iterable[Mount]:
        """Return the driver's directory, and further paths of Ascend's instructions."""
        paths = _split_paths(devices[0], "host_paths") or HOST_PATHS[:4] if devices else ()
        return [Mount(source=path, target=path) for path in paths]

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return physical or vNPU numbers for Ascend Docker Runtime; other container runtimes use the nodes.

        ``ASCEND_RT_VISIBLE_DEVICES`` is left out on purpose: inside, mounted devices are numbered from 0, and every one
        is visible.
        """
        partitions = sorted(number for device in devices if (number := _vnpu(device)) is not None)
        numbers = partitions or sorted({int(device.attributes.get("phy_id", device.index)) for device in devices})
        options = {CONTAINER_OPTIONS: "VIRTUAL"} if partitions else {}
        return {CONTAINER: ",".join(map(str, numbers)) or "void", **options}

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Observe the NPUs with a single call of npu-smi, which shows at most eight processes per chip.

        npu-smi shows the power of an A3 package with its first die; the power of the second die is unknown. A vNPU has
        no entry: npu-smi shows the whole chip.
        """
        answer = npu_smi.ask(ctx, "Bus-Id", "info")
        if answer is None:
            return {}
        table = npu_smi.parse_table(answer.stdout)
        found = {}
        for device in devices:
            place = device.attributes.get("card"), device.attributes.get("chip")
            if self.maskable(device) and (chip := table.chips.get(place)):
                held = None if table.processes is None else tuple(table.processes.get(place, ()))
                found[device.id] = Stats(**chip.measures, **condition(chip.fault), processes=held)
        return found

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on variables without the expected effect."""
        if fault := MASK.fault(ctx.environ, [*filter(self.maskable, detected.devices)]):
            yield fail(*fault)
        # Inside a container the variable did its work before the process started.
        if MASK.variable not in ctx.environ and CONTAINER in ctx.environ and not in_container(ctx):
            reason = f"{CONTAINER} hides nothing from processes: Ascend Docker Runtime alone reads it"
            yield warn(reason, f"set {MASK.variable} for processes")


def _split_paths(device: Device, name: str) -> list[str]:
    """Split the paths in an attribute."""
    return [path for path in str(device.attributes.get(name, "")).split(",") if path]


plugin = Ascend()
