"""A vendor's command: asked with a part of the time that is left, and believed only where it keeps to its form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from anyaccel.kit.fault import FaultError
from anyaccel.plugin import CommandResult, CommandTimeoutError, ProbeContext

UNKNOWN = frozenset({"", "n/a", "[n/a]", "na", "-", "unknown", "not supported", "[not supported]"})
"""What tools print for what they do not know, in lower case."""
MIB = 1 << 20
NOT_FOUND = "env: "
"""How the message of ``env`` begins where the command is not installed. A missing library has the same exit status."""
_NUMBER = r"([+-]?\d+(?:\.\d+)?)\s*(?:[A-Za-z%/°℃]+)?"


class Measures(TypedDict, total=False):
    """What was measured of one device: fields of :class:`~anyaccel.plugin.Stats`; what is unknown is None or absent."""

    memory_used_bytes: int | None
    utilization: float | None
    temperature_celsius: float | None
    power_watts: float | None


class Row:
    """What a tool says about one device: texts by name, None for what it does not know."""

    def __init__(self, tool: str, key: str, texts: Mapping[str, str | None]) -> None:
        """Keep the texts.

        Args:
            tool: Name of the tool, for messages.
            key: What the row is about, for messages.
            texts: What it says, by name.
        """
        self._tool = tool
        self._key = key
        self._texts = texts

    def text(self, name: str) -> str | None:
        """What stands under a name; None when the tool does not know, or says nothing of that name."""
        return self._texts.get(name)

    def number(self, name: str) -> float | None:
        """The number under a name, with or without its unit; None when the tool does not know it.

        Raises:
            FaultError: When something else stands there.
        """
        text = self.text(name)
        if text is None:
            return None
        match = re.fullmatch(_NUMBER, text)
        if match is None:
            raise self._wrong(f"a number for {name}", text)
        return float(match[1])

    def count(self, name: str) -> int | None:
        """The whole number that is not negative under a name; None when the tool does not know it.

        Raises:
            FaultError: When something else stands there.
        """
        value = self.number(name)
        if value is None:
            return None
        if value < 0 or value != int(value):
            raise self._wrong(f"a count for {name}", f"{value:g}")
        return int(value)

    def measures(self, memory: str = "", busy: str = "", celsius: str = "", watts: str = "") -> Measures:
        """What the tool measured of the device.

        Args:
            memory: Name under which the memory in use stands, in MiB, as all names empty where the tool has none.
            busy: Name of the share of time that it was busy, in percent.
            celsius: Name of the temperature, in degrees Celsius.
            watts: Name of the power, in watts.

        Raises:
            FaultError: When something else than a number stands under one of them.
        """
        mebibytes, percent = self.number(memory), self.number(busy)
        return {
            "memory_used_bytes": None if mebibytes is None else int(mebibytes * MIB),
            "utilization": None if percent is None else percent / 100,
            "temperature_celsius": self.number(celsius),
            "power_watts": self.number(watts),
        }

    def _wrong(self, what: str, text: str) -> FaultError:
        return FaultError(f"{self._tool} must answer {what} of {self._key} (got {text[:80]!r})", "run it by hand")


class Tool:
    """A command of the vendor's.

    Attributes:
        name: Its name.
        package: The package that installs it, for people.
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
        """Say where it is and what to do about it.

        Args:
            name: Name, looked up in the ``PATH``, or path.
            others: Further names and paths, tried in turn where the one before is not there.
            seconds: Time that one call may take; never more than half of what is left.
            package: The package that installs it, for people.
            hung: What to do when it hangs, beside running it by hand.
            failed: What to do when it says that it failed.
            libraries: Directory of the shared libraries that it needs and does not find itself.
        """
        self.name = name.rpartition("/")[2]
        self.package = package
        self._names = (name, *others)
        self._seconds = seconds
        self._hung = hung
        self._failed = failed
        self._before = ("env", f"LD_LIBRARY_PATH={libraries}") if libraries else ()

    def run(self, ctx: ProbeContext, *arguments: str) -> CommandResult | None:
        """Run it.

        Half of the time that is left at most: a tool that hangs must not take the time in which we report the rest.

        Returns:
            What it left behind, whatever its exit status; None when it is not installed.

        Raises:
            FaultError: When it hangs or cannot be run.
        """
        for name in self._names:
            try:
                result = ctx.run([*self._before, name, *arguments], timeout=min(self._seconds, ctx.remaining() / 2))
            except CommandTimeoutError as error:
                remedy = f"run '{self.name}' by hand{' and ' if self._hung else ''}{self._hung}"
                reason = re.sub("^env", self.name, str(error)) if self._before else str(error)
                raise FaultError(reason, remedy) from error
            except OSError as error:
                raise FaultError(f"{self.name} cannot be run ({error})", f"reinstall {self.package or 'it'}") from error
            if result is not None and not (self._before and result.stderr.startswith(NOT_FOUND)):
                return result
        return None

    def ask(self, ctx: ProbeContext, *arguments: str) -> str | None:
        """Run it and take what it prints.

        Returns:
            Its standard output; None when it is not installed.

        Raises:
            FaultError: When it hangs, cannot be run, or ends with a status other than 0.
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
        """Run it and read what it prints as JSON, with or without lines of another kind before and after it.

        Returns:
            The data; None when it is not installed.

        Raises:
            FaultError: When it hangs, fails, or prints something else.
        """
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        import json

        start = re.search(r"^\s*[\[{]", text, re.MULTILINE)
        try:
            return json.JSONDecoder().raw_decode(text[start.start() :].lstrip() if start else text)[0]
        except (ValueError, RecursionError) as error:
            raise self._other("JSON", text.strip(), arguments) from error

    def rows(
        self, ctx: ProbeContext, fields: Sequence[str], *arguments: str, key: str = r".+", separator: str = ","
    ) -> dict[str, Row] | None:
        """Run it and read one line of values per device, in any order, with or without a header.

        Args:
            ctx: The machine.
            fields: Names of the columns, the one that tells devices apart first.
            arguments: Arguments of the tool; ``{fields}`` in one becomes the names with commas between them.
            key: Regular expression of what tells devices apart, in lower case.
            separator: What stands between the values.

        Returns:
            Rows by their key in lower case; None when the tool is not installed.

        Raises:
            FaultError: When it hangs, fails, prints a line of another form, or names a device twice.
        """
        arguments = tuple(argument.format(fields=",".join(fields)) for argument in arguments)
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        rows: dict[str, Row] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            cells = [cell.strip() for cell in line.split(separator)]
            if [cell.lower().partition(" ")[0] for cell in cells] == list(fields):
                continue
            name = cells[0].lower()
            if len(cells) != len(fields) or not re.fullmatch(key, name):
                raise self._other(f"one line of {len(fields)} values ({', '.join(fields)}) per device", line, arguments)
            self._add(rows, name, dict(zip(fields, map(_known, cells), strict=True)))
        return rows

    def scan(self, ctx: ProbeContext, pattern: str, *arguments: str) -> dict[str, Row] | None:
        """Run it and read a table that is drawn for people, by a regular expression.

        Args:
            ctx: The machine.
            pattern: What stands there for one device; lines are told apart, case is not. The group ``key`` tells
                devices apart, each other group is a value under its name, None where it matched nothing.
            arguments: Arguments of the tool.

        Returns:
            Rows by their key in lower case; None when the tool is not installed.

        Raises:
            FaultError: When it hangs, fails, shows no device, or names one twice.
        """
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        found: dict[str, Row] = {}
        for match in re.finditer(pattern, text, re.MULTILINE | re.IGNORECASE):
            groups = match.groupdict()
            name = groups.pop("key").lower()
            self._add(found, name, {key: value and _known(value) for key, value in groups.items()})
        if not found:
            raise self._other("a table of devices", text.strip(), arguments)
        return found

    def sections(self, ctx: ProbeContext, begin: str, *arguments: str) -> dict[str, Row] | None:
        """Run it and read lines ``name : value``, in one section per device.

        Args:
            ctx: The machine.
            begin: Regular expression of the line that begins a section; its first group names the device.
            arguments: Arguments of the tool.

        Returns:
            Rows by name of the device; of a name that comes twice in a section the first value counts. None when the
            tool is not installed.

        Raises:
            FaultError: When it hangs, fails, or names a device twice.
        """
        text = self.ask(ctx, *arguments)
        if text is None:
            return None
        found: dict[str, Row] = {}
        for name, lines in _sections(text, begin):
            self._add(found, name, pairs(lines))
        return found

    def _add(self, rows: dict[str, Row], name: str, texts: Mapping[str, str | None]) -> None:
        if name in rows:
            raise FaultError(f"{self.name} must name each device once (got {name} twice)", "run it again by hand")
        rows[name] = Row(self.name, name, texts)

    def _other(self, what: str, got: str, arguments: Sequence[str]) -> FaultError:
        command = " ".join((self.name, *arguments))
        return FaultError(f"{self.name} must answer {what} (got {got[:80]!r})", f"run '{command}' by hand")


def pairs(lines: Sequence[str] | str) -> dict[str, str | None]:
    """Read lines ``name : value``; the first value of a name counts, None for what the tool does not know."""
    found: dict[str, str | None] = {}
    for line in lines.splitlines() if isinstance(lines, str) else lines:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), _known(value.strip()))
    return found


def _known(text: str) -> str | None:
    return None if text.lower() in UNKNOWN else text


def _sections(text: str, begin: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        match = re.match(begin, line)
        if match is not None:
            if name:
                yield name, lines
            name, lines = match[1], []
        lines.append(line)
    if name:
        yield name, lines
