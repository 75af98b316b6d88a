"""How well GPUs are connected: Xe Link as ``xpu-smi`` shows it, tiles of one card, switches on the PCI bus."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from anyaccel.plugin import CommandTimeoutError, Device, ProbeContext

from anyaccel_intel.layout import is_max

SAME_CARD = 100
XE_LINK = 50  # plus the number of lanes; a path over another tile has no number, and ranks lowest
SAME_SWITCH = 10
PLACES = {"S": 0, "MDF": SAME_CARD, "XL*": XE_LINK, "PIX": SAME_SWITCH + 2, "PXB": SAME_SWITCH + 1}
FAR = ("PHB", "NODE", "SYS")
SECONDS = 5.0

Place = tuple[int, int]
"""Number that xpu-smi gives a card, and number of a tile."""


def links(
    devices: Sequence[Device], bridges: Mapping[str, Sequence[str]], ctx: ProbeContext
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Rank the connections between devices.

    Args:
        devices: The devices.
        bridges: PCI bridges above each PCI address, root port first.
        ctx: The machine.

    Returns:
        Strengths by device and peer, and what people should know.
    """
    notes: list[str] = []
    matrix: dict[tuple[tuple[str, int], tuple[str, int]], int] = {}
    if len({device.pci_bus_id for device in devices if is_max(device)}) > 1:  # Xe Link is on Max alone
        try:
            matrix = _xe_links(ctx)
        except (CommandTimeoutError, OSError, ValueError) as error:
            notes.append(f"Xe Links are unknown: {error}")
    found: dict[str, dict[str, int]] = {device.id: {} for device in devices}
    for one in devices:
        for other in devices:
            strength = 0 if one is other else _strength(one, other, bridges, matrix)
            if strength:
                found[one.id][other.id] = strength
    return found, notes


def _strength(
    one: Device,
    other: Device,
    bridges: Mapping[str, Sequence[str]],
    matrix: Mapping[tuple[tuple[str, int], tuple[str, int]], int],
) -> int:
    near, far = one.pci_bus_id or "", other.pci_bus_id or ""
    if near == far:
        return SAME_CARD
    told = [
        strength
        for ((left, left_tile), (right, right_tile)), strength in matrix.items()
        if (left, right) == (near, far)
        and one.attributes.get("tile", left_tile) == left_tile
        and other.attributes.get("tile", right_tile) == right_tile
    ]
    shared = set(bridges.get(near, ())) & set(bridges.get(far, ()))
    return max([*told, SAME_SWITCH if shared else 0])


def _xe_links(ctx: ProbeContext) -> dict[tuple[tuple[str, int], tuple[str, int]], int]:
    """Ask xpu-smi; its numbers of cards are joined to ours by PCI address, never by position."""
    answers = [
        ctx.run(argv, timeout=SECONDS) for argv in (["xpu-smi", "discovery", "-j"], ["xpu-smi", "topology", "-m"])
    ]
    if answers[0] is None or answers[1] is None:
        return {}
    for answer in answers:
        if answer is not None and answer.returncode != 0:
            raise ValueError(f"xpu-smi ended with {answer.returncode}: {(answer.stderr or answer.stdout).strip()[:80]}")
    addresses = parse_discovery(answers[0].stdout)
    return {
        ((addresses[left], left_tile), (addresses[right], right_tile)): strength
        for ((left, left_tile), (right, right_tile)), strength in parse_matrix(answers[1].stdout).items()
        if left in addresses and right in addresses
    }


def parse_discovery(text: str) -> dict[int, str]:
    """Parse ``xpu-smi discovery -j`` into PCI addresses by the tool's own numbers.

    Raises:
        ValueError: When it is no such output; the tool prints plain text when it finds nothing.
    """
    try:
        listed = json.loads(text)["device_list"]
        return {int(entry["device_id"]): str(entry["pci_bdf_address"]).lower() for entry in listed}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"xpu-smi discovery -j must print a device_list in JSON (got {text.strip()[:60]!r})"
        ) from error


def parse_matrix(text: str) -> dict[tuple[Place, Place], int]:
    """Parse ``xpu-smi topology -m``, of one line per tile or card and one column per peer.

    Raises:
        ValueError: When the table is damaged or holds a word that nobody knows.
    """
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.strip()]
    columns = _places(rows[0][:-1] if rows else [])
    if len(rows) != len(columns) + 1 or rows[0][-1] != "CPU Affinity":
        raise ValueError(f"xpu-smi topology -m must have a line and a column for each GPU (got {len(rows) - 1} lines)")
    found: dict[tuple[Place, Place], int] = {}
    for label, *cells in rows[1:]:
        if len(cells) != len(columns) + 1:
            raise ValueError(f"xpu-smi topology -m must have {len(columns)} GPUs for {label} (got {len(cells) - 1})")
        here = _places([label])[0]
        found.update({(here, place): _word(word) for place, word in zip(columns, cells, strict=False)})
    return found


def _places(labels: Sequence[str]) -> list[Place]:
    matches = [re.fullmatch(r"GPU (\d+)(?:/(\d+))?", label) for label in labels]
    if not matches or None in matches:
        raise ValueError(f"xpu-smi topology -m must name GPUs as 'GPU card/tile' (got {list(labels)[:3]})")
    return [(int(match[1]), int(match[2] or 0)) for match in matches if match]


def _word(word: str) -> int:
    if word in PLACES:
        return PLACES[word]
    if word in FAR:
        return 0
    if match := re.fullmatch(r"XL(\d+)", word):
        return XE_LINK + int(match[1])
    raise ValueError(f"xpu-smi topology -m must use {', '.join(PLACES)}, XL<lanes> or {', '.join(FAR)} (got {word!r})")
