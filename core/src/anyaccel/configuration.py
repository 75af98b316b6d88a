"""Configuration: the machine's file and the user's file, both in TOML, and the table of settings.

The machine's file applies to every user, so it must belong to root. No variable and no argument of a command selects
another file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from functools import cache

from anyaccel.errors import ConfigurationError
from anyaccel.model import Value, field, replace
from anyaccel.text import duration, elapsed, printable, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MACHINE_FILE = "/etc/anyaccel/config.toml"
"""The machine's file. Tests mount a directory of their own there, in a private mount namespace."""
_MOST_BYTES = 1 << 20
_LONGEST_PROBE = 3600
_MOST_LINES = 500
"""Number of lines up to which the lines of settings are searched: the search is quadratic in this number."""


class Rule(Value):
    """Rule for a value.

    Attributes:
        words: The rule in words, after "must be".
        read: Converts the value in the file; raises ValueError or TypeError for a value against the rule.
        example: A value as written in the file.
        default: The value without an entry in the file.
        write: Formats a value for display.
    """

    words: str
    read: Callable[[Any], Any]
    example: str
    default: Any = None
    write: Callable[[Any], str] = str


class ConfigKey(Value):
    """A setting.

    Attributes:
        key: Table and name, separated by dots. ``*`` stands for any name, such as a user's.
        rule: Rule and default of the value.
        summary: Effect of the setting, in one line.
        kind: The file that may have the setting: ``machine`` or ``user``.
    """

    key: str
    rule: Rule
    summary: str
    kind: str


class Configuration(Value):
    """Content of one file.

    Attributes:
        path: The file.
        found: Whether the file exists.
        values: The settings in the file, by key.
    """

    path: str
    found: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Return the value of a setting from the file, or the default.

        Args:
            key: Key of the setting, with a name in place of ``*``.
        """
        return self.values[key] if key in self.values else _setting(key).rule.default

    def names(self, table: str) -> tuple[str, ...]:
        """Return the names with settings in a table whose keys have ``*`` in place of a name."""
        # Up to the last dot, since the name of a user may have dots.
        within = (key.removeprefix(f"{table}.") for key in self.values if key.startswith(f"{table}."))
        return tuple(dict.fromkeys(key.rpartition(".")[0] for key in within))


def _seconds(value: Any) -> float:
    if value == 0 and type(value) is int:  # True and 0.0 are equal to 0, too
        return 0.0
    return duration(value)


def _interval(value: Any) -> float:
    seconds = _seconds(value)
    if 0 < seconds < 1:
        raise ValueError
    return seconds


def _number(low: float, high: float, *kinds: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in (kinds or (int, float)) or not low <= value <= high:  # nan fails the comparison
            raise ValueError
        return value

    return read


def _probe_seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_PROBE:
        raise ValueError
    return float(value)


def _labels(value: Any) -> tuple[str, ...]:
    from anyaccel.model.labels import read_labels, write_labels

    if type(value) is not list or not all(type(each) is str for each in value):
        raise TypeError
    return write_labels(read_labels(value))


def text(value: Any) -> str:
    """Read a value of one line of printable text."""
    if type(value) is not str or not value.isprintable():
        raise ValueError
    return value


def one_of(*choices: str | bool) -> Rule:
    """Return the rule of a value that is one of the given words or truth values."""
    *words, last = (repr(each) if isinstance(each, str) else str(each).lower() for each in choices)

    def read(value: Any) -> Any:
        if not any(value is each or (value == each and type(value) is str) for each in choices):  # 1 is not true
            raise ValueError
        return value

    return Rule(words=f"{', '.join(words)} or {last}", read=read, example=words[0].replace("'", '"'))


DURATION = Rule(words="a duration such as '90s', '15m', '2h' or '1h30m'", read=duration, example='"2h"', write=elapsed)
DEVICES = Rule(words="a number of devices from 0 to 1000000, such as 2 or 0.5", read=_number(0, 1_000_000), example="2")
PRIORITY = Rule(words="a whole number from -1000000 to 1000000", read=_number(-1_000_000, 1_000_000, int), example="0")
TRUTH = one_of(True, False)
TEXT = Rule(words="one line of printable text", read=text, example='"host"')
LABELS = Rule(
    words="a list of labels such as 'reserved' or 'team=vision', of letters, digits and . _ -",
    read=_labels,
    example='["team=vision", "reserved"]',
)
WEIGHT = Rule(words="a number from 0.001 to 1000", read=_number(0.001, 1000), example="1", default=1)
BACKFILL = Rule(
    words="0, or a duration such as '90s', '15m' or '2h'", read=_seconds, example="0", default=0.0, write=elapsed
)
PROBE_SECONDS = Rule(words="seconds, more than 0 and at most 3600", read=_probe_seconds, example="10")
INTERVAL = Rule(
    words="0 for never, or a duration of 1s or more, such as '60s' or '5m'",
    read=_interval,
    example='"60s"',
    default=60.0,
    write=elapsed,
)

_LIMITS = (
    ("devices", DEVICES, "devices that a user may hold at once"),
    ("time", DURATION, "the longest time limit of a user's request, and the limit of a request without one"),
    ("priority", PRIORITY, "the highest priority that a user may ask for"),
)
_MACHINE: tuple[tuple[str, Rule, str], ...] = (
    (
        "queue.backfill",
        BACKFILL,
        "by how much a request with a time limit may delay an earlier one (backfill)",
    ),
    (
        "queue.fair_shares",
        replace(TRUTH, default=False),
        "of two requests of one priority, serve the user first who holds less",
    ),
    (
        "queue.half_life",
        DURATION,
        "fair shares count the device-hours of each user, of which each counts half after this time",
    ),
    (
        "queue.patience",
        replace(DURATION, default=86400.0),
        "a request that has waited this long comes first, before shares and priorities",
    ),
    *((f"limits.{name}", rule, f"{words}; root has no limit") for name, rule, words in _LIMITS),
    *(
        (f"groups.*.{name}", rule, f"{words}: each member of this Unix group, instead of [limits]")
        for name, rule, words in _LIMITS
    ),
    ("groups.*.total_devices", DEVICES, "devices that all members of this Unix group may hold at once, together"),
    ("groups.*.weight", WEIGHT, "fair share of all members together; a user counts for the first group in this file"),
    *(
        (f"users.*.{name}", rule, f"{words}: this user, instead of [limits] and [groups]")
        for name, rule, words in _LIMITS
    ),
    ("users.*.weight", WEIGHT, "fair share of this user, relative to 1 for other users (of the same group)"),
    (
        "devices.*.labels",
        LABELS,
        'labels of the devices with this name or id, such as GPU, "GPU/0-3" or "acme/1"',
    ),
)
_USER: tuple[tuple[str, Rule, str], ...] = (
    ("defaults.machine", TEXT, "the machine, if neither --machine nor ANYACCEL_MACHINE selects one"),
    ("defaults.probe_timeout", PROBE_SECONDS, "seconds for each vendor's detection"),
    ("defaults.mask", one_of("id", "index"), "how masks name devices"),
    ("defaults.unallocated", one_of("hide", "inherit"), "whether devices of vendors outside the request are hidden"),
    ("defaults.wait", DURATION, "the longest wait for devices"),
    ("defaults.avoid_busy", TRUTH, "skip devices that are used without a lease"),
    (
        "defaults.enforce",
        replace(one_of(True, False, "try"), example='"try"'),
        "confine commands to their devices: always, never, or if the kernel can",
    ),
    ("journal.keep", replace(TRUTH, default=True), "write one line for each ended lease, for reports"),
    (
        "journal.sample_every",
        INTERVAL,
        "interval of utilization samples of the devices that 'run' and 'hold' hold, for reports",
    ),
)
SETTINGS: Mapping[str, ConfigKey] = {
    key: ConfigKey(key=key, rule=rule, summary=summary, kind=kind)
    for kind, rows in (("machine", _MACHINE), ("user", _USER))
    for key, rule, summary in rows
}
"""Every setting, by key."""


def written(key: str, value: Any) -> str:
    """Format the value of a setting for display; ``-`` for none.

    Args:
        key: Key of the setting, with any name in place of ``*``.
        value: The value.
    """
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else _setting(key).rule.write(value)


def settings_of(kind: str) -> list[ConfigKey]:
    """Return the settings of one kind of file, ``machine`` or ``user``."""
    return [setting for setting in SETTINGS.values() if setting.kind == kind]


def template(kind: str) -> str:
    """Return a file with every setting commented out, with summary and default.

    Args:
        kind: Kind of the file, ``machine`` or ``user``.
    """
    whose = "every user of this machine" if kind == "machine" else "you alone"
    lines = [f"# Settings of anyaccel for {whose}. Take out the '#' of a table's name and of what you set in it."]
    table = ""
    for setting in settings_of(kind):
        above, _, name = setting.key.rpartition(".")
        if above != table:
            lines += ["", f"#[{above.replace('*', 'NAME')}]"]
            table = above
        lines += ["", f"# {setting.summary}:", f"# {setting.rule.words}", f"#{name} = {setting.rule.example}"]
    return "\n".join(lines) + "\n"


def machine(path: str = MACHINE_FILE) -> Configuration:
    """Read the machine's configuration.

    Args:
        path: The file; only tests pass another file.

    Returns:
        The configuration; empty if there is no file.

    Raises:
        ConfigurationError: When the file cannot be read, has a wrong entry, or can be written by other users than root.
    """
    return _read(path, "machine", {0})


def user(environ: Mapping[str, str] | None = None) -> Configuration:
    """Read the configuration of the user.

    Args:
        environ: The environment, whose ``XDG_CONFIG_HOME`` or ``HOME`` says where the file is; the environment of this
            process when None.

    Returns:
        The configuration; empty if there is no file.

    Raises:
        ConfigurationError: When the file cannot be read, has a wrong entry, or belongs to neither the user nor root.
    """
    path = user_file(environ)
    return _read(path, "user", {0, os.geteuid()}) if path else _nothing(path)


def read_draft(path: str, kind: str) -> Configuration:
    """Read a file that is not in its place yet: any user may own the file, but no other user may write to it.

    Args:
        path: The file.
        kind: Kind of the file; see :func:`find_kind`.

    Raises:
        ConfigurationError: When the file cannot be read, has a wrong entry, or can be written by other users.
    """
    return _read(path, kind, None)


def find_kind(path: str, environ: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Return the kind of a configuration file, ``machine`` or ``user``, and whether the file is in its place.

    Elsewhere the tables decide; a file without a known table counts as the machine's.

    Args:
        path: The file.
        environ: As for :func:`user`.
    """
    import tomllib

    mine = user_file(environ)
    if os.path.realpath(path) == os.path.realpath(MACHINE_FILE):
        return "machine", True
    if mine and os.path.realpath(path) == os.path.realpath(mine):
        return "user", True
    tables: set[str] = set()
    if os.path.isfile(path):
        try:
            with open(path, "rb") as file:
                tables = set(tomllib.loads(file.read(_MOST_BYTES).decode()))
        except (OSError, ValueError, RecursionError):  # read_draft() reports the error
            tables = set()
    of_machine, of_user = ({each.key.partition(".")[0] for each in settings_of(kind)} for kind in ("machine", "user"))
    return ("user" if tables & of_user and not tables & of_machine else "machine"), False


def user_file(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the user's configuration, existing or not; empty without a home directory."""
    directory = user_directory("XDG_CONFIG_HOME", ".config", environ)
    return f"{directory}/config.toml" if directory else ""


def user_directory(variable: str, usual: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the user's directory for one kind of files, after the XDG Base Directory Specification.

    Args:
        variable: Variable with the parent, such as ``XDG_STATE_HOME``; a relative path in it is ignored.
        usual: Default parent below the home directory, such as ``.local/state``.
        environ: The environment; that of this process when None.

    Returns:
        Absolute path of our directory there; empty without a home directory.
    """
    found = os.environ if environ is None else environ
    home = found.get(variable, "")
    if not home.startswith("/"):  # as the specification demands
        home = f"{found['HOME']}/{usual}" if found.get("HOME", "").startswith("/") else ""
    return f"{home}/anyaccel" if home else ""


def _read(path: str, kind: str, owners: set[int] | None) -> Configuration:
    try:
        os.stat(path)  # mostly there is no file, and stat works without free descriptors
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except (FileNotFoundError, NotADirectoryError):
        return _nothing(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        found = os.fstat(descriptor)
        if owners is None:
            _trust(path, "user", found, {found.st_uid})
        else:
            # In a user namespace where root has no number, root's files seem to belong to an unmapped number.
            _trust(path, kind, found, {*owners, os.stat("/").st_uid})
        # With ctime: mtime can be set back, and an editor may keep the inode.
        identity = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
        known = _KNOWN.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    if len(content) > _MOST_BYTES:
        raise ConfigurationError(f"{printable(path)!r} must be at most 1 MiB", hint="is it the right file?")
    made = Configuration(path=path, found=True, values=_values(path, kind, content))
    _KNOWN[path] = identity, made
    return made


@cache
def _nothing(path: str) -> Configuration:
    """Return the configuration of a missing file."""
    return Configuration(path=path)


def _unreadable(path: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{printable(path)!r} cannot be read: {error.strerror}", hint="let its owner make it readable for all"
    )


_KNOWN: dict[str, tuple[tuple[int, ...], Configuration]] = {}
"""Configurations by path, with the identity of the file: a waiting process reads the policy at each look."""


def _trust(path: str, kind: str, found: os.stat_result, owners: set[int]) -> None:
    """Refuse a file that other users can write."""
    whose = "root" if kind == "machine" else "the user or root"
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{printable(path)!r} must be a regular file", hint="remove what has its name")
    if found.st_uid not in owners:
        raise ConfigurationError(
            f"{printable(path)!r} must belong to {whose} (it belongs to user {found.st_uid})",
            hint=f"look at what it says, then: sudo chown {0 if kind == 'machine' else os.geteuid()} {printable(path)}",
        )
    private = kind == "user" and found.st_gid == found.st_uid  # many systems give each user a private group
    wrong = stat.S_IWOTH | (0 if private or found.st_gid == 0 else stat.S_IWGRP)
    if found.st_mode & wrong:
        raise ConfigurationError(
            f"{printable(path)!r} must be writable by {whose} only (its mode is {stat.S_IMODE(found.st_mode):04o})",
            hint=f"{'sudo ' * (kind == 'machine')}chmod go-w {printable(path)}",
        )


def _values(path: str, kind: str, content: bytes) -> Mapping[str, Any]:
    import tomllib

    name = printable(path)
    try:
        text = content.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line, told = _locate(error, content)
        where = f"{name!r}, line {line}," if line else f"{name!r}"
        raise ConfigurationError(
            f"{where} must be TOML in UTF-8: {printable(told)}", hint="correct it, or move it away"
        ) from error
    values: dict[str, Any] = {}
    wrong: dict[str, tuple[str, str]] = {}
    for key, value in _flat(document, ""):
        if isinstance(value, dict):
            continue
        setting = _setting(key)
        if setting is None or setting.kind != kind:
            wrong[key] = _unknown(key, kind), _close(key, kind)
            continue
        try:
            values[key] = setting.rule.read(value)
        except (ValueError, TypeError):
            told = f"{printable(key)} must be {setting.rule.words} (got {shown(value)})"
            wrong[key] = told, f"{printable(key)}: {setting.summary}"
    # A half-life alone would change nothing, which nothing would show.
    if "queue.half_life" in values and not values.get("queue.fair_shares"):
        wrong["queue.half_life"] = "queue.half_life needs queue.fair_shares = true", "set both, or neither"
    if wrong:
        lines = _find_lines(text)
        first, *further = (
            ConfigurationError(
                f"{name!r}, line {lines[key]}: {told}" if key in lines else f"{name!r}: {told}", hint=hint
            )
            for key, (told, hint) in sorted(wrong.items(), key=lambda each: lines.get(each[0], 0))
        )
        first.further = tuple(further)
        raise first
    return values


def _locate(error: Exception, content: bytes) -> tuple[int, str]:
    """Return the line of an error in a document, 0 if unknown, and the error without its position."""
    import re

    if isinstance(error, UnicodeDecodeError):
        return content.count(b"\n", 0, error.start) + 1, str(error)
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
    if found is None:
        return 0, str(error) or type(error).__name__
    if found[2] is None:  # the parser gives no position at the end of a document
        return content.rstrip(b"\n").count(b"\n") + 1, f"{found[1]} (at the end)"
    return int(found[2]), f"{found[1]} (column {found[3]})"


def find_lines(path: str) -> Mapping[str, int]:
    """Return the line of each setting in a file, by key, as far as known."""
    try:
        with open(path, encoding="utf-8") as file:
            return _find_lines(file.read(_MOST_BYTES))
    except (OSError, ValueError):  # the file has changed since it was read
        return {}


def _find_lines(text: str) -> dict[str, int]:
    """Return the line of each table and setting in a TOML text, by key.

    The parser reports no positions. So the text is parsed line by line: a line that begins a value of several lines is
    not valid TOML without the rest, and a key appears with the end of its statement.
    """
    import tomllib

    found: dict[str, int] = {}
    lines = text.replace("\r\n", "\n").split("\n")
    first = 1
    for end in range(1, min(len(lines), _MOST_LINES) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:end]))
        except (ValueError, RecursionError):
            continue
        for key, _ in _flat(document, ""):
            found.setdefault(key, first)
        first = end + 1
    return found


def _flat(table: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
    """Return the tables and settings of a document by key."""
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        key = f"{above}.{name}" if above else name
        found.append((key, value))
        if isinstance(value, dict):
            found += _flat(value, key)
    return found


def _setting(key: str) -> Any:
    """Return the setting of a key; None for an unknown key. The name of a user may have dots."""
    if key in SETTINGS:
        return SETTINGS[key]
    table, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    return SETTINGS.get(f"{table}.*.{last}") if name else None


def _unknown(key: str, kind: str) -> str:
    setting = _setting(key)
    if setting is not None and kind == "user":
        return f"{printable(key)} is for the administrator, in {MACHINE_FILE}"
    if setting is not None:
        return f"{printable(key)} is for the files of users"
    return f"there is no setting {shown(key)}"


def _close(key: str, kind: str) -> str:
    import difflib

    known = [each.key for each in settings_of(kind)]  # only those that this file may have
    elsewhere = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, elsewhere, n=1, cutoff=0) or difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}"
