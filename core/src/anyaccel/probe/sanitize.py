"""Take out of a recording what tells whose machine it is: serial numbers, addresses, names. A pure function.

The same original always becomes the same replacement, and different ones stay different and keep their order, so that
a plug-in finds the same devices on the recording as before, under other ids. Replaced are:

* UUIDs, MAC, IPv4, IPv6 and e-mail addresses, wherever they stand;
* values that are called serial number, UUID, unique id, machine id and the like - by the name of the file, the key in
  a text or an answer, or the column that a command was asked for - and the same values wherever else they stand;
* names of hosts and users that the caller gives, or that a key or a home directory tells.

Left out are variables whose name says that they hold a secret, and lines of the kernel's log about other hardware.
Kept are PCI addresses, versions and measured values. A name that is also a word of the machine, such as a user who is
called like the driver, is only replaced in home directories.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from anyaccel.probe.private import HOME, Found, PrivateNames, is_number, search, texts_of, words_of

EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+[A-Za-z]{2,}")
USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", re.IGNORECASE)
SECRET_VARIABLE = re.compile(r"token|secret|passw|credential|api_?key|private|cookie|session|auth", re.IGNORECASE)
LOGS = ("dmesg", "journalctl")
LONG = 12
"""Digits from which on a number is looked for in its other notation too: one file says it in decimal, one in hex."""
SHORTEST_NAME = 3


def sanitize(recording: Mapping[str, Any], names: PrivateNames | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace what tells whose machine was recorded.

    Args:
        recording: The content of a ``machine.json``.
        names: What is known about the machine beside it.

    Returns:
        The sanitized recording, and the replacements by original, in lower case.
    """
    names = names or PrivateNames()
    recording = {"environ": {}, "paths": {}, "commands": [], "queries": {}, **recording}
    environ = {name: text for name, text in recording["environ"].items() if not SECRET_VARIABLE.search(name)}
    kept = {**recording, "environ": environ, "commands": list(_without_logs(recording))}
    swap = _Swap(search(kept, names.addresses), _present(names, kept), words_of(kept))
    cleaned: dict[str, Any] = swap.data(kept)
    cleaned["environ"] = {name: swap.mask(text) for name, text in environ.items()}
    cleaned["commands"] = list(_without_logs(cleaned))  # a line may have been kept for a name that begins like a driver
    return cleaned, swap.replacements


def replace_in(data: Any, replacements: Mapping[str, str]) -> Any:
    """Make the replacements in other data, such as an inventory that was found before."""
    return _Swap(Found(), PrivateNames(), set(), replacements).data(data)


def _present(names: PrivateNames, recording: Mapping[str, Any]) -> PrivateNames:
    """Those of the names that occur at all."""
    everything = "\n".join(text for _, text in texts_of(recording)).lower()
    hosts, users = ([name for name in listed if name.lower() in everything] for listed in (names.hosts, names.users))
    return PrivateNames(hosts=tuple(hosts), users=tuple(users), addresses=names.addresses)


class _Swap:
    """The replacements, and how they are made in texts and data."""

    def __init__(
        self, found: Found, names: PrivateNames, words: set[str], replacements: Mapping[str, str] | None = None
    ) -> None:
        users = {name.lower() for name in names.users} | found.homes
        self.homes = _numbered("user", users)
        self.replacements = dict(
            replacements if replacements is not None else _replacements(found, names, users, words)
        )
        self.replacements |= {name: made for name, made in self.homes.items() if name in self.replacements}
        longest_first = sorted(self.replacements, key=lambda text: (-len(text), text))
        alternatives = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._pattern = re.compile(rf"(?<![0-9A-Za-z])(0x)?({alternatives})(?![0-9A-Za-z])", re.IGNORECASE)

    def text(self, text: str) -> str:
        text = USERINFO.sub("", EMAIL.sub("user@example.com", text))
        text = HOME.sub(lambda match: match[1] + self.homes.get(match[2].lower(), match[2]), text)
        return self._pattern.sub(lambda match: (match[1] or "") + self.replacements[match[2].lower()], text)

    def mask(self, text: str) -> str:
        """Replace in a variable's value, where the beginning of an id may stand for the whole."""
        return ",".join(self.text(_completed(item, self.replacements)) for item in text.split(","))

    def data(self, data: Any, key: str = "") -> Any:
        if isinstance(data, Mapping):
            return {self.text(name): self.data(content, name) for name, content in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.data(content, key) for content in data]
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, int) and not isinstance(data, bool) and is_number(key) and str(data) in self.replacements:
            return int(self.replacements[str(data)])
        return data


def _completed(item: str, replacements: Mapping[str, str]) -> str:
    """Replace the beginning of an id by that of its replacement, as far as it says which one is meant."""
    head, dash, start = item.strip().partition("-")
    if (
        not dash
        or re.fullmatch(r"[0-9a-f][0-9a-f-]{3,}", start, re.IGNORECASE) is None
        or start.lower() in replacements
    ):
        return item
    meant = [made for text, made in replacements.items() if text.startswith(start.lower())]
    return f"{head}-{os.path.commonprefix(meant)}" if meant else item  # noqa: RUF071 - these are no paths


def _replacements(found: Found, names: PrivateNames, users: set[str], words: set[str]) -> dict[str, str]:
    uuids = {text for text in found.uuids if text.strip("0-")}  # one of zeros alone says that there is none
    made = {text: f"{n:08x}-0000-4000-8000-{n:012x}" for n, text in _ranked(uuids)}
    made |= {text: _mac(text, n) for n, text in _ranked(found.macs)}
    made |= {text: f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n, text in _ranked(found.ipv4, _octets)}
    made |= {text: f"2001:db8::{n:x}" for n, text in _ranked(found.ipv6)}
    made |= _numbers(found.numbers - made.keys())
    hosts = {name.lower() for name in names.hosts}
    named = _numbered("user", users) | _numbered("name", found.names - users)
    named = {name: new for name, new in named.items() if len(name) >= SHORTEST_NAME} | _numbered("host", hosts)
    return {name: new for name, new in named.items() if name not in words} | made


def _numbered(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Names as ``user-1``, ``user-2``; those that already look so stay."""
    return {name: f"{kind}-{n}" for n, name in _ranked(name for name in names if not re.fullmatch(r"[a-z]+-\d+", name))}


def _numbers(found: set[str]) -> dict[str, str]:
    """Numbers of the same length, the long ones in each notation that means the same value."""
    made: dict[str, str] = {}
    values = {text: value for text in found if (value := _value(text, found)) is not None}
    n = 0
    for n, value in enumerate(sorted(set(values.values())), 1):
        new = int("a" + f"{n:0{len(f'{value:x}') - 1}d}", 16)  # a letter, so that nobody takes it for decimal
        notations = {f"{value:d}": f"{new:d}", f"{value:x}": f"{new:x}", f"{value:016x}": f"{new:016x}"}
        # What is short without its zeros, such as the 7 of 000000000007, may be any count or version.
        made |= {text: replacement for text, replacement in notations.items() if len(text) >= LONG}
        for text in (text for text, same in values.items() if same == value and text not in made):
            digits = text.removeprefix("0x")
            made[digits] = f"{new:x}".zfill(len(digits))
    for text in sorted(found - values.keys(), key=lambda text: (len(text), not text.isdecimal(), text)):
        n += 1
        made[text] = ("1" if text.isdecimal() else "s") + f"{n:0{len(text) - 1}d}"
    return made


def _value(text: str, found: set[str]) -> int | None:
    """What a long number means. Without a letter among its digits, the notation that another text confirms counts."""
    digits = text.removeprefix("0x")
    if len(digits) < LONG or re.fullmatch(r"[0-9a-f]+", digits) is None:
        return None
    hexadecimal = int(digits, 16)
    if not text.isdecimal() or str(hexadecimal) in found:
        return hexadecimal
    return int(digits)


def _ranked(texts: Iterable[str], key: Callable[[str], Any] | None = None) -> Iterator[tuple[int, str]]:
    return enumerate(sorted(texts, key=key), 1)


def _octets(address: str) -> tuple[int, ...]:
    return tuple(map(int, address.split(".")))


def _mac(text: str, n: int) -> str:
    """A locally administered address of the same length."""
    separator = text[2]
    octets = bytes([2]) + n.to_bytes(text.count(separator), "big")
    return separator.join(f"{octet:02x}" for octet in octets)


def _without_logs(recording: Mapping[str, Any]) -> Iterator[Any]:
    """The commands, and of the kernel's log only the lines about the devices and drivers that were looked at."""
    addresses = {match.lower() for path in recording["paths"] for match in PCI.findall(path)}
    drivers = {match for path in recording["paths"] for match in re.findall(r"/(?:module|drivers)/([\w-]+)", path)}
    drivers |= {
        str(entry["link"]).rpartition("/")[2]
        for path, entry in recording["paths"].items()
        if path.endswith("/driver") and "link" in entry
    }
    about = re.compile("|".join(map(re.escape, addresses | drivers)) or r"(?!)", re.IGNORECASE)
    for entry in recording["commands"]:
        if os.path.basename(str(entry["argv"][0])) in LOGS and "stdout" in entry:
            lines = str(entry["stdout"]).splitlines(keepends=True)
            yield {**entry, "stdout": "".join(line for line in lines if about.search(line))}
        else:
            yield entry
