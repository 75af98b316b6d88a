"""Read TOML as catalogs are written, in half of the time that :mod:`tomllib` takes.

A fresh process of a vendor reads its catalog while the caller waits: with the import of tomllib, the largest catalog
costs 15 ms there, and 2 ms here. What is understood here means the same in TOML. Any other document is left to tomllib,
such as one with dates, escapes or dotted keys, and so is each wrong document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KEY = r"""[A-Za-z0-9_-]+|"[^"\\\n]*"(?!")|'[^'\n]*'(?!')"""
_HEADER = r"^\[\[?[A-Za-z0-9_.-]+\]\]?(?= *(?:#|\n))"
_LINES = r"'''[\s\S]*?'''(?!')"
_WORD = re.compile(rf" *(?:#.*)?(?:(\n|{_HEADER}|{_LINES}|{_KEY}|[][{{}},=])|.)", re.MULTILINE)
"""A word behind blanks and a comment; the group is empty for a character that begins none."""
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
    words: Iterator[str] = iter(_WORD.findall(f"{text}\n"))
    for word in words:
        if word == "\n":
            continue
        if word[:1] == "[":
            table = _open_table(word, above)
        else:
            _read_pair(word, words, table)
        if next(words, "") != "\n":
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


def _read_pair(key: str, words: Iterator[str], table: dict[str, Any]) -> None:
    """Read the rest of ``key = value``, and put the value into a table."""
    if not _NAME.fullmatch(key) or next(words, "") != "=":
        raise _OnlyTomllibError
    value = _read_value(next(words, ""), words)
    _put(table, key[1:-1] if key[0] in "\"'" else key, value)


def _read_value(word: str, words: Iterator[str]) -> Any:
    """Read the value that begins with a word: a text, a truth value, a whole number, a list or a table."""
    if word == "[":
        return _read_list(words)
    if word == "{":
        return _read_table(words)
    if word in {"true", "false"}:
        return word == "true"
    if word[:3] == "'''":
        if "'''" in word[3:-3]:  # more than two quotes before the closing ones are no part of the text
            raise _OnlyTomllibError
        return word[3:-3].removeprefix("\n")  # TOML drops the line break behind the opening quotes
    if word[:1] in {"'", '"'}:
        return word[1:-1]
    if not word.isalnum() or (word[0] == "0" and word != "0" and word[1] != "x"):
        raise _OnlyTomllibError
    return int(word, 16) if word[:2] == "0x" else int(word)


def _read_list(words: Iterator[str]) -> list[Any]:
    """Read the items of a list and its closing bracket; there may be line breaks between, and a comma at the end."""
    items = []
    within = (word for word in words if word != "\n")
    word = next(within, "")
    while word != "]":
        items.append(_read_value(word, words))
        word = next(within, "")
        if word == ",":
            word = next(within, "")
        elif word != "]":
            raise _OnlyTomllibError
    return items


def _read_table(words: Iterator[str]) -> dict[str, Any]:
    """Read the pairs of a table on one line, and its closing brace."""
    table: dict[str, Any] = {}
    word = next(words, "")
    while word != "}":
        _read_pair(word, words, table)
        word = next(words, "")
        if word == ",":
            word = next(words, "")
            if word == "}":
                raise _OnlyTomllibError
        elif word != "}":
            raise _OnlyTomllibError
    return table
