"""C29: every key of a catalog of the kit has the right form, and no product hides another."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anyaccel.kit import Catalog
from anyaccel.text import shown

from anyaccel_testing.check import NotApplicable, demand
from anyaccel_testing.checks.loading import load_target
from anyaccel_testing.subject import Subject

LARGEST_ID = 0xFFFF
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SIZE = re.compile(r"\d+ ?([KMG]i)?B")


def check_catalog(subject: Subject) -> None:
    """C29: Every key of products.toml has the right form, and no product hides another."""
    subject.plugin  # noqa: B018 - raises NotApplicable if it cannot be loaded
    catalog = getattr(load_target(subject), "catalog", None)
    if not isinstance(catalog, Catalog):
        raise NotApplicable("the plug-in has no catalog of the kit")
    demand(f"{catalog.path}: {fault}" for fault in _find_faults(catalog))


def _find_faults(catalog: Catalog) -> Iterator[str]:
    try:
        data = catalog.data
    except (OSError, ValueError) as error:
        yield str(error)
        return
    products = data.get("products", [])
    if not isinstance(products, list) or not all(isinstance(product, Mapping) for product in products):
        yield "'products' must be tables, each below [[products]]"
        return
    tables = {"defaults": data.get("defaults", {})}
    for number, product in enumerate(products, start=1):
        tables[f"product {number} ({product.get('model', product.get('key', 'without a model'))})"] = product
    faults = [fault for where, table in tables.items() for fault in _find_form_faults(where, table)]
    yield from faults
    if faults:
        return  # the catalog itself stops at the first of them
    try:
        _ = catalog.entries, catalog.ignored, catalog.knows(0)
    except (TypeError, ValueError) as error:
        yield str(error)
        return
    yield from _find_hidden(catalog)


def _find_form_faults(where: str, table: Any) -> Iterator[str]:
    if not isinstance(table, Mapping):
        yield f"{where} must be a table (got {shown(table)})"
        return
    for key, value in table.items():
        if key in FORMS:
            accepts, form = FORMS[key]
            if not accepts(value):
                yield f"{where}: {key!r} must be {form} (got {shown(value)})"
        elif close := difflib.get_close_matches(key, FORMS, n=1, cutoff=0.75):
            # A vendor may have keys of its own, so only what looks like a slip is refused.
            yield f"{where}: {key!r} is no key of the kit; did you mean {close[0]!r}?"


def _find_hidden(catalog: Catalog) -> Iterator[str]:
    """Yield products that no device can ever be, since an earlier one has the same PCI id."""
    owners: dict[tuple[int, str, int], str] = {}
    for entry in catalog.entries:
        facts = entry.facts
        kinds: list[tuple[str, Any]] = [("revision", each) for each in facts.get("revisions", ())]
        kinds += [("subsystem", each) for each in facts.get("subsystems", ())]
        for device in (*facts.get("pci", ()), *facts.get("virtual", ())):
            for kind, number in kinds or [("", 0)]:
                owner = owners.setdefault((device, kind, number), entry.model)
                if owner != entry.model:
                    same = f" with the {kind} {number:#x}" if kind else ""
                    yield (
                        f"{entry.model!r} is never detected: {owner!r} has the PCI id {device:#06x}{same} too;"
                        " tell them apart by 'revisions' or 'subsystems', or remove one"
                    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(accepts: Callable[[Any], bool], *, least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(accepts, value))


def _is_id(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= LARGEST_ID


def _is_count(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_tag(value: Any) -> bool:
    return isinstance(value, str) and TAG.fullmatch(value) is not None


def _is_size(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, str) and SIZE.fullmatch(value) is not None)


def _is_pattern(value: Any) -> bool:
    try:
        return _is_text(value) and bool(re.compile(value))
    except re.error:
        return False


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_names(value: Any) -> bool:
    return _is_table(value) or _is_list(_is_text)(value)


_IDS = (_is_list(_is_id), "a list of PCI ids such as [0x744c]")
_TEXT = (_is_text, "text")
_TABLE = (_is_table, "a table")
FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "key": (lambda value: isinstance(value, str), "text"),
    "like": _TEXT,
    "model": _TEXT,
    "tags": (_is_list(_is_tag, least=1), "a list of tags, of letters, digits and '.', '_', '-'"),
    "aliases": (_is_list(_is_tag), "a list of tags, of letters, digits and '.', '_', '-'"),
    "names": (_is_pattern, "a regular expression"),
    "memory": (_is_size, "bytes, or text such as '96GiB' or '98304MiB'"),
    "pci": _IDS,
    "virtual": _IDS,
    "revisions": (_is_list(_is_id), "a list of numbers such as [0xc8]"),
    "subsystems": (_is_list(_is_number), "a list of numbers such as [0x16a1]"),
    "counts": (_is_list(_is_count, least=1), "a list of numbers above 0"),
    "link": (lambda value: _is_number(value) and value >= 0, "a number from 0"),
    "slots": (_is_count, "a number above 0"),
    "listed": (lambda value: isinstance(value, bool), "true or false"),
    "id_template": _TEXT,
    "node_templates": (_is_list(lambda value: _is_text(value) and value.startswith("/")), "a list of absolute paths"),
    "attributes": _TABLE,
    "parts": _TABLE,
    "instance_types": _TABLE,
    "constants": (_is_names, "a list of names, or a table of names and tags"),
}
"""By key, what accepts a value, and the form in words."""
