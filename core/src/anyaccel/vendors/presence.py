"""Rule out vendors that are certainly not on a machine, by data beside each plug-in, without an import.

A plug-in's package may hold a file ``presence.json``; a plug-in of one module ``acme.py`` may have
``acme.presence.json`` beside it:

    {"resource": "APU",
     "pci": [{"vendor": "1ace", "classes": ["0302", "1200"]}],
     "paths": ["/dev/acme*", "/sys/module/acme", "~/.acme/runtime"],
     "variables": ["ACME_NAME"],
     "names": ["Acme-One", "A1"]}

A vendor may be on the machine when a PCI function has the vendor id and, if classes are listed, a listed class (base
class and subclass); when a path exists; or when a variable is set. Doubt counts as presence: no file, a faulty file, a
machine whose PCI functions cannot be listed. ``names`` are the products of the vendor. No other vendor may use such a
name as a tag, also where the vendor is absent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from anyaccel.model import PCI_DEVICES, Value, read, replace
from anyaccel.vendors.discovery import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.probe import Facts

FILE_NAME = "presence.json"


class PciSign(Value):
    """A PCI vendor id, with the classes that count; no class stands for any. All are four hexadecimal digits."""

    vendor: str
    classes: tuple[str, ...] = ()

    def fits(self, vendor: int, class_code: int | None) -> bool:
        """Return whether a PCI function has the vendor id and a class that counts; an unknown class does."""
        if int(self.vendor, 16) != vendor:
            return False
        return not self.classes or class_code is None or class_code in {int(each, 16) for each in self.classes}


class Presence(Value):
    """The signs by which a vendor is recognised: the content of a presence file.

    Attributes:
        resource: Resource name of the devices; empty when not given.
        pci: Signs on the PCI bus.
        paths: Shell patterns, absolute or below the user's home (``~/``); an existing path is a sign.
        variables: Names; a variable that is set is a sign.
        names: Names and aliases of the products, in lower case; None when not given.
    """

    resource: str = ""
    pci: tuple[PciSign, ...] = ()
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    names: frozenset[str] | None = None

    def list_names(self, vendor: str) -> set[str]:
        """Return the known names of the vendor's devices in requests, in lower case."""
        return {vendor, self.resource.casefold(), *(self.names or ())}


def read_presence(source: Source, folders: Mapping[str, Sequence[str]] | None = None) -> Presence | None:
    """Read the signs of a vendor; None when the plug-in has no such file.

    Args:
        source: The plug-in.
        folders: Known directories of packages, by name.

    Raises:
        ValueError: When the file has faults; the message names each.
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
    return _read(path, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None  # a FIFO would block


@functools.lru_cache(maxsize=128)
def _read(path: str, _: int) -> Presence | None:
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(1 << 16))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON ({error})") from error
    said, found = read(Presence, data, FILE_NAME)
    if found := found or list(_rule_faults(said)):
        raise ValueError(f"{path}: {'; '.join(found)}")
    return said if said.names is None else replace(said, names=frozenset(map(str.casefold, said.names)))


def _file_of(name: str) -> str:
    """Return the path of a package's presence file, whether it exists or not; empty when no package is found."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is None:
            continue
        for directory in spec.submodule_search_locations or ():
            return os.path.join(directory, FILE_NAME)
        return f"{(spec.origin or '').removesuffix('.py')}.{FILE_NAME}"
    return ""


def _folders(names: set[str]) -> dict[str, list[str]]:
    """Return the directories of packages on the module path, by package.

    Each entry of the path is listed once: with 19 plug-ins, that takes 2.5 ms instead of the 5.6 ms of the import
    finders.
    """
    found: dict[str, list[str]] = {}
    path: list[object] = [*sys.path]
    for entry in path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):
                for name in names.intersection(os.listdir(entry or ".")):
                    found.setdefault(name, []).append(f"{entry or '.'}/{name}")
    return found


def read_presences(sources: Sequence[Source]) -> dict[str, Presence | None]:
    """Read the signs of each vendor; None where a plug-in has no file, or a faulty file."""
    folders = _folders(set(map(_package, sources)))
    found: dict[str, Presence | None] = {}
    for source in sources:
        found[source.vendor] = None
        with contextlib.suppress(ValueError):  # the conformance suite reports the fault to the author
            found[source.vendor] = read_presence(source, folders)
    return found


def select_present(
    said: Mapping[str, Presence | None], facts: Facts, environ: Mapping[str, str]
) -> dict[str, Presence | None]:
    """Select the vendors that may be on a machine, by the signs that the machine shows.

    Args:
        said: Signs by vendor; see :func:`read_presences`.
        facts: The machine.
        environ: The environment of the detection.
    """
    home = environ.get("HOME", "")
    ids = {int(sign.vendor, 16) for signs in said.values() if signs for sign in signs.pci}
    list_functions = functools.cache(lambda: _functions(facts, ids))  # once, and only if no variable decides

    def shows(signs: Presence) -> bool:
        if any(name in environ for name in signs.variables) or _on_bus(signs, list_functions()):
            return True
        # A runtime without a driver may be installed for a user alone.
        paths = (f"{home}{path[1:]}" if path.startswith("~/") else path for path in signs.paths)
        return any(map(facts.glob, filter(os.path.isabs, paths)))

    return {vendor: signs for vendor, signs in said.items() if signs is None or shows(signs)}


def select_makers(said: Mapping[str, Presence | None], products: Iterable[str]) -> Mapping[str, Presence | None]:
    """Select the vendors that may simulate some products; all vendors if a product has no known vendor.

    Args:
        said: Signs by vendor; see :func:`read_presences`.
        products: Names of products, or of parts of products.
    """
    found: dict[str, Presence | None] = {}
    for product in map(str.casefold, products):
        names = {product, product.partition("/")[0]}
        known = {vendor: signs for vendor, signs in said.items() if signs and signs.names and names & signs.names}
        if not known:  # an older plug-in without "names" may know the product
            return said
        found |= known
    return found | {vendor: signs for vendor, signs in said.items() if signs is None or signs.names is None}


def _functions(facts: Facts, ids: Collection[int]) -> set[tuple[int, int | None]] | None:
    """Return vendor id and class of each PCI function; None without a list of functions.

    The class is None where it is unknown, and for a vendor id that is not among ``ids``: most functions need one read.
    """
    found: set[tuple[int, int | None]] = set()
    try:
        for path in facts.glob(f"{PCI_DEVICES}/*"):
            told = facts.read(f"{path}/vendor")
            if told is not None:
                vendor = int(told, 16)
                code = facts.read(f"{path}/class") if vendor in ids else None
                found.add((vendor, None if code is None else int(code, 16) >> 8))
    except (OSError, ValueError):
        return None
    return found or None  # an empty bus is more likely unreadable than real


def _on_bus(declared: Presence, functions: set[tuple[int, int | None]] | None) -> bool:
    if functions is None:
        return bool(declared.pci)
    return any(sign.fits(vendor, code) for sign in declared.pci for vendor, code in functions)


def _rule_faults(said: Presence) -> Iterator[str]:
    """Yield the faults of a file whose fields have the right types."""
    for number in (each for entry in said.pci for each in (entry.vendor, *entry.classes)):
        if not re.fullmatch("[0-9A-Fa-f]{4}", number):
            yield f"'pci' must give ids and classes of four hexadecimal digits (got {number!r})"
    if not (said.pci or said.paths or said.variables):
        yield "it must have 'pci', 'paths' or 'variables', or the vendor would never be asked"
