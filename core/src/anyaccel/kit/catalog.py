"""The products of a vendor, in a TOML file beside the plug-in. ``docs/reference/kit.md`` lists the keys of the file."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

from anyaccel._typing import NamedTuple
from anyaccel.kit.fault import Fault
from anyaccel.kit.files import try_query
from anyaccel.plugin import ProbeContext, Product

PCI_IDS = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids", "/var/lib/pciutils/pci.ids")
NOT_INHERITED = ("pci", "virtual", "revisions", "subsystems", "names", "listed", "constants", "instance_types")
"""Keys that an entry does not inherit from the entry named by ``like``."""
_SIZE = r"(\d+) ?([KMG]i)?B"
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_PRODUCT = ("id_template", "link", "attributes", "instance_types", "slots", "parts")


class Entry(NamedTuple):
    """A product of a catalog.

    Attributes:
        key: Name of the entry; an entry that is ``like`` another has the key of that entry.
        tags: Accelerator-type tags of its devices, most canonical first.
        model: Product name that detection reports.
        memory_bytes: Memory of one device, or None.
        attributes: Attributes of its devices, detected or simulated.
        facts: Every key of the product in the file, defaults included: ``entry.facts.get("lanes", 16)``.
    """

    key: str
    tags: tuple[str, ...]
    model: str
    memory_bytes: int | None
    attributes: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def product(self) -> Product:
        """The entry as a product, for simulated machines, completion and documentation."""
        facts = self.facts
        constants = facts.get("constants", {})
        return Product(
            name=self.tags[0],
            model=self.model,
            memory_bytes=self.memory_bytes,
            counts=tuple(facts.get("counts", (1,))),
            aliases=tuple(dict.fromkeys((*self.tags[1:], *facts.get("aliases", ())))),
            node_templates=tuple(facts.get("node_templates", ())),
            constants=constants if isinstance(constants, Mapping) else dict.fromkeys(constants, self.tags[0]),
            **{name: facts[name] for name in _PRODUCT if name in facts},
        )


class Catalog:
    """The products of a vendor. The file is read on first use, and once."""

    def __init__(self, module: str, name: str = "products.toml") -> None:
        """Locate the file; nothing is read yet.

        Args:
            module: ``__file__`` of a module in the directory of the file.
            name: Name of the file.
        """
        self.path = os.path.join(os.path.dirname(module), name)

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The whole file, for tables that only this vendor has."""
        with open(self.path, "rb") as file:
            text = file.read()
        # To parse a catalog of 70 products takes a vendor's process 10 ms, and the import of tomllib 5 ms more.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it is missing, or no such file
            with open(self._kept, "rb") as file:
                kept = json.load(file)
            from binascii import crc32  # late, like tomllib: the kit loads nothing else

            if kept["crc32"] == crc32(text):
                return cast("Mapping[str, Any]", kept["catalog"])
        return self._parse(text)

    def keep(self) -> None:
        """Write the catalog in a form that is read faster to ``products.json`` beside it, for a release of the plug-in.

        The copy is ignored once the catalog has changed.

        Raises:
            OSError: The file cannot be read or written.
            ValueError: The file is no TOML.
        """
        from binascii import crc32

        with open(self.path, "rb") as file:
            text = file.read()
        words = json.dumps({"crc32": crc32(text), "catalog": self._parse(text)}, ensure_ascii=False)
        with open(self._kept, "w", encoding="utf-8") as file:
            file.write(words.replace('}, {"', '},\n{"') + "\n")  # a line for each product

    @property
    def _kept(self) -> str:
        return self.path.removesuffix("toml") + "json"

    def _parse(self, text: bytes) -> dict[str, Any]:
        import tomllib

        try:
            return tomllib.loads(text.decode())
        except ValueError as error:
            raise ValueError(f"{os.path.basename(self.path)}: {error}") from error

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every product, in the order of the file.

        Raises:
            ValueError: A product lacks ``tags`` or ``model``, or its memory is not a size.
        """
        defaults = self.data.get("defaults", {})
        found: dict[str, Mapping[str, Any]] = {}
        entries = []
        for number, written in enumerate(self.data.get("products", ()), start=1):
            where = f"{os.path.basename(self.path)}: product {number}"
            if "like" in written and written["like"] not in found:
                raise ValueError(f"{where} is like {written['like']!r}, which is the key of none further up")
            # A product "like" another shares what the chip is; ids, names and instance types belong to one product.
            base = found[written["like"]] if "like" in written else {}
            facts = {**defaults, **{k: v for k, v in base.items() if k not in NOT_INHERITED}, **written}
            for needed in ("tags", "model"):
                if not facts.get(needed):
                    raise ValueError(f"{where} must have {needed!r} (got {', '.join(written)})")
            key = facts.setdefault("key", facts["tags"][0])
            # The first entry with a key is the base of later ones.
            found.setdefault(key, facts)
            entries.append(
                Entry(
                    key=key,
                    tags=tuple(facts["tags"]),
                    model=facts["model"],
                    memory_bytes=_bytes(facts.get("memory"), where),
                    attributes=facts.get("attributes", {}),
                    facts=facts,
                )
            )
        return tuple(entries)

    @cached_property
    def ignored(self) -> Mapping[int, str]:
        """Names of PCI device ids with the vendor's id and class that are not accelerators of this plug-in."""
        return {int(device, 16): name for device, name in self.data.get("ignored", {}).items()}

    def faults(self, table: str) -> Mapping[str, Fault]:
        """Read a table of faults: ``[reason, remedy]`` by the word that the vendor's driver or tool reports."""
        return {key: Fault(*words) for key, words in self.data[table].items()}

    def get(self, key: object) -> Entry | None:
        """Return the first entry with a key, or None."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def knows(self, device: int) -> bool:
        """Return True if a PCI device id belongs to a product or has a name in ``pci_names``."""
        return device in self._by_id or device in self._pci_names

    def by_pci(self, device: int, *, revision: int | None = None, subsystem: int | None = None) -> Entry | None:
        """Find the product of a PCI device id. A product also has the ids of its virtual functions."""
        same = self._by_id.get(device, ())
        exact = (
            entry
            for entry in same
            if revision in entry.facts.get("revisions", ()) or subsystem in entry.facts.get("subsystems", ())
        )
        # An entry without revisions and subsystems is the name of the chip; the more exact one wins.
        general = (entry for entry in same if "revisions" not in entry.facts and "subsystems" not in entry.facts)
        return next(exact, None) or next(general, None)

    def has_revisions(self, device: int) -> bool:
        """Return True if the revision of a PCI device id decides about its product or its name."""
        named = self._pci_names.get(device, {}).keys() - {None}
        return bool(named) or any("revisions" in entry.facts for entry in self._by_id.get(device, ()))

    def by_name(self, model: str) -> Entry | None:
        """Find the product with this model name, else the first product whose ``names`` match."""
        same = (entry for entry in self.entries if entry.model == model)
        alike = (
            entry
            for entry in self.entries
            if (pattern := entry.facts.get("names")) is not None and re.fullmatch(pattern, model)
        )
        return next(same, None) or next(alike, None)

    def by_memory(self, memory_bytes: int | None) -> Entry | None:
        """Find the only listed product with this much memory, within an eighth; None if several fit, or none."""
        near = [
            entry
            for entry in self.entries
            if entry.facts.get("listed", True)
            and entry.memory_bytes is not None
            and memory_bytes is not None
            and abs(entry.memory_bytes - memory_bytes) <= entry.memory_bytes // 8
        ]
        return near[0] if len(near) == 1 else None

    def pci_name(self, device: int, revision: int | None = None) -> str:
        """Return the name of a PCI device id in ``pci_names``, product or not; empty if unknown."""
        names = self._pci_names.get(device, {})
        return names.get(revision) or names.get(None, "")

    def products(self) -> tuple[Product, ...]:
        """Return the listed products, for the hook ``anyaccel_products``."""
        return tuple(entry.product for entry in self.entries if entry.facts.get("listed", True))

    @cached_property
    def _by_id(self) -> Mapping[int, list[Entry]]:
        """Products by PCI device id."""
        found: dict[int, list[Entry]] = {}
        for entry in self.entries:
            for device in dict.fromkeys((*entry.facts.get("pci", ()), *entry.facts.get("virtual", ()))):
                found.setdefault(device, []).append(entry)
        return found

    @cached_property
    def _pci_names(self) -> Mapping[int, Mapping[int | None, str]]:
        """Names by PCI device id and revision, from lines ``DEVICE REVISION NAME``; the revision may be ``-``."""
        # Lines in one long text, not a table of TOML: a catalog of 800 names is read in a third of the time.
        found: dict[int, dict[int | None, str]] = {}
        for line in filter(str.strip, self.data.get("pci_names", "").splitlines()):
            device, revision, name = line.split(None, 2)
            found.setdefault(int(device, 16), {})[None if revision == "-" else int(revision, 16)] = name
        return found


def tag(text: str) -> str:
    """Make an accelerator-type tag from a name: characters that no tag may contain become a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")


def pci_name(ctx: ProbeContext, vendor: int, device: int, *, chip: bool = False) -> str:
    """Look up the name of a device in the machine's own list of PCI ids.

    Args:
        ctx: The machine.
        vendor: PCI vendor id.
        device: PCI device id.
        chip: Whether to return the name of the chip, and not of the product.

    Returns:
        Of ``AC102 [Acme One]`` the product in brackets, or the chip before them. Without brackets the whole name;
        empty if the machine has no list, or the list no such id.
    """
    name = str(try_query(ctx, f"pci.ids/{vendor:04x}:{device:04x}", lambda: look_up(vendor, device)) or "")
    match = re.search(r"^(.*?)\s*\[(.+)\]\s*$", name)
    return name if match is None else match[1 if chip else 2]


def look_up(vendor: int, device: int, paths: tuple[str, ...] = PCI_IDS) -> str:
    """Find a name in the first list of PCI ids on this machine.

    A list has 1.5 MB, so a recording holds the names of single devices.
    """
    path = next(filter(os.path.isfile, paths), None)
    if path is None:
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        block = f"\n{file.read()}".partition(f"\n{vendor:04x}  ")[2]
    match = re.match(rf".*\n(?:[\t#].*\n)*?\t{device:04x}  (.*)", block)  # up to the next vendor
    return match[1].strip() if match else ""


def _bytes(size: Any, where: str) -> int | None:
    """Convert a size, as a number of bytes or a text such as ``96GiB``, to bytes."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(_SIZE, str(size))
    if match is None:
        raise ValueError(f"{where}: memory must be bytes, or text such as '96GiB' or '98304MiB' (got {size!r})")
    return int(match[1]) * _UNITS[f"{match[2] or ''}B"]
