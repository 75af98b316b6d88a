"""Find private data in a recording: serial numbers, addresses, names."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from anyaccel.model import Value

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
