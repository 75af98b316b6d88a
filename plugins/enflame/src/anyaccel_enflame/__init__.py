"""Enflame accelerators (GCUs) for anyaccel: from sysfs, masked by efsmi's index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.kit import Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor
from anyaccel.plugin import Detected, Device, ProbeContext, replace

FOLDERS = ("enflame", "zixiao")
"""The driver's folders below a PCI function; the second belongs to Tencent's variant."""


class Enflame(Vendor):
    """S60 to L600.

    A card has two numbers, mostly equal and not guaranteed to be: efsmi's index, which the runtime's mask takes, and
    the minor number of its node, which the container runtime takes.
    """

    key, resource, kind, brand = "enflame", "GCU", "gcu", "Enflame"
    url = "https://github.com/EnflameTechnology/gcushare"
    driver = "enflame"
    pci_vendors, virtual_functions = (0x1E36,), False
    control_nodes = ("/dev/gcuctl",)
    catalog = Catalog(__file__)
    # The runtime is closed, and its reading of an order, a repetition, an unknown card or an empty value is not public:
    # only an unambiguous list is read or written. A value for "no card" is not known: a number beyond the machine
    # cannot be opened, and an empty value may mean "no mask".
    mask = Mask(
        "TOPS_VISIBLE_DEVICES",
        nothing="999",
        empty="error",
        strict=True,
        blanks=False,
        entries="indexes of efsmi such as '0,1', each once",
    )
    exclusive = "Enflame divides a card into DRS instances alone, which efsmi makes and which are not given out"
    number_name = "efsmi index"
    number_remedy = "make 'efsmi -q' work"
    tool = Tool("efsmi", "/usr/bin/efsmi", package="efsmi, which comes with the driver")

    @property
    def log_hint(self) -> str:
        """A remedy: the driver's messages. The name of the kernel module is not published."""
        return "look for gcu in 'dmesg'"

    def present(self, ctx: ProbeContext) -> bool:
        """Return True if the control node exists."""
        return ctx.exists("/dev/gcuctl")

    def bound(self, card: Card) -> bool:
        """Return True if the driver shows a device for the card; the driver's own name is not published."""
        if any(card.glob(f"{folder}/gcu*") for folder in FOLDERS):
            return True
        driver = card.function.driver if card.function else None
        if driver is None:
            card.blame("no driver is bound to it", "install the Enflame driver")
        else:
            card.blame(
                f"its driver {driver!r} shows no device of it", f"bind it to Enflame's driver, or {self.log_hint}"
            )
        return False

    def read_card(self, card: Card) -> None:
        """Find the node. Its number is the minor number in a file of the driver's folder."""
        for path in (each for folder in FOLDERS for each in card.glob(f"{folder}/gcu*")):
            match = re.fullmatch(r"\d+:(\d+)", card.read(f"{path.removeprefix(f'{card.folders[0]}/')}/dev") or "")
            if match and re.fullmatch(r"gcu\d+", path.rpartition("/")[2]):
                card.attributes["minor"] = int(match[1])
                card.nodes = (f"/dev/gcu{match[1]}",)
        # Nodes of instances do not name their card, so each card may be the divided one.
        if card.ctx.glob("/dev/vgcu*"):
            remedy = "remove the instances with efsmi to use whole cards"
            card.blame("cards of this machine are divided (/dev/vgcu*), and no file tells which", remedy)

    def rows(self, ctx: ProbeContext) -> dict[str, tuple[int, Row]] | None:
        """Return efsmi's rows with its indexes, by PCI address; None if efsmi is not installed."""
        told = self.tool.sections(ctx, r"DEV ID (\d+)", "-q")
        if told is None:
            return None
        found = {}
        for index, row in told.items():
            place = [row.text(name) or "" for name in ("Domain", "Bus", "Dev", "Func")]
            # Four hexadecimal numbers without leading zeros.
            if not all(re.fullmatch("[0-9a-fA-F]{1,8}", part) for part in place):
                reason = f"efsmi must answer the PCI address of card {index} (got {':'.join(place)!r:.80})"
                raise FaultError(reason, "run 'efsmi -q' by hand")
            domain, bus, device, function = (int(part, 16) for part in place)
            found[f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"] = int(index), row
        if not found:
            raise FaultError("efsmi must answer a section 'DEV ID' for each card", "run 'efsmi -q' by hand")
        return found

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Ask efsmi for indexes, memory and health, which no file contains. A single card has the index 0."""
        bound = [card for card in cards if card.nodes]
        # The only card is number 0 for the tool and the runtime.
        if len(cards) == 1 and bound:
            cards[0].number = 0
        rows = self.rows(ctx) if bound else {}
        if rows is None:
            yield "efsmi is not on the PATH, so the indexes that the mask takes, memory and health are unknown"
            return
        for card in bound:
            card.number, row = rows.get(card.address or "", (None, None))
            if row is None:
                card.blame("efsmi does not show it", self.log_hint)
                continue
            card.memory_bytes = (row.count("Total Size") or row.count("Mem Size") or 0) << 20 or None  # old drivers
            card.attributes |= {"serial": row.text("Dev SN"), "uuid": row.text("Dev UUID"), "driver": row.text("Ver")}
            card.model = card.model or row.text("Dev Name") or ""
            # Other words than True and False leave the health unknown.
            card.sound = row.text("Health") == "True"
            if row.text("Health") == "False":
                card.blame("efsmi reports its health as False", f"{self.log_hint} and see 'efsmi -q'")

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Take the version of the driver from efsmi's answer."""
        found = super().detect(ctx)
        # Any card's answer will do: one driver serves the machine.
        versions = (str(device.attributes.get("driver", "")) for device in found.devices) if found else ()
        return replace(found, driver_version=next(filter(None, versions), "")) if found else None

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return node numbers for Enflame's container runtime. A value for none is not known, so none is written."""
        # The container runtime passes nodes on, so it takes the numbers of nodes.
        numbers = ",".join(str(device.attributes.get("minor", device.index)) for device in devices)
        return {"ENFLAME_VISIBLE_DEVICES": numbers} if devices else {}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask efsmi."""
        rows = self.rows(ctx)
        if rows is None:
            return None
        own = {device.id: rows[device.pci_bus_id][1] for device in devices if device.pci_bus_id in rows}
        return {
            key: row.measures(
                "Used Size" if row.text("Used Size") else "Mem Usage", "GCU Usage", "GCU Temp", "Cur Power"
            )
            for key, row in own.items()
        }


plugin = Enflame()
