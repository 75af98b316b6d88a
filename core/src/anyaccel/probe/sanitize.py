"""Remove private data from a recording: serial numbers, addresses, names.

Equal originals get equal replacements, and different originals stay different and keep their order. So a plug-in finds
the same devices on the recording, under other ids. Replaced are:

* UUIDs, MAC, IPv4, IPv6 and e-mail addresses, wherever they stand;
* values of a serial number, UUID, unique id, machine id and the like, by the name of the file, the key in a text or an
  answer, or the column of a command, and the same values in all other places;
* names of hosts and users that the caller gives, or that a key or a home directory shows.

Left out are variables with the name of a secret, and the whole log of the machine where a plug-in reads it with a
command, as it names other hardware, hosts and users; a query of the kit records matching lines alone. Kept are PCI
addresses, versions and measured values. A name that is also a word of the machine, such as a user with the name of the
driver, is replaced in home directories only.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from anyaccel.model import Value

EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+[A-Za-z]{2,}")
USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
SECRET_VARIABLE = re.compile(r"token|secret|passw|credential|api_?key|private|cookie|session|auth", re.IGNORECASE)
LOGS = ("dmesg", "journalctl")
LONG = 12
"""Digits of a number that is replaced in decimal and hexadecimal notation, since files differ in notation."""
SHORTEST_NAME = 3
UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.IGNORECASE)
MAC = re.compile(r"(?<![0-9a-z:-])[0-9a-f]{2}([:-])[0-9a-f]{2}(?:\1[0-9a-f]{2}){4,18}(?![0-9a-z:-])", re.IGNORECASE)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
IPV4 = re.compile(rf"(?<![0-9A-Za-z.])(?:{_OCTET}\.){{3}}{_OCTET}(?!\.?[0-9A-Za-z])")
IPV6 = re.compile(r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![0-9A-Za-z:.])")
HOME = re.compile(r"((?<![\w.-])/(?:[\w.-]+/)?(?:home|Users)/)([^/\s:;,\"'<>()]+)")
VERSION = re.compile(
    r"(?:version|driver|firmware|release|runtime|bios|build|\bver\b|\bfw|\bv)[^\n]{0,40}\Z", re.IGNORECASE
)
"""Text before four numbers that are a version, not an address."""
_VALUE = r"""(?:"([^"\n]*)"|'([^'\n]*)'|([^\s"'<>,;}\]]+))"""
KEYED = (
    re.compile(rf"([A-Za-z][\w /.#()-]{{0,40}}?)[\"']?[^\S\n]*[:=][^\S\n]*{_VALUE}"),
    re.compile(r"<(\w+)>([^<\n]*)()()</"),
    re.compile(r"^(\w+)[^\S\n]+(\S+)()()$", re.MULTILINE),
)
"""Keys with their values: ``Serial Number : 7``, ``"uuid": "7"``, ``<serial>7</serial>``, ``unique_id 7``."""
NUMBERS = {"serial", "uuid", "guid", "wwid"}
NUMBER_PAIRS = {f"{word} id" for word in ("unique", "asic", "machine", "boot", "instance")} | {"asset tag"}
NAMES = {"hostname", "nodename", "username", "login", "account", "project", "owner"}
NAME_PAIRS = {"host name", "node name", "user name"}
LAST_WORDS = {"user", "host"}
COMMON_WORDS = frozenset({"root", "localhost", "nobody", "unknown", "none", "null", "user", "host", "name", "admin"})
IP4 = 4
SHORTEST = 5
"""Fewest characters of a serial number, so that no count or index is taken for one."""
LONGEST = 128


class PrivateNames(Value):
    """Known private names of a machine, beside its recording.

    Attributes:
        hosts: Names of the machine, with and without the domain.
        users: Names of its users.
        addresses: Network addresses, which count also where they look like versions.
    """

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()


Found = dict[str, set[str]]
"""Private data of a recording, in lower case, by kind: uuid, mac, ipv4, ipv6, number, name or home."""


def sanitize(recording: Mapping[str, Any], names: PrivateNames | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace the private data of a recording.

    Args:
        recording: The content of a ``machine.json``.
        names: Known private names of the machine.

    Returns:
        The sanitized recording, and the replacements by original, in lower case.
    """
    names = names or PrivateNames()
    recording = {"environ": {}, "paths": {}, "commands": [], "queries": {}, **recording}
    environ = {name: text for name, text in recording["environ"].items() if not SECRET_VARIABLE.search(name)}
    commands = [{**entry, "stdout": ""} if _is_log(entry) else entry for entry in recording["commands"]]
    kept = {**recording, "environ": environ, "commands": commands}
    found = search(kept, names.addresses)
    homes = _numbered("user", _present(names.users, kept) | found["home"])
    hosts = _numbered("host", _present(names.hosts, kept))
    swap = _Swap(_replacements(found, homes, hosts, words_of(kept)), homes)
    cleaned: dict[str, Any] = swap.data(kept)
    cleaned["environ"] = {name: swap.mask(text) for name, text in environ.items()}
    return cleaned, swap.replacements


def _is_log(entry: Mapping[str, Any]) -> bool:
    """Return whether a command has printed the log of the machine."""
    return "stdout" in entry and os.path.basename(entry["argv"][0]) in LOGS


def replace_in(data: Any, replacements: Mapping[str, str]) -> Any:
    """Apply replacements to other data, such as an earlier inventory."""
    return _Swap(replacements, {}).data(data)


def _present(names: Iterable[str], recording: Mapping[str, Any]) -> set[str]:
    """Return the names that occur in a recording, in lower case."""
    everything = "\n".join(text for _, text in texts_of(recording)).lower()
    return {name.lower() for name in names if name.lower() in everything}


class _Swap:
    """Replacements, and their application to texts and data.

    Args:
        replacements: Replacements by original, in lower case.
        homes: Replacements of user names in home directories.
    """

    def __init__(self, replacements: Mapping[str, str], homes: Mapping[str, str]) -> None:
        self.homes = homes
        self.replacements = {**replacements, **{name: homes[name] for name in homes if name in replacements}}
        # Regular expressions take the first alternative that fits: a short number must not cut a longer one.
        longest_first = sorted(self.replacements, key=lambda text: (-len(text), text))
        alternatives = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._pattern = re.compile(rf"(?<![0-9A-Za-z])(0x)?({alternatives})(?![0-9A-Za-z])", re.IGNORECASE)

    def text(self, text: str) -> str:
        text = USERINFO.sub("", EMAIL.sub("user@example.com", text))
        text = HOME.sub(lambda match: match[1] + self.homes.get(match[2].lower(), match[2]), text)
        return self._pattern.sub(lambda match: (match[1] or "") + self.replacements[match[2].lower()], text)

    def mask(self, text: str) -> str:
        """Replace in the value of a variable, where the beginning of an id may stand for the whole id."""
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
    """Replace the beginning of an id by the beginning of its replacement, as far as it is unambiguous."""
    head, dash, start = item.strip().partition("-")
    if (
        not dash
        or re.fullmatch(r"[0-9a-f][0-9a-f-]{3,}", start, re.IGNORECASE) is None
        or start.lower() in replacements
    ):
        return item
    meant = [made for text, made in replacements.items() if text.startswith(start.lower())]
    return f"{head}-{os.path.commonprefix(meant)}" if meant else item  # noqa: RUF071 - these are no paths


def _replacements(found: Found, users: dict[str, str], hosts: dict[str, str], words: set[str]) -> dict[str, str]:
    """Return the replacements by original; a name that is also a word of the machine is left out."""
    uuids = {text for text in found["uuid"] if text.strip("0-")}  # one of zeros alone says that there is none
    made = {text: f"{n:08x}-0000-4000-8000-{n:012x}" for n, text in _ranked(uuids)}
    made |= {text: _mac(text, n) for n, text in _ranked(found["mac"])}
    made |= {text: f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n, text in _ranked(found["ipv4"], _octets)}
    made |= {text: f"2001:db8::{n:x}" for n, text in _ranked(found["ipv6"])}
    made |= _numbers(found["number"] - made.keys())
    named = {**users, **_numbered("name", found["name"] - users.keys())}
    named = {name: new for name, new in named.items() if len(name) >= SHORTEST_NAME} | hosts
    return {name: new for name, new in named.items() if name not in words} | made


def _numbered(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Return names as ``user-1``, ``user-2``; a name of that form stays."""
    return {name: f"{kind}-{n}" for n, name in _ranked(name for name in names if not re.fullmatch(r"[a-z]+-\d+", name))}


def _numbers(found: set[str]) -> dict[str, str]:
    """Return numbers of the same length; a long number is replaced in each notation."""
    made: dict[str, str] = {}
    values = {text: value for text in found if (value := _value(text, found)) is not None}
    n = 0
    for n, value in enumerate(sorted(set(values.values())), 1):
        new = int("a" + f"{n:0{len(f'{value:x}') - 1}d}", 16)  # the letter marks the number as hexadecimal
        notations = {f"{value:d}": f"{new:d}", f"{value:x}": f"{new:x}", f"{value:016x}": f"{new:016x}"}
        # A value that is short without zeros, such as the 7 of 000000000007, may be any count or version.
        made |= {text: replacement for text, replacement in notations.items() if len(text) >= LONG}
        for text in (text for text, same in values.items() if same == value and text not in made):
            digits = text.removeprefix("0x")
            made[digits] = f"{new:x}".zfill(len(digits))
    for text in sorted(found - values.keys(), key=lambda text: (len(text), not text.isdecimal(), text)):
        n += 1
        made[text] = ("1" if text.isdecimal() else "s") + f"{n:0{len(text) - 1}d}"
    return made


def _value(text: str, found: set[str]) -> int | None:
    """Return the value of a long number. Without a letter among the digits, a notation in another text decides."""
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
    """Return a locally administered address of the same length."""
    separator = text[2]
    octets = bytes([2]) + n.to_bytes(text.count(separator), "big")
    return separator.join(f"{octet:02x}" for octet in octets)


def search(recording: Mapping[str, Any], addresses: tuple[str, ...] = ()) -> Found:
    """Find the private data of a recording.

    Args:
        recording: The content of a ``machine.json``.
        addresses: Known network addresses.
    """
    found: Found = defaultdict(set)
    for key, text in texts_of(recording):
        found["uuid"].update(match.lower() for match in UUID.findall(text))
        # An address of zeros is that of the loopback.
        found["mac"].update(match[0].lower() for match in MAC.finditer(text) if match[0].strip("0:-"))
        found["ipv4"].update(match[0] for match in IPV4.finditer(text) if not _is_version(key, text, match.start()))
        # Known addresses count also where the text around them looks like a version.
        found["ipv4"].update(address for address in addresses if "." in address and address in text)
        found["ipv6"].update(match[0].lower() for match in IPV6.finditer(text) if _is_address(match[0]))
        found["home"].update(match[2].lower() for match in HOME.finditer(text))
        _keep(found, key, text)
        for pattern in KEYED:
            for match in pattern.finditer(text):
                _keep(found, match[1], match[2] or match[3] or match[4] or "")
    for entry in recording["commands"]:
        _search_columns(found, entry)
    found["ipv4"] = set(filter(_is_address, found["ipv4"]))
    return found


def _search_columns(found: Found, entry: Mapping[str, Any]) -> None:
    """Search tables with commas, whose columns the command line or the first line names."""
    lines = [[cell.strip() for cell in line.split(",")] for line in str(entry.get("stdout", "")).splitlines()]
    tables = [(argument.rpartition("=")[2].split(","), lines) for argument in entry.get("argv", ())]
    tables += [(lines[0], lines[1:])] if lines else []
    for header, rows in tables:
        for cells in (cells for cells in rows if len(cells) == len(header) > 1):
            for name, cell in zip(header, cells, strict=True):
                _keep(found, name, cell)


def _keep(found: Found, key: str, text: str) -> None:
    """Add a value whose key stands for a number or a name of this machine."""
    text = text.strip()
    if not text or len(text) > LONGEST or re.search(r"[\s\"'{}<>\[\]]", text) or text.startswith("/"):
        return  # a sentence, a path, or a document whose keys are searched one by one
    if is_number(key):
        if len(text) >= SHORTEST and re.search(r"\d", text) and text.strip("0x:-") and not UUID.search(text):
            found["number"].add(text.lower())
    elif _is_name(key) and re.fullmatch(r"[A-Za-z][\w.-]+", text):
        found["name"].add(text.lower())


def is_number(key: str) -> bool:
    """Return whether a key stands for a serial number or a similar number."""
    words = _words(key)
    return not NUMBERS.isdisjoint(words) or not NUMBER_PAIRS.isdisjoint(_pairs(words))


def _is_name(key: str) -> bool:
    words = _words(key)
    return bool(
        NAMES.intersection(words) or NAME_PAIRS.intersection(_pairs(words)) or LAST_WORDS.intersection(words[-1:])
    )


def _words(key: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).lower())  # serialNumber is two words


def _pairs(words: list[str]) -> set[str]:
    return {f"{first} {second}" for first, second in itertools.pairwise(words)}


def _is_version(key: str, text: str, start: int) -> bool:
    line = text[max(0, start - 60) : start].rpartition("\n")[2]
    return VERSION.search(f"{key} {line}") is not None


def _is_address(text: str) -> bool:
    """Return whether a text is an address of a particular machine, not a loopback address or a time of day."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    everybodys = address.is_loopback or address.is_unspecified or text in {"169.254.169.254", "255.255.255.255"}
    # Without a digit, the text may be a qualified name such as dead::beef.
    told = address.version == IP4 or "::" not in text or re.search(r"\d", text) is not None
    return told and not everybodys and not text.startswith("0.")


def words_of(recording: Mapping[str, Any]) -> set[str]:
    """Return the words in names of facts, without home directories: the machine's hardware and drivers."""
    facts = [*recording["paths"], *recording["environ"], *recording["queries"]]
    facts += [argument for entry in recording["commands"] for argument in entry.get("argv", ())]
    return {word for fact in facts for word in re.findall(r"[a-z0-9]+", HOME.sub(r"\1", fact).lower())} | COMMON_WORDS


def texts_of(recording: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every text and number of a recording, each with its key or file name."""
    yield from recording["environ"].items()
    for path, entry in recording["paths"].items():
        yield "", path
        yield from ((path.rpartition("/")[2], text) for text in entry.values() if isinstance(text, str))
    yield from _inside("", recording["commands"])
    yield from _inside("", recording["queries"])


def _inside(key: str, data: Any) -> Iterator[tuple[str, str]]:
    if isinstance(data, Mapping):
        for name, content in data.items():
            yield "", name
            yield from _inside(name, content)
    elif isinstance(data, list):
        for content in data:
            yield from _inside(key, content)
    elif isinstance(data, (str, int)) and not isinstance(data, bool):
        yield key, str(data)
