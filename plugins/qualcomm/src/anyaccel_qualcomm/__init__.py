"""Qualcomm Cloud AI accelerators for anyaccel: chips from sysfs, masked by QID."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.kit import Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor
from anyaccel.plugin import ContainerEdits, Device, Fractional, ProbeContext, replace

DERIVED = 100
"""QIDs from here up are parts of a device, made by software."""
RIGHTS = "be root or a member of the group qaic"


class Qualcomm(Vendor):
    """AIC100 and AIC080. A device is a chip (SoC); a card has 1 or 4.

    Its index is the QID of the vendor's user library. The number of its node, and of its MHI controller, differ.
    """

    key, resource, kind, brand, driver = "qualcomm", "QAIC", "qaic", "Qualcomm", "qaic"
    url = "https://quic.github.io/cloud-ai-sdk-pages/latest/"
    # Two PCI classes have been seen. Wireless devices and processors have the same vendor id.
    pci_vendors, pci_known = (0x17CB,), True
    catalog = Catalog(__file__)
    # torch_qaic's reading of an order, a repetition, an unknown QID or an empty value is not public: only an
    # unambiguous list is read or written. A value for "no chip" is not known: a QID beyond the machine cannot be
    # opened, and an empty value may mean "no mask".
    mask = Mask(
        "QAIC_VISIBLE_DEVICES",
        nothing="999",
        empty="error",
        strict=True,
        blanks=False,
        entries="QIDs such as '0,1', each once",
    )
    sharing = Fractional.SHARED
    number_name = "QID"
    number_remedy = f"make 'qaic-util -q' work ({RIGHTS})"
    node_closed = RIGHTS
    tool = Tool(
        "/opt/qti-aic/tools/qaic-util", "qaic-util", package="the Cloud AI Platform SDK", failed=f"{RIGHTS}, and run it"
    )

    def read_card(self, card: Card) -> None:
        """Find the node; drivers older than the kernel's accel class show none."""
        for path in card.glob("accel/accel*"):
            if re.fullmatch(r"accel\d+", name := path.rpartition("/")[2]):
                card.nodes = (f"/dev/accel/{name}",)
                node = card.ctx.node(card.nodes[0])
                card.attributes["group"] = node.group if node else None

    def rows(self, ctx: ProbeContext) -> dict[str, dict[int, Row]] | None:
        """Return qaic-util's rows by PCI address and QID; None if it is not installed."""
        told = self.tool.sections(ctx, r"QID (\d+)", "-q")
        if told is None:
            return None
        found: dict[str, dict[int, Row]] = {}
        for qid, row in told.items():
            address = row.text("PCI Address")
            if address is None:
                raise FaultError(f"qaic-util tells no PCI address of QID {qid}", RIGHTS)
            # Parts of a divided chip have its PCI address.
            found.setdefault(address.lower(), {})[int(qid)] = row
        if not found:
            raise FaultError("qaic-util must answer a section 'QID' for each device", "run 'qaic-util -q' by hand")
        return found

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Ask qaic-util for QIDs, memory, state and board, which no file contains."""
        bound = [card for card in cards if card.nodes]
        rows = self.rows(ctx) if bound else {}
        if rows is None:
            yield "qaic-util is not installed, so QIDs, memory and state of the chips are unknown"
            return
        boards = Counter(
            row.text("Board serial") for named in rows.values() for qid, row in named.items() if qid < DERIVED
        )
        for card in bound:
            named = rows.get(card.address or "", {})
            # A divided chip appears once as itself, and once per part.
            whole = sorted(qid for qid in named if qid < DERIVED)
            if not whole:
                card.blame("qaic-util does not show it", self.log_hint)
                continue
            row = named[whole[0]]
            self.judge_state(card, row.text("Status"))
            if len(named) > len(whole):
                derived = ", ".join(str(qid) for qid in sorted(named) if qid >= DERIVED)
                card.blame(f"it is divided (QID {derived})", "remove these devices to use it whole")
            card.number, size = whole[0], row.count("Dram Total") or 0
            card.memory_bytes = size << 20 or None
            board, parts = row.text("Board serial"), row.count("Nsp Total")
            card.attributes |= {"board": board, "nsp": parts, "hw_serial": row.text("HW Serial")}
            card.model = self.card_name(card, boards[board] if board else 0, size, complete=len(bound) == len(rows))

    def judge_state(self, card: Card, state: str | None) -> None:
        """Set the health by qaic-util's state; a user without rights also sees ``Error``."""
        card.sound = state in {"Ready", "Busy"}
        if not card.sound:
            again = f"{RIGHTS}; if it stays, write 1 to soc_reset of its MHI device, which ends every job on it"
            card.blame(f"qaic-util reports its status as {state or 'unknown'}", again)

    def card_name(self, card: Card, chips: int, size: int, *, complete: bool) -> str:
        """Name the card of an AIC100, by memory in MiB and number of chips on the board."""
        if card.function is None or card.function.device != 0xA100:  # noqa: PLR2004 - another family
            return ""
        if chips == 4:  # noqa: PLR2004 - the one board that has several
            return "AIC100-Ultra"
        large = size >= 24 << 10
        if large:
            # With chips missing from the list, an Ultra with one visible chip looks like a Pro.
            return "AIC100-Pro" if chips == 1 and complete else "AIC100"
        return "AIC100-Standard" if size >= 12 << 10 else "AIC100"

    def identify(self, card: Card) -> None:
        """Find the product by qaic-util's facts; the PCI id is the same for the whole family."""
        card.entry = self.catalog.by_name(card.model) or card.entry
        super().identify(card)

    def board(self, card: Card) -> object:
        """Return the serial number of the board; its chips share a switch."""
        return card.attributes.get("board")

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """Add the group that owns the nodes, for users other than root inside."""
        groups = {group for device in devices if isinstance(group := device.attributes.get("group"), int) and group}
        return replace(super().container(devices), groups=tuple(sorted(groups)))

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask qaic-util. Power is the whole board's and left out; utilization is not reported."""
        rows = self.rows(ctx)
        if rows is None:
            return None
        found: dict[str, Measures] = {}
        for device in devices:
            if (row := rows.get(device.pci_bus_id or "", {}).get(device.index)) is not None:
                size, free = row.count("Dram Total"), row.count("Dram Free")
                found[device.id] = row.measures(celsius="SoC temperature(degree C)")
                found[device.id]["memory_used_bytes"] = None if size is None or free is None else (size - free) << 20
        return found


plugin = Qualcomm()
