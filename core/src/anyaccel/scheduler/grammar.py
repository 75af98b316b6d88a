"""The grammar of requests, one for the command line and for Python.

::

    request  = term { whitespace term }               all terms are served, or none
    term     = name { "|" name } [ ":" quantity ] { "," option }
    quantity = whole devices "2", or a share of one "0.5" with up to four decimals
    option   = "linked" | "mixed" | "mem=" size | "else=cpu"
    size     = number ( B | KB KiB K | MB MiB M | GB GiB G | TB TiB T )      K, M, G and T are binary
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from anyaccel.errors import RequestError
from anyaccel.model import UNITS_PER_DEVICE, Request, Term, format_units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MAX_CHARACTERS = 4_000
MAX_TERMS = 64
MAX_DEVICES = 1_000_000

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_DECIMAL = re.compile(r"([0-9]+)(?:\.([0-9]+))?")
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,4}))?([A-Za-z]*)")
_DECIMALS = 4
_OPTIONS = ("mem", "linked", "mixed", "else")
_BYTES = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024), ("", 1024))
}


def parse_request(request: str | Sequence[str] | Request) -> Request:
    """Turn what somebody asks for into a request.

    Args:
        request: Text such as ``GPU:2,linked``, several such texts that form one atomic request, or a request, which
            is checked and returned as it is.

    Raises:
        RequestError: When it does not follow the grammar; the message names the way out.
    """
    if isinstance(request, str):
        return _parse_text(request)
    if isinstance(request, Request):
        return _checked(request)
    texts: object = request  # what callers without a type checker may pass
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"a request must be text such as 'GPU:2', a list of such texts or a Request "
            f"(got {shown(texts)} that is a {type(texts).__name__})"
        )
    return _parse_text(" ".join(texts))


@lru_cache(maxsize=256)
def _parse_text(text: str) -> Request:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"a request must have at most {MAX_CHARACTERS} characters (got {len(text)})")
    parts = text.split()
    if not parts:
        raise RequestError("a request must name at least one device (got none); ask for 'GPU:1', for example")
    if len(parts) > MAX_TERMS:
        raise RequestError(f"a request must have at most {MAX_TERMS} terms (got {len(parts)})")
    terms = [_parse_term(part) for part in parts]
    return Request(terms=tuple(term for term, _ in terms), else_cpu=any(cpu for _, cpu in terms))


def _parse_term(text: str) -> tuple[Term, bool]:
    """Parse one term; the second value says whether it carries ``else=cpu``, which holds for the whole request."""
    head, *options = text.split(",")
    names, colon, quantity = head.partition(":")
    given = _parse_options(text, options)
    memory = given.get("mem")
    term = Term(
        names=_parse_names(text, names),
        units=_parse_quantity(text, names, quantity) if colon else UNITS_PER_DEVICE,
        memory_bytes=None if memory is None else _parse_size(text, memory),
        linked="linked" in given,
        mixed="mixed" in given,
    )
    return term, "else" in given


def _parse_names(text: str, names: str) -> tuple[str, ...]:
    found = names.split("|")
    for name in found:
        if not NAME.fullmatch(name):
            way_out = f"; ask for GPU:{names}, for example" if _DECIMAL.fullmatch(names) else ""
            _refuse(text, f"a name must be a letter, then letters, digits and . _ - (got {shown(name)}){way_out}")
    distinct = {name.lower(): name for name in reversed(found)}
    return tuple(reversed(distinct.values()))


def _parse_quantity(text: str, names: str, quantity: str) -> int:
    match = _DECIMAL.fullmatch(quantity)
    if match is None:
        _refuse(text, f"a quantity must be a plain decimal more than 0, such as 2 or 0.5 (got {shown(quantity)})")
    whole, rest = match[1], match[2] or ""
    if len(rest) > _DECIMALS:
        way_out = f"; ask for {names}:{whole}.{rest[:_DECIMALS]}" if len(whole) == 1 else ""
        _refuse(text, f"a share must have at most {_DECIMALS} decimals (got {shown(quantity)}){way_out}")
    if len(whole) > len(str(MAX_DEVICES)):
        _refuse(text, f"a quantity must be at most {MAX_DEVICES} devices (got {shown(quantity)})")
    units = int(whole) * UNITS_PER_DEVICE + int(rest.ljust(_DECIMALS, "0"))
    fault = _units_fault(names, units)
    if fault:
        _refuse(text, fault)
    return units


def _units_fault(names: str, units: int) -> str:
    """Say what is wrong with a quantity; empty when nothing is."""
    if units <= 0:
        return "a quantity must be more than 0; leave the term out to ask for none"
    if units > MAX_DEVICES * UNITS_PER_DEVICE:
        return f"a quantity must be at most {MAX_DEVICES} devices (got {format_units(units)})"
    whole, rest = divmod(units, UNITS_PER_DEVICE)
    if whole and rest:
        return (
            f"a quantity above one device must be whole (got {format_units(units)}); "
            f"ask for {names}:{whole} or {names}:{whole + 1}"
        )
    return ""


def _parse_options(text: str, options: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.lower()
        if key not in _OPTIONS:
            _refuse(text, f"an option must be one of mem=SIZE, linked, mixed, else=cpu (got {shown(option)})")
        if key in given:
            _refuse(text, f"an option must be given once (got {key!r} twice)")
        if key == "else" and value.lower() != "cpu":
            _refuse(text, f"'else' must be else=cpu (got {shown(option)})")
        if key in ("linked", "mixed") and equals:
            _refuse(text, f"{key!r} must stand without a value (got {shown(option)})")
        given[key] = value
    return given


def _parse_size(text: str, size: str) -> int:
    """Parse an amount of memory; a part of a byte counts as one."""
    match = _SIZE.fullmatch(size)
    unit = _BYTES.get(match[3].upper()) if match else None
    if match is None or unit is None:
        _refuse(
            text, f"'mem' must be a number with a unit of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB (got {shown(size)})"
        )
    rest = match[2] or ""
    number, parts = int(match[1] + rest), 10 ** len(rest)
    if not number:
        _refuse(text, f"'mem' must be more than 0 (got {shown(size)}); leave it out")
    size_bytes: int = -(-number * unit // parts)
    return size_bytes


def _checked(request: Request) -> Request:
    """Refuse a request made by hand that the grammar could not have made."""
    if not 0 < len(request.terms) <= MAX_TERMS:
        raise RequestError(f"a request must have 1 to {MAX_TERMS} terms (got {len(request.terms)})")
    for term in request.terms:
        if not term.names or not all(NAME.fullmatch(name) for name in term.names):
            raise RequestError(
                f"a term's names must each be a letter, then letters, digits and . _ - (got {shown(term.names)})"
            )
        fault = _units_fault("|".join(term.names), term.units)
        if fault:
            _refuse(str(term), fault)
        if term.memory_bytes is not None and term.memory_bytes <= 0:
            _refuse(str(term), f"memory_bytes must be more than 0 (got {term.memory_bytes}); leave it None")
    return request


def _refuse(text: str, fault: str) -> NoReturn:
    raise RequestError(f"request {shown(text)}: {fault}")


def shown(value: object) -> str:
    """A value as messages quote it: short, whatever somebody typed."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."  # noqa: PLR2004
