"""Read TOML as catalogs are written, in half of the time that :mod:`tomllib` takes.

A fresh process of a vendor reads its catalog, and the caller waits: with the import of tomllib the largest catalog costs
15 ms there, and 4 ms here. What is understood here means the same in TOML. Any other document is left to tomllib, such
as one with dates, escapes or dotted keys, and so is each wrong document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KEY = r"""[A-Za-z0-9_-]+|"[^"\\\n]*"(?!")|'[^'\n]*'(?!')"""
_HEADER = r"^\[\[?[A-Za-z0-9_.-]+\]\]?(?= *(?:#|\n))"
_LINES = r"'''[\s\S]*?'''(?!')"
_TOKEN = re.compile(rf" *(?:#.*)?(?:(\n|{_HEADER}|{_LINES}|{_KEY}|[][{{}},=])|.)", re.MULTILINE)
"""A token behind blanks and a comment; the group is empty for a character that begins no known token."""
_NAME = re.compile(_KEY)


class _OnlyTomllibError(ValueError):
    """Raised at a construct left to :mod:`tomllib`."""


def loads(text: str) -> dict[str, Any]:
    """Read a TOML document.

    Raises:
        ValueError: The text is not TOML; the message says where.
    """
    try:
        return _read(text)
    except ValueError:
        import tomllib

        return tomllib.loads(text)


def _read(text: str) -> dict[str, Any]:
    # TOML forbids control characters. Characters that cannot be printed are rare: tomllib decides.
    if not text.replace("\n", "").isprintable():
        raise _OnlyTomllibError
    document: dict[str, Any] = {}
    above: dict[str, dict[str, Any]] = {"": document}
    table = document
    tokens: Iterator[str] = iter(_TOKEN.findall(f"{text}\n"))
    for token in tokens:
        if token == "\n":
            continue
        if token[:1] == "[":
            table = _open_table(token, above)
        else:
            _read_pair(token, tokens, table)
        if next(tokens, "") != "\n":
            raise _OnlyTomllibError
    return document


def _open_table(header: str, above: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make the table of a header, ``[name]``, ``[parent.name]`` or ``[[name]]``.

    Args:
        header: The header.
        above: The last table of each name; this one is added.
    """
    listed = header[:2] == "[["
    name = header.strip("[]")
    parent, dot, last = name.rpartition(".")
    wrong = header != (f"[[{name}]]" if listed else f"[{name}]") or not last
    if wrong or (dot and (listed or not parent or "." in parent)):
        raise _OnlyTomllibError
    # [parent.name] without [parent] makes the parent. A parent that is written later is a table that is extended: left
    # to tomllib, by the error of _put.
    if parent not in above:
        _put(above[""], parent, above.setdefault(parent, {}))
    table: dict[str, Any] = {}
    if not listed:
        _put(above[parent], last, table)
    elif name in above and isinstance(tables := above[""][name], list):
        tables.append(table)
    else:
        _put(above[""], last, [table])
    above[name] = table
    return table


def _put(table: dict[str, Any], key: str, value: object) -> None:
    if key in table:
        raise _OnlyTomllibError
    table[key] = value


def _read_pair(key: str, tokens: Iterator[str], table: dict[str, Any]) -> None:
    """Read the rest of ``key = value``, and put the value into a table."""
    if not _NAME.fullmatch(key) or next(tokens, "") != "=":
        raise _OnlyTomllibError
    value = _read_value(next(tokens, ""), tokens)
    _put(table, key[1:-1] if key[0] in "\"'" else key, value)


def _read_value(token: str, tokens: Iterator[str]) -> Any:
    """Read the value that begins with a token: a text, a truth value, a whole number, a list or a table."""
    if token == "[":
        return _read_list(tokens)
    if token == "{":
        return _read_table(tokens)
    if token in {"true", "false"}:
        return token == "true"
    if token[:3] == "'''":
        if "'''" in token[3:-3]:  # more than two quotes before the closing ones are no part of the text
            raise _OnlyTomllibError
        return token[3:-3].removeprefix("\n")  # TOML drops the line break behind the opening quotes
    if token[:1] in {"'", '"'}:
        return token[1:-1]
    if not token.isalnum() or (token[0] == "0" and token != "0" and token[1] != "x"):
        raise _OnlyTomllibError
    return int(token, 16) if token[:2] == "0x" else int(token)


def _read_list(tokens: Iterator[str]) -> list[Any]:
    """Read the items of a list and its closing bracket; there may be line breaks between, and a comma at the end."""
    items = []
    within = (token for token in tokens if token != "\n")
    token = next(within, "")
    while token != "]":
        items.append(_read_value(token, tokens))
        token = next(within, "")
        if token == ",":
            token = next(within, "")
        elif token != "]":
            raise _OnlyTomllibError
    return items


def _read_table(tokens: Iterator[str]) -> dict[str, Any]:
    """Read the pairs of a table on one line, and its closing brace."""
    table: dict[str, Any] = {}
    token = next(tokens, "")
    while token != "}":
        _read_pair(token, tokens, table)
        token = next(tokens, "")
        if token == ",":
            token = next(tokens, "")
            if token == "}":
                raise _OnlyTomllibError
        elif token != "}":
            raise _OnlyTomllibError
    return table
