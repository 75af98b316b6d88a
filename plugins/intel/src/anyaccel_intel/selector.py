"""The grammar of ``ONEAPI_DEVICE_SELECTOR``, and what a value of it admits.

Terms are separated by ``;`` and read ``[!]backend:devices``; devices are a comma list of ``*``, a device type, a
number ``N``, or sub-devices ``N.M``, ``N.*``, ``*.*``, each with a third level (intel/llvm
``sycl/doc/EnvironmentVariables.md``). Beyond the document, this follows what Intel's SYCL runtime 2026.2 does, which
the tests compare value by value: numbers are read like C's ``stoi``, so a range ``0-1`` silently means ``0``, and the
loader looks at the value first, with a simpler parser, and leaves out backends that it believes to be unwanted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "host", "offload")
LOADED = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "offload")
TYPES = ("cpu", "gpu", "host")
GAP = re.compile(r"^;|;;|[:,],")
INT_MAX = 2**31 - 1
WILDCARD = -1
LEVELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Devices that one item of a term names.

    Attributes:
        type: Device type, or empty.
        path: Number of the device, then of the sub-device, then of its sub-device; :data:`WILDCARD` for ``*``.
        plain: Whether the loader's parser, too, takes the item for a device.
    """

    type: str = ""
    path: tuple[int, ...] = ()
    plain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of a selector.

    Attributes:
        negative: Whether the term discards devices.
        backend: Name of the backend in lower case, or ``*``.
        targets: The devices that it names.
        text: The term as it was written.
    """

    negative: bool
    backend: str
    targets: tuple[Target, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed selector.

    Attributes:
        terms: Its terms.
        text: The value as it was written.
    """

    terms: tuple[Term, ...]
    text: str


def parse(value: str) -> Selector:
    """Parse a value of ``ONEAPI_DEVICE_SELECTOR``.

    Raises:
        ValueError: When the runtime refuses the value; every SYCL program would then end with an exception.
    """
    if not value:
        _refuse(value, "must not be empty; unset it, or name devices, for example level_zero:0")
    terms = tuple(_term(value, text) for text in value.split(";") if text)
    signs = [term.negative for term in terms if term.targets]
    if signs != sorted(signs):
        _refuse(value, "must name discarding terms (!backend:devices) after all accepting ones")
    return Selector(terms=terms, text=value)


def admitted(
    selector: Selector,
    sub_devices: Sequence[int],
    *,
    backend: str = "level_zero",
    kind: str = "gpu",
    preload_filter: bool = True,
) -> list[tuple[int, int | None]]:
    """Say what a selector leaves of the devices of one backend.

    Args:
        selector: The parsed selector.
        sub_devices: Number of sub-devices of each device of the backend, in the runtime's order; 0 or 1 where a device
            cannot be divided.
        backend: Name of the backend.
        kind: Type of the devices.
        preload_filter: Whether the loader leaves out backends by itself, as it does unless
            ``UR_LOADER_PRELOAD_FILTER=0``. It then drops a whole backend of which one device is discarded by number
            (oneapi-src/unified-runtime ``source/loader/ur_adapter_registry.hpp``).

    Returns:
        Pairs of a device's position and a sub-device's number, or None for the whole device.
    """
    mine = [term for term in selector.terms if term.backend in ("*", backend)]
    if preload_filter and not _loaded(selector, mine):
        return []
    accepted = [target for term in mine if not term.negative for target in term.targets]
    discarded = [target for term in mine if term.negative for target in term.targets]
    if all(term.negative for term in selector.terms if term.targets) and any(term.targets for term in selector.terms):
        accepted = [Target(path=(WILDCARD,))]  # what discards only accepts the rest
    found: dict[tuple[int, int | None], None] = {}
    for position, count in enumerate(sub_devices):
        if any(_names(target, position, kind) for target in discarded):
            continue
        for target in accepted:
            if _names(target, position, kind):
                found.update(dict.fromkeys((position, part) for part in _parts(target, count)))
    return list(found)


def _loaded(selector: Selector, mine: Sequence[Term]) -> bool:
    """Whether the loader loads a backend, given the terms that concern it."""
    names = [term.text.lstrip("!").partition(":")[0] for term in selector.terms]
    if GAP.search(selector.text) or not all(name in LOADED for name in names):
        return True  # its parser knows fewer names, in lower case, and no gaps; it gives up on anything else
    if any(term.negative and any(_by_number(target) for target in term.targets) for term in mine):
        return False
    accepting = [term for term in selector.terms if not term.negative]
    return not accepting or any(target.plain for term in mine if not term.negative for target in term.targets)


def _by_number(target: Target) -> bool:
    return bool(target.path) and target.plain


def _names(target: Target, position: int, kind: str) -> bool:
    return target.type == kind or bool(target.path and target.path[0] in (position, WILDCARD))


def _parts(target: Target, count: int) -> list[int | None]:
    """What of a device with ``count`` sub-devices a target names; half a tile is nothing that we could hold."""
    if len(target.path) <= 1:
        return [None]
    if count <= 1 or len(target.path) == LEVELS:
        return []
    wanted = target.path[1]
    return [part for part in range(count) if wanted in (part, WILDCARD)]


def _term(value: str, text: str) -> Term:
    head, colon, rest = text.partition(":")
    if not colon:
        _refuse(value, f"must say backend:devices in each term (got {text!r}); write {text}:* for all devices")
    if not head:
        _refuse(value, f"must name a backend before the colon (got {text!r})")
    if not rest or text.endswith(":"):
        _refuse(value, f"must name devices after the colon (got {text!r})")
    if ":" in rest:
        _refuse(value, f"must have one colon in each term, between backend and devices (got {text!r})")
    negative, backend = head.startswith("!"), head.removeprefix("!").lower()
    if backend not in BACKENDS:
        _refuse(value, f"must name one of the backends {', '.join(BACKENDS)} in each term (got {text!r})")
    items = [item for item in rest.split(",") if item]
    return Term(negative=negative, backend=backend, targets=tuple(_target(value, item) for item in items), text=text)


def _target(value: str, item: str) -> Target:
    top, *below = item.lower().split(".")
    if len(below) >= LEVELS:
        _refuse(value, f"must not name more than two levels of sub-devices (got {item!r})")
    if not all((top, *below)):
        _refuse(value, f"must have a number or * on both sides of each dot (got {item!r})")
    if top in TYPES:
        if below:
            _refuse(value, f"must name sub-devices of a number or of *, not of a device type (got {item!r})")
        return Target(type=top, plain=item == top and top != "host")
    path = tuple(WILDCARD if part == "*" else _number(value, part) for part in (top, *below))
    if any(upper == WILDCARD != lower for upper, lower in pairwise(path)):
        _refuse(value, f"must not number the sub-devices of * (got {item!r})")
    plain = top == "*" or top[0].isdigit()
    return Target(path=path, plain=plain)


def _number(value: str, text: str) -> int:
    """Read a number as C's ``stoi`` does: blanks and a sign before it, anything behind it."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", text)
    if not match or not -INT_MAX <= int(match[1]) <= INT_MAX:
        _refuse(value, f"must name devices by *, {', '.join(TYPES[:2])} or a number (got {text!r})")
    number = int(match[1])
    return number if number >= 0 else INT_MAX  # a device that does not exist; never the wildcard


def _refuse(value: str, rule: str) -> NoReturn:
    raise ValueError(f"ONEAPI_DEVICE_SELECTOR {rule}: the value is {value!r}")
