"""Find the installed plug-ins without an import of any plug-in."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from anyaccel.errors import UsageError
from anyaccel.model import Problem, ProblemKind, Value
from anyaccel.text import suggest
from anyaccel.vendors.entry_points import entry_points

GROUP = "anyaccel"
"""Group of the entry points."""
ALLOW_VARIABLE = "ANYACCEL_PLUGINS"
DENY_VARIABLE = "ANYACCEL_DISABLE"
NONE = "none"
"""Value of ``ANYACCEL_PLUGINS`` for no plug-in at all."""


class Source(Value):
    """Where a vendor's plug-in comes from.

    Attributes:
        vendor: Key of the vendor: the entry point's name.
        target: What to import: ``package.module`` or ``package.module:attribute``.
        distribution: Name of the distribution; empty for a plug-in that ``ANYACCEL_PLUGINS`` names by its module.
        version: Version of the distribution.
    """

    vendor: str
    target: str
    distribution: str = ""
    version: str = ""


def installed(environ: Mapping[str, str] | None = None) -> tuple[list[Source], list[Problem]]:
    """List the usable plug-ins by vendor, and the problems that exclude other plug-ins.

    ``ANYACCEL_PLUGINS`` is a comma list of the only plug-ins to use: ``acme`` is the installed one of that vendor,
    ``acme=package.module`` is that module, whatever is installed for the vendor. Where all items are of the second
    form, what is installed is not scanned. ``none`` keeps none. ``ANYACCEL_DISABLE`` is a comma list of vendors to
    leave out, also of those.

    Raises:
        UsageError: When ``ANYACCEL_PLUGINS`` names a vendor without a plug-in, or an item lacks its vendor or module.
    """
    environ = os.environ if environ is None else environ
    items = _items(environ.get(ALLOW_VARIABLE, ""))
    if items == [NONE]:
        return [], []
    denied = _items(environ.get(DENY_VARIABLE, ""))
    named = [_named(item) for item in items if "=" in item]
    wanted = {item for item in items if "=" not in item}
    found = list(scan()) if wanted or not named else []  # tests and CI name modules, without a scan of the path
    missing = sorted(wanted - {source.vendor for source in found})
    if missing:
        # An error, unlike in ANYACCEL_DISABLE: the user relies on a vendor that would silently be missing.
        way_out = f"'pip install anyaccel-{missing[0]}', or take it out"
        raise UsageError(_not_installed(ALLOW_VARIABLE, missing[0], {source.vendor for source in found}, way_out))
    chosen = [*named, *(source for source in found if not items or source.vendor in wanted)]
    known = tuple(sorted({source.vendor for source in (*named, *found)}))
    for vendor in denied if found else ():  # what is installed is unknown without a scan
        if vendor not in known:
            _warn_unknown(vendor, known)
    return _unique(source for source in chosen if source.vendor not in denied)


def scan() -> Iterable[Source]:
    """Read the entry points of every installed distribution."""
    return [
        Source(vendor=vendor, target=target, distribution=distribution, version=version)
        for vendor, target, distribution, version in entry_points(GROUP)
    ]


def make_problem(source: Source, kind: ProblemKind, reason: str, hook: str = "", details: str = "") -> Problem:
    """Describe a fault of a plug-in."""
    return Problem(
        vendor=source.vendor,
        kind=kind,
        reason=reason,
        distribution=source.distribution,
        version=source.version,
        hook=hook,
        details=details,
        next_step=(
            f"Other vendors are unaffected. Run 'anyaccel plugins {source.vendor}' for the details, or set"
            f" {DENY_VARIABLE}={source.vendor} to leave it out."
        ),
    )


def _not_installed(variable: str, vendor: str, known: Collection[str], way_out: str) -> str:
    return (
        f"{variable} must name vendors whose plug-ins are installed (got {vendor!r}; installed:"
        f" {', '.join(sorted(known)) or 'none'}); {suggest(vendor.casefold(), known, way_out, cutoff=0.5)}"
    )


@cache
def _warn_unknown(vendor: str, known: tuple[str, ...]) -> None:
    """Warn once that ``ANYACCEL_DISABLE`` names a vendor without a plug-in, perhaps by a typing error."""
    import logging

    told = _not_installed(DENY_VARIABLE, vendor, known, "take it out")
    logging.getLogger("anyaccel").warning("anyaccel: %s", told)


def _named(item: str) -> Source:
    """Parse an item ``vendor=module`` of ``ANYACCEL_PLUGINS``."""
    vendor, _, target = (part.strip() for part in item.partition("="))
    if not vendor or not target:
        raise UsageError(
            f"{ALLOW_VARIABLE} must name a vendor and a module where there is a '=' (got {item!r}); write"
            f" {vendor or 'acme'}={target or 'package.module'}, or the vendor alone for its installed plug-in"
        )
    return Source(vendor=vendor, target=target)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _unique(sources: Iterable[Source]) -> tuple[list[Source], list[Problem]]:
    by_vendor: dict[str, list[Source]] = {}
    for source in sources:
        rivals = by_vendor.setdefault(source.vendor, [])
        if source not in rivals:  # the same distribution may be seen twice through two entries of the module path
            rivals.append(source)
    alone = [rivals[0] for _, rivals in sorted(by_vendor.items()) if len(rivals) == 1]
    problems = [_conflict(rivals) for _, rivals in sorted(by_vendor.items()) if len(rivals) > 1]
    return alone, problems


def _conflict(rivals: list[Source]) -> Problem:
    names = " and ".join(sorted(source.distribution or source.target for source in rivals))
    return Problem(
        vendor=rivals[0].vendor,
        kind=ProblemKind.CONFLICT,
        reason=f"{names} both claim the vendor {rivals[0].vendor!r}, so neither is used.",
        next_step=f"Uninstall one, or set {ALLOW_VARIABLE}={rivals[0].vendor}=MODULE to choose.",
    )
