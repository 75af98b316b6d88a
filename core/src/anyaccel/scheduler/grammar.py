"""The grammar of requests, one for the command line and for Python.

::

    request  = term { whitespace term }               all terms are served, or none
    term     = name { "|" name } [ ":" quantity ] { "," option }
    quantity = whole devices "2", or a share of one: "0.5" with up to four decimals, or by its memory "20GiB"
    option   = "linked" | "mixed" | "else=cpu" | filter "=" value

The filters are those of :data:`~anyaccel.scheduler.filters.FILTERS`; one whose name is a sign stands behind a name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from anyaccel.errors import RequestError
from anyaccel.model import UNITS_PER_DEVICE, Request, Term, format_units, replace
from anyaccel.scheduler.filters import FILTERS, asked, counted
from anyaccel.text import shown, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from anyaccel.scheduler.filters import AskedFilter

# Bounds against requests that would keep the parser or placement busy; no sensible request comes near them.
MAX_CHARACTERS = 4_000
MAX_TERMS = 64
MAX_DEVICES = 1_000_000

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_DECIMAL = re.compile(r"([0-9]+)(?:\.([0-9]+))?")
_MEMORY = re.compile(r"[0-9.]+[A-Za-z]+")
_DECIMALS = 4
_FLAGS = ("linked", "mixed")


def parse_request(request: str | Sequence[str] | Request) -> Request:
    """Parse a request.

    Args:
        request: Text such as ``GPU:2,linked``, several such texts that form one atomic request, or a request, which is
            checked and returned unchanged.

    Raises:
        RequestError: When the request does not follow the grammar; the message names the way out.

    Examples:
        >>> request = anyaccel.parse_request("GPU:2,linked TPU:4")
        >>> [term.count for term in request.terms]
        [2, 4]
    """
    if isinstance(request, str):
        return _parse_text(request)
    if isinstance(request, Request):
        return _checked(request)
    texts: object = request  # callers without a type checker may pass any value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"a request must be text such as 'GPU:2', a list of such texts or a Request "
            f"(got {shown(texts)} that is a {type(texts).__name__})"
        )
    return _parse_text(" ".join(texts))


@lru_cache(maxsize=256)
def _parse_text(text: str) -> Request:
    """Parse the text of a whole request.

    Raises:
        RequestError: When the text does not follow the grammar.
    """
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
    """Parse one term; the second value tells whether it has ``else=cpu``, which applies to the whole request.

    Without a quantity, the term is for each device that a filter names, or for one.

    Raises:
        RequestError: When the text does not follow the grammar.
    """
    head, *options = text.split(",")
    names, colon, quantity = head.partition(":")
    named, given = _parse_signs(names)
    given |= _parse_options(text, options)
    term = Term(
        names=_parse_names(text, named),
        filters=tuple((name, given[name]) for name in FILTERS if name in given),
        linked="linked" in given,
        mixed="mixed" in given,
    )
    if colon and _MEMORY.fullmatch(quantity):
        term = replace(term, units=0, memory_bytes=_parse_memory(text, quantity))
    elif colon:
        term = replace(term, units=_parse_quantity(text, names, quantity))
    filters = _check_term(text, term)
    if not colon and (count := counted(filters)):
        term = replace(term, units=count * UNITS_PER_DEVICE)
    # The usual form of values, so that equal requests are equal.
    written = tuple((each.filter.name, each.filter.write(each.wanted)) for each in filters)
    return replace(term, filters=written), "else" in given


def _parse_signs(names: str) -> tuple[str, dict[str, str]]:
    """Split names from the filters whose names are signs; return the names, and the values by filter, not checked."""
    given: dict[str, str] = {}
    for sign in FILTERS:
        if not sign.isalpha():
            names, found, value = names.partition(sign)
            given |= {sign: value} if found else {}
    return names, given


def _check_term(text: str, term: Term) -> tuple[AskedFilter[Any], ...]:
    """Check the quantity and the filters of a term; return the filters.

    Raises:
        RequestError: When the quantity is invalid, or a filter is unknown, invalid, or given twice, or names devices
            beside several names.
    """
    if fault := _memory_fault(term) if term.memory_bytes else _units_fault(term):
        _refuse(text, fault)
    try:
        found = asked(term)
    except ValueError as error:
        _refuse(text, str(error))
    names = [name for name, _ in term.filters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        _refuse(text, f"a filter must be given once (got {twice!r} twice)")
    if counted(found) is not None and len(term.names) > 1:
        _refuse(text, f"devices must be named behind one name (got {shown('|'.join(term.names))})")
    return found


def _parse_names(text: str, names: str) -> tuple[str, ...]:
    """Parse names between ``|``; of names that differ in case only, the first is kept.

    Raises:
        RequestError: When a name does not follow the grammar.
    """
    found = names.split("|")
    for name in found:
        if name.lower() in _FLAGS:
            _refuse(text, f"{name!r} is an option, which stands behind a comma: GPU:2,{name}")
        if not NAME.fullmatch(name):
            key, equals, value = name.partition("=")
            way_out = ""
            if _DECIMAL.fullmatch(names) or _MEMORY.fullmatch(names):
                way_out = _offer("; did you mean {}?", f"GPU:{names}")
            elif equals and key.lower() in _options():
                way_out = _offer("; an option stands behind a comma: {}", f"GPU:1,{name}")
            elif equals and _DECIMAL.fullmatch(value):
                way_out = _offer("; a quantity stands behind a colon: {}", f"{key}:{value}")
            _refuse(text, f"a name must be a letter, then letters, digits and . _ - (got {shown(name)}){way_out}")
    distinct = {name.lower(): name for name in reversed(found)}  # the first spelling wins
    return tuple(reversed(distinct.values()))


def _parse_memory(text: str, quantity: str) -> int:
    """Parse a share by memory; return bytes.

    Raises:
        RequestError: When the quantity is no amount of memory.
    """
    try:
        return size(quantity)
    except ValueError as error:
        _refuse(text, f"a share by memory {error}")


def _memory_fault(term: Term) -> str:
    """Describe an invalid share by memory; empty for a valid one."""
    if term.units or term.memory_bytes < 0:
        return "a share by memory must be more than 0 bytes, with 0 units"
    if any(name == "mem" for name, _ in term.filters):
        return f"a share by memory must stand without 'mem': {term.quantity} is what the share has"
    return ""


def _parse_quantity(text: str, names: str, quantity: str) -> int:
    """Parse a decimal quantity of devices; return units.

    Raises:
        RequestError: When the quantity is no decimal, or has too many digits.
    """
    match = _DECIMAL.fullmatch(quantity)
    if match is None:
        _refuse(text, f"a quantity must be a plain decimal more than 0, such as 2 or 0.5 (got {shown(quantity)})")
    whole, rest = match[1], match[2] or ""
    if len(rest) > _DECIMALS:
        shares = f"{whole}.{rest[:_DECIMALS]}", "0.0001"  # what is nearest to a smaller one is the smallest
        way_out = next(filter(None, (_offer("; ask for {}", f"{names}:{share}") for share in shares)), "")
        _refuse(text, f"a share must have at most {_DECIMALS} decimals (got {shown(quantity)}){way_out}")
    if len(whole) > len(str(MAX_DEVICES)):  # before int(), which is quadratic in the number of digits
        _refuse(text, f"a quantity must be at most {MAX_DEVICES} devices (got {shown(quantity)})")
    return int(whole) * UNITS_PER_DEVICE + int(rest.ljust(_DECIMALS, "0"))


def _units_fault(term: Term) -> str:
    """Describe a quantity in units that is not from 0.0001 to 1, or a whole number up to :data:`MAX_DEVICES`."""
    units = term.units
    if units <= 0:
        return "a quantity must be more than 0; leave the term out to ask for none"
    if units > MAX_DEVICES * UNITS_PER_DEVICE:
        return f"a quantity must be at most {MAX_DEVICES} devices (got {format_units(units)})"
    whole, rest = divmod(units, UNITS_PER_DEVICE)
    if whole and rest:
        names = str(term).partition(":")[0]
        # What stands behind the names is not checked yet.
        way_out = f"; ask for {names}:{whole} or {names}:{whole + 1}" if _offer("{}", f"{names}:{whole}") else ""
        return f"a quantity above one device must be whole (got {format_units(units)}){way_out}"
    return ""


def _options() -> tuple[str, ...]:
    """Return the names of all options."""
    return (*_FLAGS, "else", *filter(str.isalpha, FILTERS))


def _parse_options(text: str, options: Sequence[str]) -> dict[str, str]:
    """Parse the options of a term: the values by lower-case name, empty for a flag. Values of filters are not checked.

    Raises:
        RequestError: When an option is unknown, given twice, or has a wrong value.
    """
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.lower()
        if key not in _options():
            _refuse(text, f"an option must be one of {', '.join(forms())} (got {shown(option)})")
        if key in given:
            _refuse(text, f"an option must be given once (got {key!r} twice)")
        if key == "else" and value.lower() != "cpu":
            _refuse(text, f"'else' must be else=cpu (got {shown(option)})")
        if key in _FLAGS and equals:
            _refuse(text, f"{key!r} must stand without a value (got {shown(option)})")
        given[key] = value
    return given


def forms() -> list[str]:
    """Return the syntax of each option."""
    return [*(each.form for name, each in FILTERS.items() if name.isalpha()), *_FLAGS, "else=cpu"]


def _checked(request: Request) -> Request:
    """Return a hand-made request unchanged, if the grammar could have made it.

    Raises:
        RequestError: When the grammar could not have made the request.
    """
    terms: object = request.terms  # callers without a type checker may have given any value
    if not isinstance(terms, Sequence) or not all(isinstance(term, Term) for term in terms):
        raise RequestError(f"the terms of a request must be a tuple of Term (got {shown(terms)})")
    if not 0 < len(request.terms) <= MAX_TERMS:
        raise RequestError(f"a request must have 1 to {MAX_TERMS} terms (got {len(request.terms)})")
    for term in request.terms:
        if fault := _type_fault(term):
            raise RequestError(fault)
        if not term.names or not all(NAME.fullmatch(name) for name in term.names):
            raise RequestError(
                f"a term's names must each be a letter, then letters, digits and . _ - (got {shown(term.names)})"
            )
        _check_term(str(term), term)
    return request


def _type_fault(term: Term) -> str:
    """Describe a field of a hand-made term that is of another type; empty if none is."""
    pairs = type(term.filters) is tuple and all(_are_texts(each) and len(each) == 2 for each in term.filters)  # noqa: PLR2004
    fields = (
        ("names", "a tuple of texts", _are_texts(term.names)),
        ("filters", "a tuple of pairs of texts", pairs),
        ("units", "a whole number of 1/10000", type(term.units) is int),
        ("memory_bytes", "a whole number of bytes", type(term.memory_bytes) is int),
        ("linked", "True or False", type(term.linked) is bool),
        ("mixed", "True or False", type(term.mixed) is bool),
    )
    wrong = ((name, rule) for name, rule, passes in fields if not passes)
    return next((f"{name!r} of a term must be {rule} (got {shown(getattr(term, name))})" for name, rule in wrong), "")


def _are_texts(value: object) -> bool:
    return type(value) is tuple and all(isinstance(each, str) for each in value)


def _offer(clause: str, text: str) -> str:
    """Return a clause with a request in place of ``{}``; empty if the request would be refused as well."""
    try:
        return clause.format(_parse_text(text))
    except RequestError:
        return ""


def _refuse(text: str, fault: str) -> NoReturn:
    """Raise the error for a faulty request.

    Raises:
        RequestError: Always.
    """
    raise RequestError(f"request {shown(text)}: {fault}")
