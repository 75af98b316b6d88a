"""Run many commands, as many at once as there are devices: anyaccel sweep GPU:1 --each lr=0.1,0.01 -- CMD --lr {lr}.

In the command, {NAME} stands for a value of --each NAME=..., {#} for the number of the command, and {} for a line of
--from; without a command, each line of --from is one. All of that is put into arguments, never through a shell: write
sh -c '...' for one. Each command has a log in DIR, named by its values (lr=0.1,seed=3.log) or its number, and a line in
DIR/jobs.tsv, the job log of GNU parallel. Ctrl-C sends SIGTERM to the commands that run, and SIGKILL after the time of
--grace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import anyaccel
from anyaccel.cli import (
    BareSeconds,
    add_command,
    add_grace,
    add_launch,
    add_request,
    add_signal,
    add_start,
    add_time,
    add_wait,
    output,
    parse,
    start_options,
    survey,
    wait_options,
    whole,
)
from anyaccel.errors import AnyaccelError, TaskTimeoutError, UsageError
from anyaccel.launcher import count_capacity, time_limit
from anyaccel.ledger import LeaseRecord, describe_obstacles
from anyaccel.linux import write_whole
from anyaccel.model import format_slots, replace
from anyaccel.text import elapsed, span

from anyaccel_jobs.jobs_command import detach
from anyaccel_jobs.run_option import add_job_options, check_job_options
from anyaccel_jobs.supervisor import Supervisor
from anyaccel_jobs.sweep import JOB_LOG, Commands, Ended, JobLog, Sweep, SweepSetting, Tally, call, parse_each, written

_SHOWN_FAILURES = 10
_FOLDER = "anyaccel-sweep"
_RECORD = "sweep.json"
"""File with the command line of a sweep, in the directory of its logs."""
_LOOK_SECONDS = 1.0
_WINDOW = 64
"""Calls that are submitted to a cluster at once without ``--jobs``."""


EXAMPLES = (
    (
        "anyaccel sweep GPU:1 --each lr=0.1,0.01 --each seed=1..5 -- python train.py --lr {lr} --seed {seed}",
        "ten runs, as many at once as there are GPUs",
    ),
    ("anyaccel sweep GPU:1 --from commands.txt --out logs", "a command per line of a file"),
    ("anyaccel sweep GPU:1 --each lr=1e-4..1e-1:4:log -- python train.py {lr}", "four learning rates at equal ratios"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    number = whole(1, 1_000_000)
    add_request(parser, required=False)
    add_command(parser, "the command to run, with {NAME}, {#} and {} for what differs")
    parser.add_argument(
        "--each",
        metavar="NAME=VALUES",
        action="append",
        default=[],
        help="values of {NAME}: lr=0.1,0.01 or seed=1..5 or lr=1e-4..1e-1:4:log; several give each combination, the"
        " last fastest",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="read lines from FILE, '-' for standard input: each is {} of the command, or without one a command",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the logs (default: a new anyaccel-sweep-DATE-TIME; the newest one with --resume)",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=number,
        help="most commands at the same time (default: as many as there are devices)",
    )
    parser.add_argument(
        "--retries", metavar="N", type=number, default=0, help="run a command that fails again, up to N times"
    )
    parser.add_argument("--stop-on-error", action="store_true", help="start no further command after a failure")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the sweep in DIR: run the commands that have not succeeded; without REQUEST, as it began",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands that would run")
    add_wait(parser.add_argument_group("waiting"))
    limit = parser.add_argument_group("time limit")
    add_time(limit, what="each command")
    add_signal(limit)
    add_grace(limit)
    add_job_options(parser)
    cluster = parser.add_argument_group("clusters")
    cluster.add_argument(
        "--engine",
        type=_engine,
        metavar="ENGINE",
        default="local",
        help="run on this machine, 'local', or on the nodes of a cluster by an engine that is installed, such as ray or"
        " dask (default: local)",
    )
    cluster.add_argument(
        "--address", metavar="ADDRESS", help="where the cluster is (default: where its own tools find it)"
    )
    rare = parser.add_argument_group("rare options")
    add_start(rare)
    add_launch(rare)
    parser.set_defaults(recalled=False, lines=None)


def _engine(name: str) -> str:
    """Return the name of an installed engine."""
    if name != "local":
        from anyaccel.pool import find_engine

        find_engine(name)
    return name


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    _check_directory()
    if args.resume:
        args.out = _find_folder(args)
    if not args.request:
        args = _recall(args)
    each: dict[str, tuple[str, ...]] = {}
    if not args.recalled:
        args.lines = None if args.source is None else _lines(args.source)
    for text in args.each:
        name, values = parse_each(text)
        if name in each:
            raise UsageError(f"--each gives {name!r} twice; separate its values by commas")
        each[name] = values
    args.signal = time_limit.check_early(args.signal, args.time)
    if args.address is not None and args.engine == "local":
        raise UsageError("--address belongs to --engine ray and --engine dask")
    commands = Commands(args.command or (), each, args.lines)
    for note in commands.notes:
        output.say(note)
    if args.dry_run:
        log = JobLog(f"{args.out}/{JOB_LOG}", resume=True) if args.resume else None
        output.print_lines(
            written(command) for number, command in commands if not (log and log.was_done(number, command))
        )
        return 0
    check_job_options(args)
    return _detach(args, commands) if args.detach else _run_here(args, commands)


def _run_here(args: argparse.Namespace, commands: Commands) -> int:
    """Run the sweep in this process.

    Raises:
        KeyboardInterrupt: When SIGINT stopped it.
    """
    status = _run(args, commands)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    return status


def _check_directory() -> None:
    """Check that the working directory exists: the record of a sweep names it, and its folder is made there.

    Raises:
        AnyaccelError: When it has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise AnyaccelError(
            f"a sweep needs its working directory, which has gone ({error.strerror})", hint="go to another directory"
        ) from error


def _detach(args: argparse.Namespace, commands: Commands) -> int:
    """Run the sweep as a job, which supervises itself, and print its number."""

    def supervise(supervisor: Supervisor) -> int:
        supervisor.hold_back(args.grace)
        status = _run(args, commands, supervisor)
        supervisor.finish(status, state="cancelled" if status in (130, 143) else "")
        return status

    shown = ["sweep", *(f"--each={text}" for text in args.each), *(args.command or (f"--from={args.source}",))]
    return detach(args, shown, supervise, each=" each")


def _run(args: argparse.Namespace, commands: Commands, supervisor: Supervisor | None = None) -> int:
    request = anyaccel.parse_request(args.request)
    inventory = survey(args, request=request) if args.engine == "local" else None
    at_once = 0 if inventory is None else count_capacity(inventory, request, args.jobs or len(commands))
    pool = _open_pool(args) if inventory is None else None
    try:
        args.out = args.out or _make_folder()  # not before: a sweep that is refused leaves nothing behind
        log = JobLog(f"{args.out}/{JOB_LOG}", resume=args.resume)
        if not args.recalled:
            _record(args)
    except BaseException:
        if pool is not None:
            pool.shutdown()
        raise
    tally = Tally(len(commands))
    if log.done:
        tally.skipped = sum(log.was_done(*each) for each in commands)
    left = ((number, command) for number, command in commands if number not in log.done)
    as_json = args.json
    if supervisor is not None:
        supervisor.record("running", job_log=os.path.abspath(log.path), commands=len(commands))
        as_json = False  # its output is a log from here on
    if isinstance(args.time, BareSeconds) and supervisor is None:
        output.say(f"time limit {span(args.time)} each")
    progress = _Progress(tally, args.out)
    progress.show()
    status = 0
    try:
        if pool is not None:
            status = _on_cluster(args, pool, commands, left, progress=progress, log=log)
        elif inventory is not None:
            setting = SweepSetting(
                request=request,
                inventory=inventory,
                out=args.out,
                log_name=commands.log_name,
                jobs=min(args.jobs or at_once, at_once),
                retries=args.retries,
                stop_on_error=args.stop_on_error,
                grace=args.grace,
                time=args.time,
                early=args.signal,
                options={"bind": None, **start_options(args), **wait_options(args)},
            )
            sweep = Sweep(
                setting,
                left,
                tally,
                on_change=progress.show,
                on_end=lambda run: progress.add(run, log),
                on_wait=progress.wait,
            )
            status = sweep.run()
    finally:
        progress.end(_resume_line(args), [number for number, _ in left])
        log.close()
    if as_json:
        output.print_json("sweep/1", _document(args, tally, log, status))
    return status


def _find_folder(args: argparse.Namespace) -> str:
    """Return the directory of the sweep to resume: that of ``--out``, or the newest one in the working directory.

    Raises:
        UsageError: When there is no sweep, or the directory stands in the place of the request.
    """
    out: str | None = args.out
    if args.command is None and len(args.request) == 1 and os.path.isdir(args.request[0]):
        raise UsageError(
            f"the directory of the sweep to resume must follow --out (got {args.request[0]!r} as the request)",
            hint=f"as in: anyaccel sweep --resume --out {shlex.quote(args.request[0])}",
        )
    if out is not None:
        if not os.path.exists(f"{out}/{JOB_LOG}"):
            raise UsageError(
                f"there is no sweep in {os.path.abspath(out)}: it has no {JOB_LOG}",
                hint="name the directory of the sweep with --out, or begin a new one without --resume",
            )
        return out
    earlier = [entry for entry in os.scandir() if entry.name.startswith(f"{_FOLDER}-") and entry.is_dir()]
    earlier = [entry for entry in earlier if os.path.exists(f"{entry.path}/{JOB_LOG}")]
    if not earlier:
        raise UsageError(
            f"there is no {_FOLDER}-DATE-TIME to go on with in {os.getcwd()}", hint="name its directory with --out"
        )
    # By time, not by name: the second of a second ends in -2.
    return max(earlier, key=lambda entry: entry.stat().st_mtime).name


def _make_folder() -> str:
    """Make a directory for the logs, named by the time.

    Raises:
        AnyaccelError: When none can be made.
    """
    name = time.strftime(f"{_FOLDER}-%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = name if number == 1 else f"{name}-{number}"  # two sweeps of one second
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        except OSError as error:
            raise AnyaccelError(
                f"{path} cannot be made: {error.strerror}", hint="name a directory with --out"
            ) from error
        return path
    raise AssertionError


def _record(args: argparse.Namespace) -> None:
    """Write the command line of a sweep to its directory, for :func:`_recall`."""
    try:
        record = {"arguments": args.typed[1:], "directory": os.getcwd(), "lines": args.lines}
        write_whole(f"{args.out}/{_RECORD}", json.dumps(record), mode=0o600)
    except OSError as error:
        raise AnyaccelError(f"{args.out}/{_RECORD} cannot be written: {error.strerror}") from error


def _recall(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments that a sweep's directory records, with the options that are given now, and go to its place.

    Options that start a job, and ``--json``, are those that are given now.

    Raises:
        UsageError: When a request is missing: no sweep is resumed, its commands are given, or there is no record of
            this user.
        AnyaccelError: When the directory in which the sweep began cannot be entered.
    """
    if not args.resume:
        raise UsageError("the following arguments are required: REQUEST", hint="see 'anyaccel sweep --help'")
    if args.each or args.source is not None or args.command is not None:
        raise UsageError(
            "the request is missing: --each, --from and a command need it",
            hint=f"give it as well; 'anyaccel sweep --resume --out {shlex.quote(args.out)}' takes all from the record",
        )
    out = os.path.abspath(args.out)
    try:
        record = _read_record(f"{out}/{_RECORD}")
        words, directory, lines = list(map(str, record["arguments"])), str(record["directory"]), record["lines"]
        lines = None if lines is None else list(map(str, lines))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{out} does not hold the command line of a sweep of yours", hint="give the request and the command as well"
        ) from error
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
    again = parse("sweep", sys.modules[__name__], [*own, *args.typed[1:]])
    again.command, again.typed = command, [*args.typed, "--out", out]
    again.out, again.lines, again.recalled = out, lines, True
    for name in ("detach", "after", "after_ok", "begin", "notify", "json"):
        setattr(again, name, getattr(args, name))
    try:
        os.chdir(directory)
    except OSError as error:
        raise AnyaccelError(
            f"the directory {directory!r} of the sweep cannot be entered: {error.strerror}", hint="make it again"
        ) from error
    return again


def _read_record(path: str) -> Any:
    """Read a JSON file that only this user can have written: another user's must not say which commands are run.

    Raises:
        OSError: When it cannot be opened.
        ValueError: When another user can have written it, or it is no JSON.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(path)
        return json.load(file)


def _resume_line(args: argparse.Namespace) -> str:
    """Return the command line to resume this sweep, in any directory."""
    notify = ["--notify", args.notify] if args.notify else []
    line = ["anyaccel", "sweep", "--resume", "--out", os.path.abspath(args.out)]
    return shlex.join([*line, *["--detach"] * args.detach, *notify])


def _open_pool(args: argparse.Namespace) -> anyaccel.Pool:
    """Make the pool of a sweep on a cluster.

    Raises:
        AnyaccelError: When the engine is not installed, there is no cluster, or the engine refuses an option.
    """
    os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")  # else a cluster's logs stand in standard output, between ours
    return anyaccel.Pool(
        args.request,
        engine=args.engine,
        address=args.address,
        max_workers=args.jobs,
        timeout=args.time,
        grace=args.grace,
        signal=args.signal,
        results="pickle",
        **start_options(args),
    )


def _on_cluster(
    args: argparse.Namespace,
    pool: anyaccel.Pool,
    commands: Commands,
    left: Iterator[tuple[int, tuple[str, ...]]],
    *,
    progress: _Progress,
    log: JobLog,
) -> int:
    """Run the commands as calls of a pool, placed by the engine; each output returns in a piece."""
    stopped = 0

    def stop(number: int, _: object) -> None:
        nonlocal stopped
        stopped = stopped or number
        # Leaves the pool's with block, which cancels the calls on the nodes.
        raise KeyboardInterrupt

    tally = progress.tally
    calls: _Calls | None = None
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # Interrupted, it ends what runs on the cluster before it lets go of it.
        with pool:
            calls = _Calls(args.out, commands.log_name, pool)
            while True:
                while len(calls.pending) < (args.jobs or _WINDOW) and not (args.stop_on_error and tally.failed):
                    command = next(left, None)
                    if command is None:
                        break
                    calls.submit(*command)
                tally.running = len(calls.pending)
                progress.show()
                if not calls.pending:
                    return 1 if tally.failed else 0
                for future in wait(calls.pending, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
                    run = calls.ended(future)
                    if run.good or run.attempts > args.retries:
                        progress.add(run, log)
                    else:
                        calls.submit(run.number, run.command, run.attempts + 1)
    except KeyboardInterrupt:
        tally.interrupted += len(calls.pending) if calls is not None else 0
        return 128 + (stopped or signal.SIGINT)
    finally:
        tally.running = 0
        for number, handler in before.items():
            signal.signal(number, handler)


class _Calls:
    """Unfinished calls of a pool, with their commands."""

    def __init__(self, out: str, log_name: Callable[[int], str], pool: anyaccel.Pool) -> None:
        self.pending: dict[Future[tuple[Ended, bytes]], tuple[int, tuple[str, ...], int]] = {}
        self._pool = pool
        self._out = out
        self._log_name = log_name

    def submit(self, number: int, command: tuple[str, ...], attempt: int = 1) -> None:
        """Submit a command."""
        self.pending[self._pool.submit(call, number, command, attempt)] = (number, command, attempt)

    def ended(self, future: Future[tuple[Ended, bytes]]) -> Ended:
        """Return the end of a command, and write its log."""
        number, command, attempt = self.pending.pop(future)
        try:
            run, printed = future.result()
        except AnyaccelError as error:
            printed = f"anyaccel: {error}\n".encode(errors="replace")
            run = Ended(
                number=number, command=command, status=error.exit_code, started=time.time(), attempts=attempt,
                output_bytes=len(printed), host="-", timed_out=isinstance(error, TaskTimeoutError),
            )  # fmt: skip
        path = f"{self._out}/{self._log_name(number)}"
        with open(path, "wb" if attempt == 1 else "ab") as file:
            file.write(printed)
        return replace(run, log=path)


class _Progress:
    """Progress of a sweep on standard error: a line in place on a terminal, few lines in a log."""

    def __init__(self, tally: Tally, out: str) -> None:
        self.tally = tally
        self._out = out
        self._line = output.StatusLine()
        self._waits = ""
        self._told = False
        self._shown = 0.0

    def show(self) -> None:
        """Show the progress, at most ten times a second."""
        now = time.monotonic()
        # A terminal over a network need not follow thousands of short commands.
        if self._line.in_place and now - self._shown < 0.1:  # noqa: PLR2004
            return
        self._shown = now
        self._line.show(self._words() if self._line.in_place or self._line.used else self._beginning())

    def wait(self, place: int, holders: Iterable[LeaseRecord]) -> None:
        """Show the wait for devices; in a log once, if no command runs."""
        taken = describe_obstacles(holders, {})
        self._waits = f", waiting for devices, place {place} in line{f': {taken}' if taken else ''}"
        self.show()
        if not (self._line.in_place or self.tally.running or self._told):
            self._told = True
            output.say(self._waits.lstrip(", "))

    def add(self, run: Ended, log: JobLog) -> None:
        """Count and log the end of a command, and report the first failures."""
        self.tally.add(run)
        log.add(run)
        self._waits = ""
        if run.good or run.interrupted or self.tally.failed > _SHOWN_FAILURES:
            return
        self._line.clear()
        again = f" ({run.attempts} times)" if run.attempts > 1 else ""
        output.say(f"{run.number} {run.how}{again}: {written(run.command)} ({run.log})")
        if self.tally.failed == _SHOWN_FAILURES:
            output.say(f"further failures are in {log.path}")

    def end(self, resume: str, not_started: Sequence[int]) -> None:
        """Print the result, and the command line to resume an incomplete sweep."""
        self._line.clear()
        rest = f", {len(not_started)} not started ({format_slots(not_started):.60})" if not_started else ""
        output.say(f"{self._counts()}{rest} in {elapsed(self.tally.seconds)}; logs: {self._out}")
        if self.tally.skipped + self.tally.done < self.tally.total:
            output.say("go on with:")
            output.say_verbatim(resume)

    def _beginning(self) -> str:
        total = self.tally.total
        return f"{total} command{'s' * (total != 1)}, logs in {self._out}"

    def _counts(self) -> str:
        tally = self.tally
        ended = tally.skipped + tally.done
        failed = f", {tally.failed} failed" if tally.failed else ""
        skipped = f" ({tally.skipped} of them before)" if tally.skipped else ""
        interrupted = f", {tally.interrupted} interrupted" if tally.interrupted else ""
        return f"{ended} of {tally.total} done{skipped}{failed}{interrupted}"

    def _words(self) -> str:
        left = self.tally.left_seconds
        about = f", about {elapsed(left)} left" if left is not None else ""
        running = f", {self.tally.running} running" if self.tally.running else ""
        return f"{self._counts()}{running}, {elapsed(self.tally.seconds)}{about}{self._waits}"


def _document(args: argparse.Namespace, tally: Tally, log: JobLog, status: int) -> dict[str, object]:
    return {
        "out": args.out,
        "job_log": log.path,
        **output.take_fields(tally, "total", "skipped", "done", "failed", "interrupted"),
        "seconds": round(tally.seconds, 3),
        "exit_status": status,
        "failures": [
            {
                **output.take_fields(run, "number", "command"),
                "exit_status": run.status,
                "signal": run.signal or None,
                "timeout": run.timed_out,
                **output.take_fields(run, "attempts", "log"),
            }
            for run in tally.failures
        ],
    }


def _lines(path: str) -> list[str]:
    try:
        if path == "-":
            text = sys.stdin.read() if sys.stdin is not None else ""
        else:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
    except OSError as error:
        raise UsageError(f"--from {path} cannot be read: {error.strerror}") from error
    return text.split("\n")
