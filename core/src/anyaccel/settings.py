"""The settings of the configuration: keys, rules and summaries, and the content of a file checked against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from anyaccel.errors import ConfigurationError
from anyaccel.model import Value, replace
from anyaccel.text import duration, printable, shown, span, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Rule(Value):
    """Rule for a value.

    Attributes:
        words: The rule in words, after "must be".
        read: Converts the value in the file; raises ValueError or TypeError for a value against the rule.
        example: A value as written in the file.
        write: Formats a value for display.
    """

    words: str
    read: Callable[[Any], Any]
    example: str
    write: Callable[[Any], str] = str


class ConfigKey(Value):
    """A setting.

    Attributes:
        key: Table and name, separated by dots. ``*`` stands for any name, such as a user's.
        rule: Rule of the value.
        summary: Effect of the setting, in one line.
        kind: The file that may have the setting: ``machine`` or ``user``.
    """

    key: str
    rule: Rule
    summary: str
    kind: str


def _seconds(value: Any) -> float:
    """Read a duration, or the whole number 0, as seconds."""
    if value == 0 and type(value) is int:  # True and 0.0 are equal to 0, too
        return 0.0
    return duration(value)


def _interval(value: Any) -> float:
    """Read 0, or a duration of a second or more, as seconds."""
    seconds = _seconds(value)
    if 0 < seconds < 1:
        raise ValueError
    return seconds


def _number(low: float, high: float, *kinds: type) -> Callable[[Any], Any]:
    """Return the reader of a number from ``low`` to ``high``, of one of ``kinds``; int or float by default."""

    def read(value: Any) -> Any:
        if type(value) not in (kinds or (int, float)) or not low <= value <= high:  # nan fails the comparison
            raise ValueError
        return value

    return read


def _labels(value: Any) -> tuple[str, ...]:
    """Read a list of labels, in their usual form."""
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


DURATION = Rule(words="a duration such as '90s', '15m', '2h' or '1h30m'", read=duration, example='"2h"', write=span)
DEVICES = Rule(words="a number of devices from 0 to 1000000, such as 2 or 0.5", read=_number(0, 1_000_000), example="2")
PRIORITY = Rule(words="a whole number from -1000000 to 1000000", read=_number(-1_000_000, 1_000_000, int), example="0")
TRUTH = one_of(True, False)
TEXT = Rule(words="one line of printable text", read=text, example='"host"')
LABELS = Rule(
    words="a list of labels such as 'reserved' or 'team=vision', of letters, digits and . _ -",
    read=_labels,
    example='["team=vision", "reserved"]',
)
WEIGHT = Rule(words="a number from 0.001 to 1000", read=_number(0.001, 1000), example="1")
BACKFILL = Rule(words="0, or a duration such as '90s', '15m' or '2h'", read=_seconds, example="0", write=span)
PROBE_SECONDS = Rule(words="seconds, from 0.001 to 3600", read=_number(0.001, 3600), example="10")
INTERVAL = Rule(
    words="0 for never, or a duration of 1s or more, such as '60s' or '5m'",
    read=_interval,
    example='"60s"',
    write=span,
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
        TRUTH,
        "of two requests of one priority, serve the user first who holds less",
    ),
    (
        "queue.half_life",
        DURATION,
        "fair shares count the device-hours of each user, of which each counts half after this time",
    ),
    (
        "queue.patience",
        DURATION,
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
    ("journal.keep", TRUTH, "write one line for each ended lease, for reports"),
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
    """Format the value of a setting for display, such as ``2h`` for 7200.0; ``-`` for None.

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
    """Return a file with every setting commented out: summary, rule and an example of each.

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


def read_values(name: str, kind: str, content: bytes, machine_file: str) -> Mapping[str, Any]:
    """Parse a file, and check each value; return the values by key.

    Args:
        name: Printable name of the file, for errors.
        kind: Kind of the file, ``machine`` or ``user``.
        content: Content of the file.
        machine_file: The machine's file, to which an error refers for settings of the machine in a user's file.

    Raises:
        ConfigurationError: When the file is not TOML in UTF-8. Also for the first entry with an unknown key or a wrong
            value, and for a half-life without fair shares; ``further`` has the errors of the other entries.
    """
    import tomllib

    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        told = printable(str(error) or type(error).__name__)
        raise ConfigurationError(
            f"{name!r} must be TOML in UTF-8: {told}", hint="correct it, or move it away"
        ) from error
    values: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    for key, value in _flat(document, ""):
        setting = _setting(key)
        if setting is None or setting.kind != kind:
            wrong.append((_unknown(key, kind, machine_file), _close(key, kind)))
            continue
        try:
            values[key] = setting.rule.read(value)
        except (ValueError, TypeError):
            told = f"{printable(key)} must be {setting.rule.words} (got {shown(value)})"
            wrong.append((told, f"{printable(key)}: {setting.summary}"))
    # A half-life alone would change nothing, which nothing would show.
    if "queue.half_life" in values and not values.get("queue.fair_shares"):
        wrong.append(("queue.half_life needs queue.fair_shares = true", "set both, or neither"))
    if wrong:
        first, *further = (ConfigurationError(f"{name!r}: {told}", hint=hint) for told, hint in wrong)
        first.further = tuple(further)
        raise first
    return values


def _flat(table: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a document by key, in the order of the file."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _setting(key: str) -> Any:
    """Return the setting of a key; None for an unknown key. The name of a user may have dots."""
    if key in SETTINGS:
        return SETTINGS[key]
    table, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    return SETTINGS.get(f"{table}.*.{last}") if name else None


def _unknown(key: str, kind: str, machine_file: str) -> str:
    """Describe a key that a file of this kind may not have: of the other kind of file, or of no setting."""
    setting = _setting(key)
    if setting is not None and kind == "user":
        return f"{printable(key)} is for the administrator, in {machine_file}"
    if setting is not None:
        return f"{printable(key)} is for the files of users"
    return f"there is no setting {shown(key)}"


def _close(key: str, kind: str) -> str:
    """Suggest a setting for an unknown key: the same name in another table, else a similar key, else list all."""
    known = [each.key for each in settings_of(kind)]  # only those that this file may have
    elsewhere = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]
    same_name = suggest(key, elsewhere, most=1, cutoff=0)
    return same_name or suggest(key, known, f"the settings are {', '.join(known)}", most=1)
