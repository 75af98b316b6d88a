"""What a worker's environment must say about Intel GPUs, and what a given one leaves visible.

The mask works in the Level Zero driver, the SYCL selector on what the mask has left, renumbered. Both numbers and
their order are fixed beside the mask, so that it means the same in the worker as here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.plugin import ContainerEdits, Device, EnvContext, EnvEdits, Mount, Term

from anyaccel_intel import affinity, layout, selector
from anyaccel_intel.affinity import MASK
from anyaccel_intel.layout import HIERARCHY, PCI_ORDER, Card, Slot

SELECTOR = "ONEAPI_DEVICE_SELECTOR"
VARIABLES = (MASK, HIERARCHY, PCI_ORDER, SELECTOR)
BY_PATH = "/dev/dri/by-path"


def edits(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Make a worker see exactly some devices, in the runtime's order: masks cannot change it."""
    everything = ctx.devices or tuple(devices)
    ordered = [device.id for _, _, device in layout.units(layout.cards(everything, pci_order=False))]
    pci_order = ordered != [device.id for device in sorted(everything, key=lambda device: device.index)]
    found = layout.cards(everything, pci_order=pci_order)
    combined = ctx.environ.get(HIERARCHY) == "COMBINED"
    variables, shown = _mask({device.id for device in devices}, found, combined=combined)
    variables[PCI_ORDER] = str(int(pci_order))
    rival = _selector(ctx.environ.get(SELECTOR), shown, preload=_preload(ctx.environ))
    return EnvEdits(set=variables | ({SELECTOR: rival} if rival else {}))


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Say which devices an environment leaves visible: those of which it shows every tile.

    Raises:
        ValueError: When the driver, or the SYCL runtime, would refuse a value.
    """
    mask, chosen = environ.get(MASK), environ.get(SELECTOR)
    if affinity.unset(mask) and chosen is None:
        return None
    found = layout.cards(devices, pci_order=layout.pci_ordered(environ))
    shown = affinity.remaining(mask, found, composite=layout.composite(environ, devices))
    if chosen is not None and shown:
        shown = _selected(chosen, shown, preload=_preload(environ))
    slots = {slot for each in shown for slot in each}
    return [device.id for card, tile, device in layout.units(found) if card.slots(tile) <= slots]


def refusal(term: Term, devices: Sequence[Device]) -> str | None:  # noqa: ARG001 - the quantity does not matter
    """Say why a set of devices cannot work together, or None."""
    kinds = {device.attributes.get("integrated") is True for device in devices}
    if len(kinds) > 1:
        return (
            "an integrated GPU is never given together with a discrete card, since PyTorch then shows the discrete"
            " cards alone; ask for one kind by its tag, for example Intel-iGPU"
        )
    return None


def container(devices: Sequence[Device]) -> ContainerEdits:
    """Say what a container needs: inside, the numbers begin at 0 with the cards that it gets.

    The folder of links by PCI address comes along whole, because the driver finds devices through it and single
    links have broken PyTorch (intel/intel-device-plugins-for-kubernetes#2158).
    """
    found = layout.cards(devices, pci_order=False)
    variables, _ = _mask({device.id for device in devices}, found, combined=False)
    nodes = dict.fromkeys(node for device in devices for node in device.nodes)
    mounts = (Mount(source=BY_PATH, target=BY_PATH),) if nodes else ()
    return ContainerEdits(nodes=tuple(nodes), mounts=mounts, env=variables | {PCI_ORDER: "0"})


def _mask(ids: set[str], found: Sequence[Card], *, combined: bool) -> tuple[dict[str, str], list[int]]:
    """The mask for some devices with its hierarchy, and the number of tiles of each device that it leaves."""
    units = layout.units(found)
    whole = any(tile is None and card.tiles > 1 for card, tile, _ in units)
    divided = any(card.tiles > 1 for card in found)
    entries: list[str] = []
    shown: dict[int | Slot, int] = {}
    for card, tile, device in units:
        if device.id not in ids:
            continue
        if whole:
            entries.append(f"{card.number}" if tile is None else f"{card.number}.{tile}")
            shown[card.number] = shown.get(card.number, 0) + len(card.slots(tile))
        else:
            entries.append(str(card.first + (tile or 0)))
            shown[card.number, tile or 0] = 1
    variables = {MASK: ",".join(entries) or affinity.NOTHING}
    if divided:
        variables[HIERARCHY] = "COMPOSITE" if whole else "COMBINED" if combined else "FLAT"
    return variables, list(shown.values())


def _selector(chosen: str | None, shown: Sequence[int], *, preload: bool) -> str | None:
    """A selector in place of an inherited one that would hide some of the devices, or None where it may stay."""
    if chosen is None or not shown:
        return None
    others: list[str] = []
    try:
        parsed = selector.parse(chosen)
    except ValueError:
        pass  # every SYCL program would end with an exception
    else:
        whole = {(position, None) for position in range(len(shown))}
        if whole <= set(selector.admitted(parsed, shown, preload_filter=preload)):
            return None
        others = [term.text for term in parsed.terms if not term.negative and term.backend not in ("*", "level_zero")]
    return ";".join([f"level_zero:{','.join(str(position) for position in range(len(shown)))}", *others])


def _selected(chosen: str, shown: Sequence[list[Slot]], *, preload: bool) -> list[list[Slot]]:
    admitted = selector.admitted(selector.parse(chosen), [len(slots) for slots in shown], preload_filter=preload)
    return [shown[position] if part is None else [shown[position][part]] for position, part in admitted]


def _preload(environ: Mapping[str, str]) -> bool:
    return environ.get("UR_LOADER_PRELOAD_FILTER", "1") != "0"
