"""Read the entry points of installed distributions as :mod:`importlib.metadata` does, in a fiftieth of the time.

The import of that module takes the time, not the files. If the module path has an entry that is no plain directory,
such as an archive, that module is used.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys

TYPE_CHECKING = False  # that of typing, which takes longer to import than all that follows
if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = "entry_points.txt"
METADATA = ("METADATA", "PKG-INFO")
"""Files with name and version of a distribution; the first that exists counts."""

Found = tuple[str, str, str, str]
"""Name and target of an entry point, name and version of its distribution."""


def entry_points(group: str) -> list[Found]:
    """List the entry points of a group. Of several distributions with the same name, the first counts.

    An unreadable file counts as no file, and so does a broken file that does not name the group, since faults of other
    distributions do not concern us. An entry without ``=`` has no target.
    """
    directories = _distributions()
    if directories is None:
        return _with_importlib(group)
    return [found for directory in directories for found in _read(directory, group)]


def _distributions() -> list[str] | None:
    """Return the metadata directories of distributions on the module path; None if there may be others elsewhere."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if finders != [importlib.machinery.PathFinder]:  # editable installs of some tools add a finder
        return None
    found: dict[str, str] = {}
    path: list[object] = [*sys.path]
    for entry in path:
        if not isinstance(entry, str) or entry.lower().endswith(".egg"):
            return None
        try:
            children = os.listdir(entry or ".")
        except NotADirectoryError:  # an archive
            return None
        except OSError:
            continue
        for child in children:
            if not child.lower().endswith((".dist-info", ".egg-info")):
                continue
            stem, suffix = os.path.splitext(child)
            name = re.sub("[_.]+", "_", stem.partition("-")[0].lower())  # as importlib.metadata's Prepared.normalize()
            if not name or not suffix.islower():
                return None
            found.setdefault(name, os.path.join(entry, child))  # an earlier entry of the path hides later ones
    return list(found.values())


def _read(directory: str, group: str) -> Iterator[Found]:
    """Yield the entry points of a group in a distribution."""
    text = _text(os.path.join(directory, FILE))
    if group not in text:
        return
    section = ""
    distribution: tuple[str, str] | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif section == group and line and not line.startswith("#"):
            distribution = distribution or _name_and_version(directory)
            name, _, target = line.partition("=")
            yield name.strip(), target.strip(), *distribution


def _name_and_version(directory: str) -> tuple[str, str]:
    text = next(filter(None, (_text(os.path.join(directory, name)) for name in METADATA)), "")
    headers: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():  # the description that follows is a hundred times as long
        name, colon, content = line.partition(":")
        if not colon:
            break
        headers.setdefault(name.lower(), content.strip())
    return headers.get("name", ""), headers.get("version", "")


def _text(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _with_importlib(group: str) -> list[Found]:
    from importlib import metadata

    return [
        (point.name, point.value, point.dist.name if point.dist else "", point.dist.version if point.dist else "")
        for point in metadata.entry_points(group=group)
    ]
