"""Connections between GPUs: Xe Link by ``xpu-smi``, tiles of a card, switches on the PCI bus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from anyaccel.kit import Card, FaultError, Tool
from anyaccel.plugin import ProbeContext

from anyaccel_intel.level_zero import is_max

SAME_CARD = 100
XE_LINK = 50  # plus the number of lanes; a path over another tile has none, and ranks lowest
SAME_SWITCH = 10
PLACES = {"S": 0, "MDF": SAME_CARD, "XL*": XE_LINK, "PIX": SAME_SWITCH + 2, "PXB": SAME_SWITCH + 1}
FAR = ("PHB", "NODE", "SYS")
XPU_SMI = Tool("xpu-smi", seconds=5.0)
BY_HAND = "run 'xpu-smi topology -m' by hand"

Place = tuple[Any, int]
"""A card, by xpu-smi's number or by PCI address, and the number of a tile."""


def connect(ctx: ProbeContext, cards: Sequence[Card]) -> Iterator[str]:
    """Fill in the links of cards and tiles; return notes."""
    matrix: Mapping[tuple[Place, Place], int] = {}
    if len({card.address for card in cards if is_max(card.model)}) > 1:  # Xe Link is on Max alone
        try:
            matrix = _xe_links(ctx)
        except FaultError as error:
            yield f"Xe Links are unknown: {error}"
    for card in cards:
        card.links = {}
    for one, other in permutations(cards, 2):
        if strength := _strength(one, other, matrix):
            one.links = {**one.links, other.id: strength}


def _strength(one: Card, other: Card, matrix: Mapping[tuple[Place, Place], int]) -> int:
    if one.address == other.address:
        return SAME_CARD
    told = [strength for (near, far), strength in matrix.items() if _is_at(one, near) and _is_at(other, far)]
    # Both below one switch: traffic does not pass through the host.
    above = [set(card.function.bridges) if card.function else set[str]() for card in (one, other)]
    return max([*told, SAME_SWITCH if above[0] & above[1] else 0])


def _is_at(card: Card, place: Place) -> bool:
    """Return True if a place is the tile, or belongs to the card."""
    return card.address == place[0] and card.attributes.get("tile", place[1]) == place[1]


def _xe_links(ctx: ProbeContext) -> dict[tuple[Place, Place], int]:
    """Ask xpu-smi. Its numbers are mapped to cards by PCI address, never by position."""
    listing, matrix = XPU_SMI.json(ctx, "discovery", "-j"), XPU_SMI.ask(ctx, "topology", "-m")
    # Not installed: an optional fact.
    if listing is None or matrix is None:
        return {}
    try:
        addresses = {int(each["device_id"]): str(each["pci_bdf_address"]).lower() for each in listing["device_list"]}
    except (ValueError, TypeError, KeyError) as error:
        reason = f"xpu-smi discovery -j must print a device_list (got {str(listing)[:60]!r})"
        raise FaultError(reason, "run it by hand") from error
    return {
        ((addresses[left], left_tile), (addresses[right], right_tile)): strength
        for ((left, left_tile), (right, right_tile)), strength in parse_matrix(matrix).items()
        if left in addresses and right in addresses
    }


def parse_matrix(text: str) -> dict[tuple[Place, Place], int]:
    """Parse ``xpu-smi topology -m``: a line per tile or card and a column per peer.

    Raises:
        FaultError: The table is damaged or holds an unknown word.
    """
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.strip()]
    columns = [_place(label) for label in (rows[0][:-1] if rows else [""])]
    width = len(columns) + 1
    if len(rows) != width or rows[0][-1] != "CPU Affinity" or any(len(row) != width + 1 for row in rows[1:]):
        reason = f"xpu-smi topology -m must have a line and a column for each GPU (got {len(rows) - 1} lines)"
        raise FaultError(reason, BY_HAND)
    return {
        (_place(label), place): _word(word)
        for label, *words in rows[1:]
        for place, word in zip(columns, words, strict=False)
    }


def _place(label: str) -> Place:
    match = re.fullmatch(r"GPU (\d+)(?:/(\d+))?", label)
    if match is None:
        raise FaultError(f"xpu-smi topology -m must name GPUs as 'GPU card/tile' (got {label[:20]!r})", BY_HAND)
    return int(match[1]), int(match[2] or 0)


def _word(word: str) -> int:
    if word in PLACES:
        return PLACES[word]
    if word in FAR:
        return 0
    if match := re.fullmatch(r"XL(\d+)", word):
        return XE_LINK + int(match[1])
    known = ", ".join((*PLACES, "XL<lanes>", *FAR))
    raise FaultError(f"xpu-smi topology -m must use {known} (got {word!r})", BY_HAND)
