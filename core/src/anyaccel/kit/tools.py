"""A vendor's command-line tool: run with a part of the time that is left, and parsed strictly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from anyaccel.kit.fault import FaultError
from anyaccel.plugin import CommandResult, CommandTimeoutError, ProbeContext

UNKNOWN = frozenset({"", "n/a", "[n/a]", "na", "-", "unknown", "not supported", "[not supported]"})
"""Words that tools print for an unknown value, in lower case."""
MIB = 1 << 20
NOT_FOUND = "env: "
"""Beginning of the message of ``env`` for a command that is not installed. A missing library has the same exit status.
"""
IN_FILE = (
    'command -v "$1" >/dev/null || { echo "env: $1" >&2; exit 127; }; f=$(mktemp) || exit 1; trap \'rm -f "$f"\' EXIT;'
    ' n=$#; for a; do case $a in *"{file}"*) a="${a%%"{file}"*}$f${a#*"{file}"}";; esac; set -- "$@" "$a"; done;'
    ' shift $n; "$@" >&2 && cat "$f"'
)
"""Runs a command with a temporary file in place of ``{file}``, and prints the file. A recording has fixed arguments."""
IN_SHELL = ("sh", "-c", IN_FILE, "sh")
_NUMBER = r"([+-]?\d+(?:\.\d+)?)\s*(?:[A-Za-z%/°℃]+)?"


class Measures(TypedDict, total=False):
    """Measurements of one device, as fields of :class:`~anyaccel.plugin.Stats`; unknown ones are None or absent."""

    memory_used_bytes: int | None
    utilization: float | None
    temperature_celsius: float | None
    power_watts: float | None


class Row:
    """The answer of a tool about one device: texts by name, None for a value that the tool reports as unknown."""

    def __init__(self, tool: str, key: str, texts: Mapping[str, str | None]) -> None:
        """Wrap the texts of a device.

        Args:
            tool: Name of the tool, for messages.
            key: The device, for messages.
            texts: The values, by name.
        """
        self._tool = tool
        self._key = key
        self._texts = texts

    def text(self, name: str) -> str | None:
        """Return the text of a name; None if the tool does not know the value or the name."""
        return self._texts.get(name)

    def number(self, name: str) -> float | None:
        """Return the number of a name, with or without a unit; None if the tool does not know the value.

        Raises:
            FaultError: The value is not a number.
        """
        text = self.text(name)
        if text is None:
            return None
        match = re.fullmatch(_NUMBER, text)
        if match is None:
            raise self._unexpected_value(f"a number for {name}", text)
        return float(match[1])

    def count(self, name: str) -> int | None:
        """Return the non-negative whole number of a name; None if the tool does not know the value.

        Raises:
            FaultError: The value is negative, not whole, or not a number.
        """
        value = self.number(name)
        if value is None:
            return None
        if value < 0 or value != int(value):
            raise self._unexpected_value(f"a count for {name}", f"{value:g}")
        return int(value)

    def measures(self, memory: str = "", busy: str = "", celsius: str = "", watts: str = "") -> Measures:
        """Return the measurements of the device. An empty name means that the tool has no such value.

        Args:
            memory: Name of the memory in use, in MiB.
            busy: Name of the utilization, in percent.
            celsius: Name of the temperature, in degrees Celsius.
            watts: Name of the power, in watts.

        Raises:
            FaultError: One of the values is not a number.
        """
        mebibytes, percent = self.number(memory), self.number(busy)
        return {
            "memory_used_bytes": None if mebibytes is None else int(mebibytes * MIB),
            "utilization": None if percent is None else percent / 100,
            "temperature_celsius": self.number(celsius),
            "power_watts": self.number(watts),
        }

    def _unexpected_value(self, what: str, text: str) -> FaultError:
        return FaultError(f"{self._tool} must answer {what} of {self._key} (got {text[:80]!r})", "run it by hand")


class Tool:
    """A command-line tool of the vendor.

    Attributes:
        name: Name of the command.
        package: The package that installs the command, for messages.
    """

    def __init__(
        self,
        name: str,
        *others: str,
        seconds: float = 4.0,
        package: str = "",
        hung: str = "",
        failed: str = "",
        libraries: str = "",
    ) -> None:
        """Describe how to find the command, and remedies for its failures.

        Args:
            name: Name, looked up in the ``PATH``, or path.
            others: Further names and paths, tried in turn until one is installed.
            seconds: Time limit of one call; a call never gets more than half of the time that is left.
            package: The package that installs the command, for messages.
            hung: Remedy for a command that hangs, beside running it by hand.
            failed: Remedy for a command that fails.
            libraries: Directory of shared libraries that the command needs and does not find itself.
        """
        self.name = name.rpartition("/")[2]
        self.package = package
        self._names = (name, *others)
        self._seconds = seconds
        self._hung = hung
        self._failed = failed
        self._before = ("env", f"LD_LIBRARY_PATH={libraries}") if libraries else ()

    def run(self, ctx: ProbeContext, *arguments: str) -> CommandResult | None:
        """Run the command.

        If an argument contains ``{file}``, as in ``-o {file}``, the command writes its answer to a file: the argument
        gets the path of a temporary file, and the file's content becomes the output.

        The command gets at most half of the time that is left: if it hangs, the rest must still be reported.

        Returns:
            Output and exit status, which may be other than 0; None if the command is not installed.

        Raises:
            FaultError: The command hangs or cannot be run.
        """
        before = (*IN_SHELL, *self._before) if any("{file}" in each for each in arguments) else self._before
        for name in self._names:
            try:
                argv = [*before, name, *arguments]
                result = ctx.run(argv, timeout=min(self._seconds, ctx.remaining() / 2))
            except CommandTimeoutError as error:
                remedy = f"run '{self.name}' by hand{' and ' if self._hung else ''}{self._hung}"
                reason = re.sub("^(env|sh)", self.name, str(error)) if before else str(error)
                raise FaultError(reason, remedy) from error
            except OSError as error:
                raise FaultError(f"{self.name} cannot be run ({error})", f"reinstall {self.package or 'it'}") from error
            # "env" exists although the command does not: its message tells the two apart.
            if result is not None and not (before and result.stderr.startswith(NOT_FOUND)):
                return result
        return None

    def ask(self, ctx: ProbeContext, *arguments: str) -> str | None:
        """Run the command; return its standard output.

        Returns:
            The standard output; None if the command is not installed.

        Raises:
            FaultError: The command hangs, cannot be run, or fails.
        """
        result = self.run(ctx, *arguments)
        if result is None:
            return None
        if result.returncode:
            said = (result.stderr.strip() or result.stdout.strip()).partition("\n")[0][:200] or "without a message"
            raise FaultError(
                f"{self.name} failed with exit status {result.returncode} ({said})", self._failed or "run it by hand"
            )
        return result.stdout

    def json(self, ctx: ProbeContext, *arguments: str) -> Any | None:
        """Run the command and parse its output as JSON, ignoring text before and after.

        Returns:
            The data; None if the command is not installed.

        Raises:
            FaultError: The command hangs, fails, or prints no JSON.
        """
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        import json

        # Drivers and loaders print warnings around the JSON, on the same stream.
        start = re.search(r"^\s*[\[{]", text, re.MULTILINE)
        try:
            return json.JSONDecoder().raw_decode(text[start.start() :].lstrip() if start else text)[0]
        except (ValueError, RecursionError) as error:
            raise self._unexpected("JSON", text.strip(), arguments) from error

    def rows(
        self, ctx: ProbeContext, fields: Sequence[str], *arguments: str, key: str = r".+", separator: str = ","
    ) -> dict[str, Row] | None:
        """Run the command and parse one line of values per device, in any order, with or without a header.

        Args:
            ctx: The machine.
            fields: Names of the columns. The first column identifies the device.
            arguments: Arguments of the command; ``{fields}`` is replaced by the names, joined by commas.
            key: Regular expression that the first column must match, in lower case.
            separator: Text between the values.

        Returns:
            Rows by first column, in lower case; None if the command is not installed.

        Raises:
            FaultError: The command hangs, fails, prints a line of another form, or names a device twice.
        """
        arguments = tuple(argument.replace("{fields}", ",".join(fields)) for argument in arguments)
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        rows: dict[str, Row] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            cells = [cell.strip() for cell in line.split(separator)]
            # A header repeats the names of the columns, with units behind them in some versions.
            if [cell.lower().partition(" ")[0] for cell in cells] == list(fields):
                continue
            name = cells[0].lower()
            if len(cells) != len(fields) or not re.fullmatch(key, name):
                raise self._unexpected(
                    f"one line of {len(fields)} values ({', '.join(fields)}) per device", line, arguments
                )
            self._add(rows, name, dict(zip(fields, map(_text_or_none, cells), strict=True)))
        return rows

    def scan(self, ctx: ProbeContext, pattern: str, *arguments: str) -> dict[str, Row] | None:
        """Run the command and parse a table that is drawn for people, by a regular expression.

        Args:
            ctx: The machine.
            pattern: Regular expression of one device's part of the table, multi-line, ignoring case. The group ``key``
                identifies the device; each other named group is a value, None if the group matched nothing.
            arguments: Arguments of the command.

        Returns:
            Rows by ``key``, in lower case; None if the command is not installed.

        Raises:
            FaultError: The command hangs, fails, shows no device, or names a device twice.
        """
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        found: dict[str, Row] = {}
        for match in re.finditer(pattern, text, re.MULTILINE | re.IGNORECASE):
            groups = match.groupdict()
            name = groups.pop("key").lower()
            self._add(found, name, {key: value and _text_or_none(value) for key, value in groups.items()})
        if not found:
            raise self._unexpected("a table of devices", text.strip(), arguments)
        return found

    def sections(self, ctx: ProbeContext, begin: str, *arguments: str) -> dict[str, Row] | None:
        """Run the command and parse lines ``name : value``, in one section per device.

        Args:
            ctx: The machine.
            begin: Regular expression of the line that begins a section; its first group names the device.
            arguments: Arguments of the command.

        Returns:
            Rows by name of the device; None if the command is not installed. If a section has a name twice, the first
            value counts.

        Raises:
            FaultError: The command hangs, fails, or names a device twice.
        """
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        sections: list[tuple[str, list[str]]] = []
        for line in text.splitlines():
            if match := re.match(begin, line):
                sections.append((match[1], []))
            if sections:
                sections[-1][1].append(line)
        found: dict[str, Row] = {}
        for name, lines in sections:
            self._add(found, name, pairs(lines))
        return found

    def _add(self, rows: dict[str, Row], name: str, texts: Mapping[str, str | None]) -> None:
        if name in rows:
            raise FaultError(f"{self.name} must name each device once (got {name} twice)", "run it again by hand")
        rows[name] = Row(self.name, name, texts)

    def _unexpected(self, what: str, got: str, arguments: Sequence[str]) -> FaultError:
        command = " ".join((self.name, *arguments))
        return FaultError(f"{self.name} must answer {what} (got {got[:80]!r})", f"run '{command}' by hand")


def pairs(lines: Sequence[str] | str) -> dict[str, str | None]:
    """Parse lines ``name : value``.

    The first value of a name counts; None for a value that the tool reports as unknown.
    """
    found: dict[str, str | None] = {}
    for line in lines.splitlines() if isinstance(lines, str) else lines:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), _text_or_none(value.strip()))
    return found


def _text_or_none(text: str) -> str | None:
    return None if text.lower() in UNKNOWN else text
