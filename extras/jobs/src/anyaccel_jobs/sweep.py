"""Sweeps: many commands, as many at once as there are devices, started and logged by one process.

A device is kept from one command to the next, so that a short command costs little more than its start. It is released
when another request waits for it, or when a command left a process running with it. The sweep has one place in the
queue at a time. The job log has the format of GNU parallel: tab-separated values, a line for each command that has
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from anyaccel.errors import AnyaccelError, LeaseCancelledError, NotFreeError, UsageError
from anyaccel.launcher import (
    DeviceLease,
    end_in_time,
    make_start_error,
    take_async,
    time_limit,
)
from anyaccel.ledger import Ledger
from anyaccel.linux import GRACE_SECONDS, Teardown, combine_finds, describe_left, find_carriers, find_tree, process
from anyaccel.linux import mark as marks
from anyaccel.model import Inventory, Request, Value, replace
from anyaccel.text import shown

from anyaccel_jobs.jobs import append_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

    from anyaccel.launcher import AcquireOptions

JOB_LOG = "jobs.tsv"
COLUMNS = ("Seq", "Host", "Starttime", "JobRuntime", "Send", "Receive", "Exitval", "Signal", "Command")

_LONGEST_RANGE = 1_000_000
_TICK = 1.0
_VARIABLE = re.compile(r"\{\{(?P<plain>#|[A-Za-z_]\w*|)\}\}|\{(?P<name>#|[A-Za-z_]\w*|)\}", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_SPACED = re.compile(rf"({_NUMBER})\.\.({_NUMBER}):([0-9]{{1,7}})(:log)?")
_PLAIN = re.compile(r"[\w.+-]+", re.ASCII)
_LONGEST_NAME = 200
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""")
_OPERATOR = re.compile("[|&;<>]")


def parse_each(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse ``lr=0.1,0.01``, ``seed=1..5`` or ``lr=1e-4..1e-1:4:log`` into a name and its values.

    Values are separated by commas. ``1..5`` stands for the whole numbers from the first to the last, ``01..10`` with
    leading zeros. ``0..1:5`` stands for 5 numbers at equal distances, and with ``:log`` at equal ratios.

    Raises:
        UsageError: When the text has no name, an empty value or a wrong range.
    """
    name, equals, listed = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(f"--each takes NAME=VALUE,VALUE,... or NAME=FIRST..LAST (got {shown(text)})")
    values: list[str] = []
    for value in listed.split(","):
        if not value:
            raise UsageError(f"a value of --each is empty (got {shown(text)})")
        values += _spread(value)
    if len(values) > _LONGEST_RANGE:
        raise UsageError(f"--each takes at most {_LONGEST_RANGE:,} values (got {len(values):,} of {name!r})")
    return name, tuple(values)


def _spread(text: str) -> Iterable[str]:
    """Return the numbers of a range, or the text itself."""
    if match := _SPACED.fullmatch(text):
        return _spaced(text, float(match[1]), float(match[2]), int(match[3]), log=match[4] is not None)
    match = _RANGE.fullmatch(text)
    if match is None:
        if re.fullmatch(rf"{_NUMBER}\.\.{_NUMBER}", text):
            raise UsageError(
                f"a range of other than whole numbers needs a count (got {text!r})",
                hint=f"such as {text}:5 or {text}:5:log",
            )
        return (text,)
    first, last = int(match[1]), int(match[2])
    if abs(last - first) >= _LONGEST_RANGE:
        raise UsageError(f"a range has at most {_LONGEST_RANGE:,} numbers (got {text!r})")
    padded = any(len(each) > 1 and each.lstrip("-").startswith("0") for each in match.groups())
    width = max(map(len, match.groups())) if padded else 0
    step = 1 if last >= first else -1
    return (f"{number:0{width}d}" for number in range(first, last + step, step))


def _spaced(text: str, first: float, last: float, count: int, *, log: bool) -> list[str]:
    """Return numbers at equal distances or ratios, in 12 digits: the others are errors of rounding."""
    if not 2 <= count <= _LONGEST_RANGE:  # noqa: PLR2004 - the first and the last
        raise UsageError(f"a range has a count from 2 to {_LONGEST_RANGE:,} (got {text!r})")
    if log and (first <= 0 or last <= 0):
        raise UsageError(f"a range at equal ratios is of numbers above 0 (got {text!r})")
    places = [number / (count - 1) for number in range(count)]
    values = (first * (last / first) ** place if log else first + (last - first) * place for place in places)
    return [f"{value:.12g}" for value in values]


class Commands:
    """The commands of a sweep: every combination of values in a template, the last name fastest.

    ``{name}`` stands for a value, ``{}`` for a line of the input and ``{#}`` for the number of the command, from 1.
    Each is replaced within one argument; no shell reads the result.

    Args:
        template: The command; empty if each line of the input is a command.
        each: Values by name.
        lines: The lines of the input; None for no input.

    Attributes:
        notes: Remarks for the user.

    Raises:
        UsageError: When the parts do not fit together, or the template has an unknown name.
    """

    def __init__(
        self, template: Sequence[str], each: Mapping[str, tuple[str, ...]], lines: Sequence[str] | None = None
    ) -> None:
        if not template and lines is None:
            raise UsageError(
                "a command to run must follow '--', or --from must give one per line",
                hint="as in: anyaccel sweep GPU:1 --each lr=0.1,0.01 -- python train.py --lr {lr}",
            )
        self.notes: tuple[str, ...] = ()
        self._axes: dict[str, Sequence[str | tuple[str, ...]]] = {}
        if template:
            if lines is not None:
                self._axes[""] = [line for line in lines if line]
            self._axes |= each
            self._check(template, each)
            self._template = [self._parts(argument) for argument in template]
        else:
            if each:
                raise UsageError("--each puts values into a command, which must follow '--'")
            self._axes[""] = _split(lines or ())
            self._template = []

    def __len__(self) -> int:
        return math.prod(map(len, self._axes.values()))

    def __iter__(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the number and the arguments of each command."""
        for number, values in enumerate(itertools.product(*self._axes.values()), 1):
            if not self._template:
                yield number, values[0]  # type: ignore[misc] # the line, split
                continue
            given = {**dict(zip(self._axes, values, strict=True)), "#": str(number)}
            made = ("".join(str(given.get(text, text)) if kind else text for kind, text in parts)
                    for parts in self._template)  # fmt: skip
            yield number, tuple(made)

    def _parts(self, argument: str) -> list[tuple[bool, str]]:
        """Split an argument into texts and, with True, names of values."""
        parts, at = [], 0
        for match in _VARIABLE.finditer(argument):
            name = match["name"]
            if name == "" and "" not in self._axes:  # without input, {} is text, as in find -exec
                continue
            parts += [
                (False, argument[at : match.start()]),
                (False, f"{{{match['plain']}}}") if name is None else (True, name),
            ]
            at = match.end()
        return [*parts, (False, argument[at:])]

    def _check(self, template: Sequence[str], each: Mapping[str, tuple[str, ...]]) -> None:
        """Refuse unknown names, and note values that no argument uses."""
        used = {match["name"] for argument in template for match in _VARIABLE.finditer(argument)} - {None}
        for name in sorted(used - self._axes.keys() - {"#", ""}):
            close = difflib.get_close_matches(name, each, n=1, cutoff=0.5) or [
                key for key in each if key == name.lower()
            ]
            raise UsageError(
                f"{{{name}}} is not one of --each" + (f": did you mean {{{close[0]}}}?" if close else ""),
                hint=f"for the text {{{name}}} itself write {{{{{name}}}}}",
            )
        notes = [
            f"no argument has '{{{name}}}': each value of {name} runs the same" for name in each if name not in used
        ]
        if "" in self._axes and "" not in used:
            notes.append("no argument has '{}': each line of the input runs the same")
        self.notes = tuple(notes)

    def log_name(self, number: int) -> str:
        """Return the name of a command's log: the values, if fit for a file name, else the number."""
        if not self._named:
            return f"{number}.log"
        place, words = number - 1, list[str]()
        for name, values in reversed(self._axes.items()):
            place, at = divmod(place, len(values))
            words.insert(0, f"{name}={values[at]}")
        return f"{','.join(words)}.log"

    @cached_property
    def _named(self) -> bool:
        """Whether values name the logs: short, different, and without a slash."""
        return (
            "" not in self._axes
            and all(len(set(values)) == len(values) for values in self._axes.values())
            and all(_PLAIN.fullmatch(str(value)) for values in self._axes.values() for value in values)
            and 0 < sum(len(name) + 2 + max(map(len, values)) for name, values in self._axes.items()) <= _LONGEST_NAME
        )


def _split(lines: Sequence[str]) -> list[tuple[str, ...]]:
    """Split each line into arguments as a shell does, without any other expansion."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"line {number} of the commands is no command: {error} (got {shown(line)})") from error
        # Without this, a file of shell lines would run commands with ">" as an argument.
        if operator := _OPERATOR.search(_QUOTED.sub("", line)):
            raise UsageError(
                f"line {number} of the commands needs a shell for {operator[0]!r} (got {shown(line)})",
                hint="give it to one: sh -c '...'",
            )
        found.append(tuple(words))
    return found


def written(command: Sequence[str]) -> str:
    """Format a command as one shell line without tabs."""
    return shlex.join(command).replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def read_done(path: str) -> dict[int, str]:
    """Return the successful commands of a job log by number, as they are written in the file.

    Raises:
        OSError: When it cannot be read.
        UsageError: When it is no job log.
    """
    done: dict[int, str] = {}
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        if tuple(file.readline().rstrip("\n").split("\t")) != COLUMNS:
            raise UsageError(f"{path} is no job log: its first line must be {' '.join(COLUMNS)}")
        for line in file:
            fields = line.rstrip("\n").split("\t", len(COLUMNS) - 1)
            if len(fields) == len(COLUMNS) and fields[0].isdecimal():
                good = fields[6] == fields[7] == "0"
                # A later line of the same command replaces an earlier one.
                done.pop(int(fields[0]), None)
                if good:
                    done[int(fields[0])] = fields[8]
    return done


class JobLog:
    """The job log of a sweep: a line for each command that has ended.

    Args:
        path: Its file.
        resume: Whether to continue an existing file; its successful commands are not run again.

    Attributes:
        path: Its file.
        done: Successful commands by number, as they are written in the file.

    Raises:
        UsageError: When the file exists and is not to be continued, or is no job log.
        AnyaccelError: When it cannot be written.
    """

    def __init__(self, path: str, *, resume: bool) -> None:
        self.path = path
        self.done: dict[int, str] = {}
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if os.path.exists(path):
                if not resume:
                    raise UsageError(
                        f"{path} is the job log of an earlier sweep",
                        hint="--resume goes on with it, --out DIR begins another",
                    )
                self.done = read_done(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if not os.fstat(self._fd).st_size:
                os.write(self._fd, ("\t".join(COLUMNS) + "\n").encode())
        except OSError as error:
            raise AnyaccelError(
                f"the job log {path} cannot be written: {error.strerror}", hint="name another directory with --out"
            ) from error

    def was_done(self, number: int, command: Sequence[str]) -> bool:
        """Return whether a command has succeeded before.

        Raises:
            UsageError: When the job log has another command with this number.
        """
        before = self.done.get(number)
        if before is not None and before != written(command):
            raise UsageError(
                f"{self.path} is the job log of another sweep: its command {number} is {shown(before)}, not"
                f" {shown(written(command))}",
                hint="--out DIR names another folder",
            )
        return before is not None

    def add(self, run: Ended) -> None:
        """Append a line for a finished command."""
        fields = (run.number, run.host, f"{run.started:.3f}", f"{run.seconds:10.3f}", 0, run.output_bytes, run.status,
                  run.signal, written(run.command))  # fmt: skip
        # One write for each line: lines of an interrupted sweep are whole.
        line = "\t".join(map(str, fields)) + "\n"
        os.write(self._fd, line.encode(errors="surrogateescape"))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Ended(Value):
    """The end of a command.

    Attributes:
        number: Number of the command.
        command: Its arguments.
        status: Exit status; 0 for a command that a signal ended, 124 for one that returned 0 after its time limit.
        signal: The signal that ended it, or 0.
        started: Its start, in seconds since 1970.
        seconds: Its duration.
        output_bytes: Size of its log.
        host: Its machine; ``:`` for this one, as in GNU parallel.
        attempts: Number of attempts.
        log: Path of its output.
        timed_out: Whether its time limit ended it.
        interrupted: Whether it was ended because the sweep was stopped.
    """

    number: int
    command: tuple[str, ...]
    status: int
    signal: int = 0
    started: float = 0.0
    seconds: float = 0.0
    output_bytes: int = 0
    host: str = ":"
    attempts: int = 1
    log: str = ""
    timed_out: bool = False
    interrupted: bool = False

    @property
    def good(self) -> bool:
        """Return whether the command succeeded."""
        return not self.status and not self.signal

    @property
    def how(self) -> str:
        """Describe a failure for people."""
        if self.timed_out:
            return "was ended by its time limit"
        return f"was ended by signal {self.signal}" if self.signal else f"failed with exit status {self.status}"


class Tally:
    """Progress of a sweep.

    Attributes:
        total: Number of commands.
        skipped: Commands that succeeded in an earlier run.
        done: Commands that succeeded.
        failed: Commands that failed.
        interrupted: Commands that were ended because the sweep was stopped.
        running: Commands that run now.
        failures: The first failures.
    """

    MOST_FAILURES = 100

    def __init__(self, total: int) -> None:
        self.total = total
        self.skipped = self.done = self.failed = self.interrupted = self.running = 0
        self.failures: list[Ended] = []
        self.began = time.monotonic()

    def add(self, run: Ended) -> None:
        """Count a finished command."""
        if run.good:
            self.done += 1
        elif run.interrupted:
            self.interrupted += 1
        else:
            self.failed += 1
            if len(self.failures) < self.MOST_FAILURES:
                self.failures.append(run)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the sweep."""
        return time.monotonic() - self.began

    @property
    def left_seconds(self) -> float | None:
        """Estimate the seconds until the end of the sweep; None before the first command has ended."""
        ended = self.done + self.failed
        # The mean of all commands: short and long ones alternate in a sweep.
        return self.seconds / ended * (self.total - self.skipped - ended) if ended else None


class SweepSetting(Value):
    """Settings of a sweep.

    Attributes:
        request: Request of each command.
        inventory: The machine.
        out: Directory of the logs.
        log_name: Returns the name of a command's log, by the command's number.
        jobs: Commands that run at the same time, at most.
        retries: How often a command that failed is run again.
        stop_on_error: Whether to start no command after a failure.
        grace: Seconds between SIGTERM and SIGKILL, when the sweep is stopped or a command reaches its time limit.
        time: Time limit of each command, in seconds; None for no limit.
        early: Signal before the time limit; None for none.
        options: Options of :func:`anyaccel.acquire_async`: how to wait for devices, and how to start commands.
    """

    request: Request
    inventory: Inventory
    out: str
    log_name: Callable[[int], str]
    jobs: int
    retries: int = 0
    stop_on_error: bool = False
    grace: float = GRACE_SECONDS
    time: float | None = None
    early: time_limit.EarlySignal | None = None
    options: AcquireOptions


class Sweep:
    """Runs the commands of a sweep on this machine.

    Args:
        setting: Its settings.
        commands: Numbers and arguments of the commands to run.
        tally: Progress; ``on_end`` counts the ends.
        on_change: Called after a change, and every second.
        on_end: Called with the end of each command.
        on_wait: As of :func:`anyaccel.acquire`.
    """

    def __init__(
        self,
        setting: SweepSetting,
        commands: Iterator[tuple[int, tuple[str, ...]]],
        tally: Tally,
        *,
        on_change: Callable[[], object],
        on_end: Callable[[Ended], object],
        on_wait: Callable[..., None] | None = None,
    ) -> None:
        self._setting = setting
        self._commands = commands
        self._tally = tally
        self._on_change = on_change
        self._on_end = on_end
        self._on_wait = on_wait
        self._left = tally.total - tally.skipped
        self._running: dict[int, int] = {}
        self._holds: dict[DeviceLease, bool] = {}  # and whether a command was run with it
        self._slots = 0
        self._taking: asyncio.Task[DeviceLease] | None = None
        self._stopped = 0
        self._asked = 0
        self._error: AnyaccelError | None = None
        self._left_over: list[marks.Mark] = []
        self._rest: Teardown | None = None
        self._ending: asyncio.Task[None] | None = None
        self._limits: dict[str, _Limited] = {}
        self._ledger = Ledger.open()

    def run(self) -> int:
        """Run the commands.

        Returns:
            0 if all succeeded, 1 if some failed, 128 and the number of the signal that stopped the sweep.

        Raises:
            AnyaccelError: When devices cannot be acquired.
        """
        with contextlib.suppress(OSError):
            process.adopt_orphans()  # what a command leaves behind becomes our child, and is seen
        try:
            asyncio.run(self._main())
        finally:
            with contextlib.suppress(OSError):
                process.adopt_orphans(adopt=False)
        # This process ends now: monitors end what is left, at the same time.
        for lease, limited in self._limits.items():
            end_in_time(lease, limited.limit.until)
        if self._stopped:
            return 128 + self._stopped
        if self._error is not None:
            raise self._error
        return 1 if self._tally.failed else 0

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        # One wait at a time: a sweep has one place in the queue, whatever its number of slots.
        self._turn = asyncio.Lock()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                # A signal that nohup or a shell has ignored stays ignored.
                loop.add_signal_handler(number, self._stop, number)
        ticker = asyncio.create_task(self._tick())
        try:
            self._slots = min(self._setting.jobs, self._left)
            async with asyncio.TaskGroup() as group:
                for _ in range(self._slots):
                    group.create_task(self._slot())
            if self._ending is not None:
                await self._ending
                self._orphans(self._marks())
            await self._end_those_over()
        finally:
            ticker.cancel()
            for hold in tuple(self._holds):
                self._give_back(hold)

    async def _slot(self) -> None:
        """Run commands one after the other, with the same devices if possible."""
        hold: DeviceLease | None = None
        while True:
            if hold is None:
                async with self._turn:
                    hold = await self._take() if self._may_start() else None
                if hold is None:
                    break
            command = next(self._commands, None) if self._may_start() else None
            if command is None:
                break
            self._left -= 1
            if not self._left and self._taking is not None:
                self._taking.cancel()  # nothing is left that could use what is waited for
            try:
                await self._run(*command, hold)
            except AnyaccelError as error:
                self._error = self._error or error
            if self._asked:
                break  # the devices go back once nothing runs with them
            if not self._keeps(hold):
                self._give_back(hold)
                hold = None
        self._slots -= 1
        if hold is not None and not self._asked:
            self._give_back(hold)

    def _may_start(self) -> bool:
        failed = self._setting.stop_on_error and self._tally.failed
        return bool(self._left) and not self._asked and self._error is None and not failed

    async def _take(self) -> DeviceLease | None:
        """Acquire devices; None if they are no longer needed, or other slots can go on without."""
        setting = self._setting
        options: AcquireOptions = {**setting.options, "inventory": setting.inventory, "on_wait": self._on_wait}
        if setting.time is not None:  # the lease says until when it is held at most
            options["time"] = (setting.retries + 1) * (setting.time + setting.grace)
        self._taking = asyncio.create_task(take_async(setting.request, marks.draw, **options))
        try:
            hold = await self._taking
        except asyncio.CancelledError:
            return None
        except (NotFreeError, LeaseCancelledError) as error:
            # Other slots may still have devices: the sweep goes on with fewer.
            if self._slots == 1 or not self._holds:
                self._error = self._error or error
            return None
        except AnyaccelError as error:
            self._error = self._error or error
            return None
        finally:
            self._taking = None
        self._holds[hold] = False
        return hold

    async def _run(self, number: int, command: tuple[str, ...], hold: DeviceLease) -> None:
        """Run a command, and repeat failures while attempts are left."""
        if not self._holds[hold]:
            self._holds[hold] = True
            hold.begin_entry(command[0])  # one line of the journal for all commands of a lease
        self._tally.running += 1
        for attempt in range(1, self._setting.retries + 2):
            run = await self._attempt(number, command, hold, attempt)
            if run.good or self._asked or not self._intact(hold):
                break
        self._tally.running -= 1
        # A command that fails after Ctrl-C has most likely got the signal, too.
        self._on_end(replace(run, interrupted=bool(self._asked) and not run.good))
        self._on_change()

    async def _attempt(self, number: int, command: tuple[str, ...], hold: DeviceLease, attempt: int) -> Ended:
        path = f"{self._setting.out}/{self._setting.log_name(number)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if attempt == 1 else 0)
        try:
            log = os.open(path, flags, 0o666)
        except OSError as error:
            raise AnyaccelError(f"the log {path} cannot be written: {error.strerror}") from error
        began, clock = time.time(), time.monotonic()
        status = number_of_signal = 0
        timed_out = False
        try:
            # A session of its own: Ctrl-C reaches the sweep only, which ends its commands in order.
            running = hold.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            fault = make_start_error(command[0], error)
            os.write(log, f"anyaccel: {fault}\n".encode(errors="replace"))
            status = fault.exit_code
        else:
            self._running[running.pid] = process.start_time(running.pid) or 0
            self._on_change()
            limited = self._limit(running.pid, hold, path)
            await _end_of(running.pid)
            code = running.wait()
            del self._running[running.pid]
            status, number_of_signal = (code, 0) if code >= 0 else (0, -code)
            if limited is not None and (timed_out := await self._end_of_time(limited, hold)):
                hold.timed_out = True
                # A command that returns 0 after its limit did not finish: --resume runs it again.
                status = status or (0 if number_of_signal else time_limit.STATUS)
                append_line(time_limit.describe_timeout(limited.limit.seconds), path)
        size = os.fstat(log).st_size
        os.close(log)
        return Ended(
            number=number, command=command, status=status, signal=number_of_signal, started=began, attempts=attempt,
            seconds=time.monotonic() - clock, output_bytes=size, log=path, timed_out=timed_out,
        )  # fmt: skip

    def _limit(self, pid: int, hold: DeviceLease, log: str) -> _Limited | None:
        """Start the time limit of a command, for every process with the same devices.

        Args:
            pid: The command, the leader of a process group.
            hold: Its devices.
            log: Path of its output, which names the early signal.
        """
        setting = self._setting
        if setting.time is None:
            return None
        limit = time_limit.TimeLimit.begin(setting.time, setting.grace, setting.early)
        mark = hold.mark
        everything = combine_finds(find_carriers([mark]), find_tree({pid: self._running[pid]}))
        return _Limited(limit, Teardown(everything, grace=limit.grace), mark, log)

    async def _end_of_time(self, limited: _Limited, hold: DeviceLease) -> bool:
        """Wait for processes past the time limit of a command, and drop the limit if no process is left.

        Returns:
            Whether the time limit ended the command.
        """
        timed_out = limited.over
        limited.countdown.early_at = None
        if timed_out:
            await limited.task
        elif hold.lease is None or self._asked or self._intact(hold):
            limited.task.cancel()
        else:
            self._limits[hold.lease.id] = limited  # what is left has its time still
        return timed_out

    async def _end_those_over(self) -> None:
        """Wait for processes past the time limit; monitors end the rest."""
        for lease, limited in tuple(self._limits.items()):
            if limited.over:
                await limited.task
                del self._limits[lease]
            limited.task.cancel()

    def _intact(self, hold: DeviceLease) -> bool:
        """Return whether no process of a command is left with the devices."""
        if hold.lease is None:
            return True
        orphans = self._orphans([hold.lease.mark])
        if orphans:
            self._left_over.append(hold.lease.mark)
        return not orphans and hold.lease.intact

    def _keeps(self, hold: DeviceLease) -> bool:
        """Return whether the next command gets the same devices.

        Another request may wait for them, or a process may still use them. With a time limit each command has a lease
        of its own, which carries its deadline.
        """
        if hold.lease is None:
            return True
        if self._setting.time is not None:
            return False
        return self._intact(hold) and not self._ledger.find_wanted(frozenset(hold.lease.devices))

    def _give_back(self, hold: DeviceLease) -> None:
        del self._holds[hold]
        hold.release()

    def _orphans(self, wanted: Sequence[marks.Mark]) -> list[int]:
        """Return the living children of this process that carry one of the marks, and reap the dead ones."""
        found = []
        for pid in process.children(os.getpid()):
            if pid in self._running:
                continue
            value = marks.hard_limit(pid)
            mark = marks.parse(value) if value is not None else None
            if mark and any(mark[: len(each)] == each for each in wanted if each):
                # The event loop may have reaped it in the meantime.
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG) == (0, 0):
                        found.append(pid)
        return found

    def _stop(self, number: signal.Signals) -> None:
        """End the sweep: SIGTERM at first, SIGKILL the second time."""
        self._stopped = self._stopped or number
        self._asked += 1
        if self._taking is not None:
            self._taking.cancel()
        if self._rest is None:
            everything = combine_finds(find_carriers(self._marks()), find_tree(self._running))
            self._rest = Teardown(everything, grace=self._setting.grace)
            self._ending = asyncio.create_task(_finish(self._rest, "the sweep"))
        else:
            self._rest.kill()
            self._rest.step()
        self._on_change()

    def _marks(self) -> list[marks.Mark]:
        return [hold.lease.mark for hold in self._holds if hold.lease]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._on_change()
            if self._left_over:
                self._orphans(self._left_over)


class _Limited:
    """A time limit of a command.

    Args:
        limit: The limit.
        rest: Ends the command and its processes, once its time is over.
        mark: Mark of its lease, whose carriers get the early signal.
        log: Path of its output.

    Attributes:
        limit: The limit.
        over: Whether its time is over.
        countdown: Sends the early signal, also to processes that the command left behind.
        task: Ends the processes once the time is over.
    """

    def __init__(self, limit: time_limit.TimeLimit, rest: Teardown, mark: marks.Mark, log: str) -> None:
        self.limit = limit
        self.over = False
        self.countdown = time_limit.Countdown(limit, mark, lambda text: append_line(text, log))
        self.task = asyncio.create_task(self._end(rest))

    async def _end(self, rest: Teardown) -> None:
        while left := self.countdown.step():  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(left)
        self.over = True
        await _finish(rest, "a command whose time is over")


async def _finish(rest: Teardown, of: str) -> None:
    """Complete a teardown, and name the processes left."""
    while (pause := rest.step()) is not None:  # noqa: ASYNC110 - nothing else tells of it
        await asyncio.sleep(pause)
    for line in describe_left(rest, of):
        _log().warning("%s", line)


async def _end_of(pid: int) -> None:
    """Wait for the exit of a child, without reaping."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    # Not waitpid in a thread: a pidfd needs no thread for each command.
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, ended.set_result, None)
        try:
            await ended
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("anyaccel")


def call(number: int, command: tuple[str, ...], attempt: int) -> tuple[Ended, bytes]:
    """Run a command of a sweep in a worker of a pool, on any node.

    Returns:
        Its end, without a log, and its output.
    """
    began, clock = time.time(), time.monotonic()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        code, printed = done.returncode, done.stdout
    except OSError as error:
        fault = make_start_error(command[0], error)
        code, printed = fault.exit_code, f"anyaccel: {fault}\n".encode(errors="replace")
    ended = Ended(
        number=number, command=command, status=max(0, code), signal=max(0, -code), started=began, attempts=attempt,
        seconds=time.monotonic() - clock, output_bytes=len(printed), host=socket.gethostname(),
    )  # fmt: skip
    return ended, printed
