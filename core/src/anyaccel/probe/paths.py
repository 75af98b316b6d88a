"""Paths by shell patterns, and their order."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable


def find_paths(pattern: str, list_names: Callable[[str], Collection[str]]) -> list[str]:
    """Return the paths that match an absolute shell pattern, in numeric order.

    Args:
        pattern: The pattern. A hidden name is matched only where the pattern has its dot.
        list_names: Returns the names in a directory, which is given without a slash at its end; none without it. What
            follows the last ``*``, ``?`` or ``[`` is not looked for: the path may not exist.
    """
    if _is_plain(pattern):
        return [pattern]
    found = [""]
    for part in pattern.split("/")[1:]:
        if _is_plain(part):
            found = [f"{above}/{part}" for above in found]
        else:
            found = [f"{above}/{name}" for above in found for name in _select(list_names(above), part)]
    return sorted(found, key=natural)


def _is_plain(pattern: str) -> bool:
    return re.search("[*?[]", pattern) is None


def natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that compares the numbers in a path as numbers."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", path) if part)


def _select(names: Iterable[str], part: str) -> list[str]:
    """Return the names that a part of a pattern matches.

    Most patterns are of vendors that are not on the machine: to compile one takes longer than to see that no name
    begins like it.
    """
    beginning = re.split("[*?[]", part, maxsplit=1)[0]
    alike = [name for name in names if name.startswith(beginning) and (beginning or not name.startswith("."))]
    return fnmatch.filter(alike, part) if alike else []
