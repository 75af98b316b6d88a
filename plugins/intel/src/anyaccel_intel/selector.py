"""The grammar of ``ONEAPI_DEVICE_SELECTOR``, and the devices that a value admits.

Terms are separated by ``;`` and read ``[!]backend:devices``; devices are a comma list of ``*``, a device type, a number
``N``, or sub-devices ``N.M``, ``N.*``, ``*.*``, each with a third level (intel/llvm
``sycl/doc/EnvironmentVariables.md``). Beyond the document, this follows Intel's SYCL runtime 2026.2, which the tests
compare value by value: numbers are read like C's ``stoi``, so a range ``0-1`` silently means ``0``, and the loader
reads the value first, with a simpler parser, and drops backends that it considers unwanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from anyaccel.kit import FaultError

SELECTOR = "ONEAPI_DEVICE_SELECTOR"
BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "host", "offload")
LOADED = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "offload")
TYPES = ("cpu", "gpu", "host")
GAP = re.compile(r"^;|;;|[:,],")
INT_MAX = 2**31 - 1
WILDCARD = -1
LEVELS = 3


class Target(NamedTuple):
    """Devices named by an item of a term."""

    type: str = ""
    path: tuple[int, ...] = ()  # device, sub-device, its sub-device; each a number or the wildcard
    plain: bool = True  # the loader's parser accepts the item, too

    def names(self, position: int, kind: str) -> bool:
        """Return True if the item names a device, or a part of it."""
        return self.type == kind or bool(self.path and self.path[0] in (position, WILDCARD))

    def parts(self, count: int) -> list[int | None]:
        """Return the named parts of a device with ``count`` sub-devices; half a tile cannot be leased."""
        if len(self.path) <= 1:
            return [None]
        if count <= 1 or len(self.path) == LEVELS:
            return []
        return [part for part in range(count) if self.path[1] in (part, WILDCARD)]


class Term(NamedTuple):
    """A term of a selector."""

    negative: bool  # the term discards devices
    backend: str  # in lower case, or *
    targets: tuple[Target, ...]
    text: str


def parse(value: str) -> tuple[Term, ...]:
    """Parse a value of ``ONEAPI_DEVICE_SELECTOR``.

    Raises:
        FaultError: The runtime refuses the value; every SYCL program would then end with an exception.
    """
    if not value:
        raise _refusal(value, "not be empty")
    terms = tuple(_term(value, text) for text in value.split(";") if text)
    # False sorts before True, so an unsorted list has an accepting term behind a discarding one.
    signs = [term.negative for term in terms if term.targets]
    if signs != sorted(signs):
        raise _refusal(value, "name discarding terms (!backend:devices) after all accepting ones")
    return terms


def admitted(
    value: str,
    sub_devices: Sequence[int],
    *,
    backend: str = "level_zero",
    kind: str = "gpu",
    environ: Mapping[str, str],
) -> list[tuple[int, int | None]]:
    """Return the devices of a backend left by a selector.

    Args:
        value: The selector.
        sub_devices: Number of sub-devices of each device of the backend, in the runtime's order; 0 or 1 where a device
            cannot be divided.
        backend: Name of the backend.
        kind: Type of the devices.
        environ: The environment: the loader leaves out backends by itself unless ``UR_LOADER_PRELOAD_FILTER=0``. It
            then drops a whole backend of which one device is discarded by number (oneapi-src/unified-runtime
            ``source/loader/ur_adapter_registry.hpp``).

    Returns:
        Pairs of a device's position and a sub-device's number, or None for the whole device.

    Raises:
        FaultError: The runtime refuses the value.
    """
    terms = parse(value)
    mine = [term for term in terms if term.backend in ("*", backend)]
    if environ.get("UR_LOADER_PRELOAD_FILTER", "1") != "0" and not _loaded(value, terms, mine):
        return []
    accepted = [target for term in mine if not term.negative for target in term.targets]
    discarded = [target for term in mine if term.negative for target in term.targets]
    if all(term.negative for term in terms if term.targets) and any(term.targets for term in terms):
        accepted = [Target(path=(WILDCARD,))]  # a list of discards alone accepts the rest
    found: dict[tuple[int, int | None], None] = {}
    for position, count in enumerate(sub_devices):
        if any(target.names(position, kind) for target in discarded):
            continue
        for target in accepted:
            if target.names(position, kind):
                found.update(dict.fromkeys((position, part) for part in target.parts(count)))
    return list(found)


def replacement(environ: Mapping[str, str], sub_devices: Sequence[int]) -> str | None:
    """Return a selector in place of an inherited one that would hide devices; None if it may stay.

    The new selector is a positive list, then the other backends' terms: negative terms hide a whole backend.
    ``sub_devices`` is as in :func:`admitted`.
    """
    value = environ.get(SELECTOR)
    # An empty mask hides every device anyway, so the selector does not matter.
    if value is None or not sub_devices:
        return None
    others: Iterable[str] = ()
    try:
        if {(position, None) for position in range(len(sub_devices))} <= {
            *admitted(value, sub_devices, environ=environ)
        }:
            return None
        others = (t.text for t in parse(value) if not t.negative and t.backend not in ("*", "level_zero"))
    except FaultError:
        pass  # the inherited value would end every SYCL program, so nothing of it is kept
    return ";".join([f"level_zero:{','.join(map(str, range(len(sub_devices))))}", *others])


def _loaded(value: str, terms: Sequence[Term], mine: Sequence[Term]) -> bool:
    """Return True if the loader loads a backend, given the terms about it."""
    names = [term.text.lstrip("!").partition(":")[0] for term in terms]
    if GAP.search(value) or not all(name in LOADED for name in names):
        return True  # the loader's parser gives up on unknown names, capitals and gaps, and loads everything
    if any(term.negative and any(target.path and target.plain for target in term.targets) for term in mine):
        return False
    accepting = [term for term in terms if not term.negative]
    return not accepting or any(target.plain for term in mine if not term.negative for target in term.targets)


def _term(value: str, text: str) -> Term:
    head, colon, rest = text.partition(":")
    if not colon:
        raise _refusal(value, f"say backend:devices in each term (got {text!r}, try {text}:*)")
    if not head:
        raise _refusal(value, f"name a backend before the colon (got {text!r})")
    if not rest or text.endswith(":"):
        raise _refusal(value, f"name devices after the colon (got {text!r})")
    if ":" in rest:
        raise _refusal(value, f"have one colon in each term, between backend and devices (got {text!r})")
    negative, backend = head.startswith("!"), head.removeprefix("!").lower()
    if backend not in BACKENDS:
        raise _refusal(value, f"name one of the backends {', '.join(BACKENDS)} in each term (got {text!r})")
    items = [item for item in rest.split(",") if item]
    return Term(negative=negative, backend=backend, targets=tuple(_target(value, item) for item in items), text=text)


def _target(value: str, item: str) -> Target:
    top, *below = item.lower().split(".")
    if len(below) >= LEVELS:
        raise _refusal(value, f"not name more than two levels of sub-devices (got {item!r})")
    if not all((top, *below)):
        raise _refusal(value, f"have a number or * on both sides of each dot (got {item!r})")
    if top in TYPES:
        if below:
            raise _refusal(value, f"name sub-devices of a number or of *, not of a device type (got {item!r})")
        return Target(type=top, plain=item == top and top != "host")
    path = tuple(WILDCARD if part == "*" else _number(value, part) for part in (top, *below))
    if any(upper == WILDCARD != lower for upper, lower in pairwise(path)):
        raise _refusal(value, f"not number the sub-devices of * (got {item!r})")
    plain = top == "*" or top[0].isdigit()
    return Target(path=path, plain=plain)


def _number(value: str, text: str) -> int:
    """Read a number as C's ``stoi`` does: blanks and a sign before it, any text behind it."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", text)
    if not match or not -INT_MAX <= int(match[1]) <= INT_MAX:
        raise _refusal(value, f"name devices by *, {', '.join(TYPES[:2])} or a number (got {text!r})")
    number = int(match[1])
    return number if number >= 0 else INT_MAX  # a device that does not exist; never the wildcard


def _refusal(value: str, rule: str) -> FaultError:
    reason = f"{SELECTOR} must {rule}: the value is {value!r}"
    return FaultError(reason, "unset it, or name devices, for example level_zero:0")
