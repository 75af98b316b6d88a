"""Intel Gaudi accelerators (HPUs) for anyaccel: from PCI and sysfs, masked by module id."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import (
    Card,
    Catalog,
    FaultError,
    Mask,
    Measures,
    Numbers,
    Tool,
    Vendor,
    board_links,
    fail,
    in_container,
    warn,
)
from anyaccel.plugin import Detected, Device, EnvContext, EnvEdits, Finding, ProbeContext

LOG = "look for habanalabs in 'dmesg'"
GAUDINET = "/etc/habanalabs/gaudinet.json"
"""Network addresses of the scale-out ports, if configured."""
CONTAINER_DEVICES = "HABANA_VISIBLE_DEVICES"
"""Node numbers, read by the container runtime alone, by no process (HabanaAI/Model-References#25)."""

# The runtime has no value for "none" and takes an empty list as "every device", or as an error. With a module that does
# not exist it fails to acquire, and the list prevents a fall-back to a free device.
NO_MODULE = "999"
SIGNED = r"[+-]?\d+"
MODULES = Mask(
    "HABANA_VISIBLE_MODULES",
    Numbers(pattern=SIGNED),
    nothing=NO_MODULE,
    empty="error",
    entries="module ids such as '0,1'",
    remedy="unset it to see every HPU",
)
OWN = Mask(
    "HLS_MODULE_ID",
    Numbers(pattern=SIGNED),
    nothing=NO_MODULE,
    empty="error",
    entries="one module id",
    remedy="unset it",
)
"""The module of one process (HabanaAI/gaudi-pytorch-bridge, ``synapse_helpers/device.cpp``, ``torch/hpu/_utils.py``):

- A process that has it acquires that module. If it cannot, it fails when ``HABANA_VISIBLE_MODULES`` is set, and takes
  any free device when it is not.
- A process without it takes the first free device of the machine, whatever ``HABANA_VISIBLE_MODULES`` says, unless it
  is one of several ranks: then it takes the entry of the list at its local rank.

So the list alone does not confine a job of one process, and a device of one's own needs both variables.
"""
IDENTITY = ("bus_id", "index", "module_id", "name", "serial", "uuid", "memory.total")
STATE = ("bus_id", "memory.used", "utilization.aip", "temperature.aip", "power.draw")
QUERY = ("-Q", "{fields}", "-f", "csv,noheader,nounits")
ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
PATTERNS = ("/sys/class/accel/accel*", "/sys/devices/virtual/accel/accel*", "/sys/class/habanalabs/hl*")


class Gaudi(Vendor):
    """Gaudi 1 to 3.

    A device's index is its module id, its slot on the baseboard: the number in masks, the order in which the runtime
    looks for a free device, and stable over restarts. The number of the node (``accelN``, hl-smi's index) is another
    permutation, kept as the attribute ``accel``. Detection opens no device: opening takes a device from its job.
    """

    key, resource, kind, brand, driver = "gaudi", "HPU", "hpu", "Habana", "habanalabs"
    url = "https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Gaudi_Assignment.html"
    runtimes = ("libSynapse.so", "libhl-thunk.so")
    pci_vendors, pci_classes = (0x1DA3,), (0x1200,)
    catalog = Catalog(__file__)
    entry_attribute = "generation"
    mask, variables = MODULES, (OWN.variable,)
    counts = (1, 2, 4, 8)  # docs.habana.ai, "Multiple Workloads on a Single Docker"
    exclusive = (
        "the habanalabs driver admits one process per device (a second one gets EBUSY) and Gaudi has no partitions"
    )
    number_name, nameless = "module id", "module_unknown"
    number_remedy = (
        "make 'hl-smi -Q bus_id,module_id -f csv' work, or use a kernel (6.8 or later) or driver that shows each"
        " device's module_id in sysfs"
    )
    node_missing = f"{LOG} where it vanished after a reset"
    state_file = "status"
    host_paths = (("gaudinet", GAUDINET),)
    # hl-smi takes 0.3 to 1 s on a healthy machine, and opens control nodes only, so running jobs are not disturbed.
    tool = Tool(
        "hl-smi",
        package="the habanalabs tools (package habanalabs-firmware-tools)",
        hung=LOG,
        failed="check that the habanalabs driver is loaded",
    )

    def read_card(self, card: Card) -> None:
        """Find the node and the module id, in any of the driver's three layouts."""
        for path in [*card.glob("accel/accel*"), *(path for pattern in PATTERNS for path in card.ctx.glob(pattern))]:
            name = path.rpartition("/")[2]
            # accel of kernel 6.8 and later; hl of older drivers.
            match = re.fullmatch(r"(accel|hl)(\d+)", name)
            if match and (path.startswith(card.folders[0]) or self._owns_path(card, path)):
                # accel_controlD3 and hl_controlD3, the control nodes, serve monitors.
                folder, kind, minor = "/dev/accel" if match[1] == "accel" else "/dev", match[1], match[2]
                ports = card.glob("infiniband_verbs/uverbs*")
                card.nodes = (
                    f"{folder}/{name}",
                    f"{folder}/{kind}_controlD{minor}",
                    *(f"/dev/infiniband/{port.rpartition('/')[2]}" for port in ports),
                )
                card.attributes["accel"] = int(minor)
                card.folders += [path, f"{path}/device", f"/sys/devices/virtual/accel/{name}/device"]
                break
        # 999 is the mask for "no device", so a module of that number could not be named.
        told = card.read("module_id")
        if told is not None and told.isdecimal() and told != NO_MODULE:
            card.number = int(told)
        elif told is not None:
            reason = f"module_id in sysfs must be the number of a slot (got {told!r})"
            card.blame(reason, "reload the habanalabs driver", partial=True)

    def _owns_path(self, card: Card, path: str) -> bool:
        """Return True if a directory of a class belongs to a card.

        Other vendors' devices are there, too (ray#45302).
        """
        told = card.ctx.read(f"{path}/device/pci_addr") or card.ctx.read(f"{path}/pci_addr") or ""
        return told.strip().lower() == card.address

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Ask hl-smi for facts missing in sysfs: a module id, or the product of an ambiguous PCI id."""
        bound = [card for card in cards if card.function and card.function.driver == self.driver]
        # hl-smi is slow and may hang, so it is asked only for facts missing in sysfs.
        if all(card.number is not None and card.entry for card in bound):
            return
        # No rows: the tool is missing. A card without a row stays without a number, which arrange() reports.
        rows = self.tool.rows(ctx, IDENTITY, *QUERY, key=ADDRESS)
        if rows is None:
            yield "sysfs leaves a module id or a product open, and hl-smi is not on the PATH to tell"
            return
        for card in cards:
            row = rows.get(card.address or "")
            if row is None:
                continue
            module, mebibytes = row.count("module_id"), row.count("memory.total")
            if card in bound and card.number is None and str(module) != NO_MODULE:
                card.number = module
            card.model = row.text("name") or ""
            card.memory_bytes = mebibytes << 20 if mebibytes else None
            card.attributes |= {"serial": row.text("serial"), "uuid": row.text("uuid")}

    def identify(self, card: Card) -> None:
        """Drop ``baseboard`` from a product found by name: only a PCI id proves a baseboard."""
        known = card.entry is not None
        super().identify(card)
        if card.entry is None and card.function is not None:
            key = self.catalog.data["assumed"].get(f"{card.function.device:#06x}")
            if (entry := self.catalog.get(key)) is not None:
                card.memory_bytes = card.memory_bytes or entry.memory_bytes
                card.attributes = {**entry.attributes, **card.attributes}
        if not known:
            card.attributes["baseboard"] = None

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Link the devices of a baseboard. Bridges between PCIe cards are plugged in by hand and in no file."""
        # Positions on the board decide the strength of a link.
        board = (card for card in cards if card.attributes.get("baseboard"))
        board_links({card.number: card for card in board if card.number is not None})

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set both variables for a single device. Ranks of several devices set their own module themselves.

        An inherited module id would put every rank on the same device.
        """
        # Written first: it refuses a device without a module id.
        modules = self.write_mask(devices)
        if len(devices) < 2:  # noqa: PLR2004 - one, or none
            return EnvEdits(set={MODULES.variable: modules, OWN.variable: modules})
        return EnvEdits(set={MODULES.variable: modules}, unset=frozenset({OWN.variable}))

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the list, narrowed to the process's own module id if set."""
        listed = self.read_mask(environ, devices)
        own = self.read_mask(environ, devices, OWN)
        if own is None:
            return listed
        text = environ[OWN.variable]
        # The runtime reads a single number, and fails on a list.
        if "," in text:
            raise OWN.refusal(text)
        # The runtime would fail to acquire its module.
        if listed is not None and not {*own} <= {*listed}:
            reason = (
                f"{OWN.variable} must be one of {MODULES.variable} (got {text!r} and {environ[MODULES.variable]!r})"
            )
            raise FaultError(reason, f"unset {OWN.variable}")
        return own

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return node numbers for the container runtime, where an empty list means all, and module ids for the program.

        A single device needs no module id inside, since no other can be opened there; some programs refuse an id not
        below their number of devices (vllm-project/vllm-gaudi#946, lifted by #1096).
        """
        # Numbers of nodes, not module ids: the container runtime passes these nodes on.
        numbers = ",".join(str(device.attributes.get("accel", device.index)) for device in devices)
        inside = {MODULES.variable: self.write_mask(devices)} if len(devices) > 1 else {}
        return {CONTAINER_DEVICES: numbers or "none", **inside}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask hl-smi. An idle device has 512 to 768 MiB in use, by its firmware and the driver."""
        return self.measures_by_device(self.tool.rows(ctx, STATE, *QUERY, key=ADDRESS), devices, *STATE[1:])

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on a missing device of a board, and variables without the expected effect."""
        count = len(detected.devices)
        # A missing device keeps jobs of the whole board from starting.
        if count > 1 and count not in self.counts:
            reason = f"{count} devices are on the PCI bus, and boards have 1, 2, 4 or 8"
            yield warn(reason, "look for a device that fell off the bus in 'dmesg'")
        if CONTAINER_DEVICES in ctx.environ and not in_container(ctx):
            reason = f"{CONTAINER_DEVICES} is set, and outside a container nothing reads it"
            yield warn(reason, f"use {MODULES.variable} with module ids, not node numbers")
        if error := ctx.environ.get("HABANA_RUNTIME_ERROR"):
            reason = f"the habana container runtime reports: {error}"
            yield fail(reason, "start the container again with device numbers that are free and that the host has")


plugin = Gaudi()
