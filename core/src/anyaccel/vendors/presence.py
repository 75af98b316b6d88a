"""Which vendors are certainly not on a machine, said by data that lies beside each plug-in and is never imported.

A plug-in's package may hold a file ``presence.json``; a plug-in of one module ``acme.py`` may have
``acme.presence.json`` beside it:

    {"resource": "APU",
     "pci": [{"vendor": "1ace", "classes": ["0302", "1200"]}],
     "paths": ["/dev/acme*", "/sys/module/acme"],
     "variables": ["ACME_NAME"],
     "names": ["Acme-One", "A1"]}

A vendor may be on the machine when a PCI function has the vendor id, and one of the classes (base class and subclass)
where some are listed; when a path exists; or when a variable is set. Anything that cannot be told counts as a yes: no
file, a file that is not understood, a machine whose PCI functions cannot be listed. ``names`` are those of the vendor's
products, which no other vendor's tag may be, also where the vendor is not on the machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.model import Value
from anyaccel.probe.context import PCI_DEVICES, Facts
from anyaccel.vendors.discovery import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILE_NAME = "presence.json"
ID_DIGITS = 4
KEYS = {"resource", "pci", "paths", "variables", "names"}


class Presence(Value):
    """By what a vendor is recognised.

    Attributes:
        resource: Resource name of its devices; empty when it is not said.
        pci: Vendor ids, each with classes of which one must match; any where none is listed.
        paths: Shell patterns of paths of which one must exist.
        variables: Variables of which one must be set.
        names: Names and aliases of its products, in lower case; None when they are not said.
    """

    resource: str = ""
    pci: tuple[tuple[int, frozenset[int]], ...] = ()
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    names: frozenset[str] | None = None


def presence(source: Source, folders: Mapping[str, Sequence[str]] | None = None) -> Presence | None:
    """Read by what a vendor is recognised; None when its plug-in does not say.

    Args:
        source: The plug-in.
        folders: Directories in which packages may be, by name, where they have been looked for already.

    Raises:
        ValueError: When the file is not understood; names every fault.
    """
    name = _package(source)
    for folder in (folders or {}).get(name, ()):
        if (known := _beside(f"{folder}/{FILE_NAME}")) is not None:
            return known
    return _beside(_file_of(name))


def _package(source: Source) -> str:
    return source.target.partition(":")[0].partition(".")[0]


def _beside(path: str) -> Presence | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _read(path, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


@functools.lru_cache(maxsize=128)
def _read(path: str, _: int) -> Presence | None:
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(1 << 16))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON ({error})") from error
    found = list(_faults(data))
    if found:
        raise ValueError(f"{path}: {'; '.join(found)}")
    return Presence(
        resource=data.get("resource", ""),
        pci=tuple(
            (int(entry["vendor"], 16), frozenset(int(each, 16) for each in entry.get("classes", ())))
            for entry in data.get("pci", ())
        ),
        paths=tuple(data.get("paths", ())),
        variables=tuple(data.get("variables", ())),
        names=frozenset(map(str.casefold, data["names"])) if "names" in data else None,
    )


def _file_of(name: str) -> str:
    """Where the presence file of a package is, if it has one; empty when the package is not found."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is None:
            continue
        for directory in spec.submodule_search_locations or ():
            return os.path.join(directory, FILE_NAME)
        return f"{(spec.origin or '').removesuffix('.py')}.{FILE_NAME}"
    return ""


def _folders(names: set[str]) -> dict[str, list[str]]:
    """Directories of the names of packages on the module path.

    Each entry of the path is listed once. A finder would look at every entry once for each package.
    """
    found: dict[str, list[str]] = {}
    path: list[object] = [*sys.path]
    for entry in path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):
                for name in names.intersection(os.listdir(entry or ".")):
                    found.setdefault(name, []).append(f"{entry or '.'}/{name}")
    return found


def declared(sources: Sequence[Source]) -> dict[str, Presence | None]:
    """Read what each plug-in says of its vendor; None where it says nothing that is understood."""
    folders = _folders(set(map(_package, sources)))
    found: dict[str, Presence | None] = {}
    for source in sources:
        found[source.vendor] = None
        with contextlib.suppress(ValueError):  # the conformance suite tells its author
            found[source.vendor] = presence(source, folders)
    return found


def possible(
    said: Mapping[str, Presence | None], facts: Facts, environ: Mapping[str, str]
) -> dict[str, Presence | None]:
    """The vendors that may be on a machine, with what their plug-ins say.

    Args:
        said: What each plug-in says; see :func:`declared`.
        facts: The machine.
        environ: The environment in which detection is asked for.
    """
    functions: set[tuple[int, int | None]] | None = None
    asked = False
    found: dict[str, Presence | None] = {}
    for vendor, signs in said.items():
        if signs is None or any(name in environ for name in signs.variables):
            found[vendor] = signs
            continue
        if not asked:
            functions, asked = _functions(facts), True
        if _on_bus(signs, functions) or any(map(facts.glob, signs.paths)):
            found[vendor] = signs
    return found


def makers(said: Mapping[str, Presence | None], products: Iterable[str]) -> Mapping[str, Presence | None]:
    """Return the vendors that may know some products, with what their plug-ins say; all where a product is no vendor's.

    Args:
        said: What each plug-in says; see :func:`declared`.
        products: Names of products, or of parts of them.
    """
    found: dict[str, Presence | None] = {}
    for product in map(str.casefold, products):
        names = {product, product.partition("/")[0]}
        known = {vendor: signs for vendor, signs in said.items() if signs and signs.names and names & signs.names}
        if not known:
            return said
        found |= known
    return found | {vendor: signs for vendor, signs in said.items() if signs is None or signs.names is None}


def _functions(facts: Facts) -> set[tuple[int, int | None]] | None:
    """Vendor id and class of the machine's PCI functions, None for an unknown class; None when they cannot be told."""
    found: set[tuple[int, int | None]] = set()
    try:
        for path in facts.glob(f"{PCI_DEVICES}/*"):
            vendor = facts.read(f"{path}/vendor")
            if vendor is not None:
                code = facts.read(f"{path}/class")
                found.add((int(vendor, 16), None if code is None else int(code, 16) >> 8))
    except (OSError, ValueError):
        return None
    return found or None


def _on_bus(declared: Presence, functions: set[tuple[int, int | None]] | None) -> bool:
    if functions is None:
        return bool(declared.pci)
    return any(
        vendor == wanted and (not classes or code is None or code in classes)
        for wanted, classes in declared.pci
        for vendor, code in functions
    )


def _faults(data: Any) -> Any:
    if not isinstance(data, dict):
        yield f"it must be an object (got a {type(data).__name__})"
        return
    for name in sorted(data.keys() - KEYS):
        yield f"it must not have {name!r} (it may have {', '.join(sorted(KEYS))})"
    if not isinstance(data.get("resource", ""), str):
        yield "'resource' must be text"
    for name in ("paths", "variables", "names"):
        if not _texts(data.get(name, [])):
            yield f"{name!r} must be a list of texts"
    entries = data.get("pci", [])
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        yield '"pci" must be a list of {"vendor": ID, "classes": [CLASS, ...]}, each of four hexadecimal digits'
    if not any(data.get(name) for name in ("pci", "paths", "variables")):
        yield "it must have 'pci', 'paths' or 'variables', or the vendor would never be asked"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each for each in value)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry.keys() <= {"vendor", "classes"}:
        return False
    classes = entry.get("classes", [])
    return isinstance(classes, list) and all(map(_is_id, [entry.get("vendor"), *classes]))


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and len(value) == ID_DIGITS and set(value.lower()) <= set("0123456789abcdef")
