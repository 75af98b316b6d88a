"""Run many commands, as many at once as there are devices: anyaccel sweep GPU:1 --each lr=0.1,0.01 -- CMD --lr {lr}.

In the command, {NAME} stands for a value of --each NAME=..., {#} for the number of the command, and {} for a line of
--from; without a command, each line of --from is one. All of that is put into arguments, never through a shell: write
sh -c '...' for one. Each command has a log, FOLDER/NUMBER.log, and a line in FOLDER/jobs.tsv, the job log, which is
that of GNU parallel. Ctrl-C asks what runs to end, and kills it after the time of --grace.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.durations import duration
from anyaccel.cli.options import add_launch, add_request, add_time, add_wait, survey, wait_options
from anyaccel.errors import AnyaccelError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from concurrent.futures import Future
    from typing import Any

    from anyaccel.launcher.jobs import Keeper
    from anyaccel.launcher.sweep import Commands, Ended, JobLog, Tally

_SHOWN_FAILURES = 10
_LOOK_SECONDS = 1.0
_WINDOW = 64
"""Calls that a cluster has at once where nobody says how many."""


EXAMPLES = (
    (
        "anyaccel sweep GPU:1 --each lr=0.1,0.01 --each seed=1..5 -- python train.py --lr {lr} --seed {seed}",
        "ten runs, as many at once as there are GPUs",
    ),
    ("anyaccel sweep GPU:1 --from commands.txt --out logs", "a command per line of a file"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    parser.add_argument(
        "--each",
        metavar="NAME=VALUES",
        action="append",
        default=[],
        help="values of {NAME}, such as lr=0.1,0.01 or seed=1..5; several give each combination, the last fastest",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="read lines from FILE, '-' for standard input: each is {} of the command, or without one a command",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", default="anyaccel-sweep", help="folder of the logs (default: anyaccel-sweep)"
    )
    parser.add_argument(
        "--jobs", metavar="N", type=_number, help="run so many at once at most (default: as many as there are devices)"
    )
    parser.add_argument("--retries", metavar="N", type=_number, default=0, help="run what fails again, so many times")
    parser.add_argument(
        "--stop-on-error", action="store_true", help="start nothing more once a command has failed; what runs may end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the job log in FOLDER: run what has not ended well"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument(
        "--grace", metavar="DURATION", type=duration, default=10.0, help="time to end after SIGTERM (default: 10s)"
    )
    parser.add_argument(
        "--detach", action="store_true", help="go on without this terminal, as a job: see 'anyaccel jobs'"
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray", "dask"),
        default="local",
        help="run on this machine, or on the nodes of a cluster (default: local)",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="where the cluster is (default: where its own tools find it)"
    )
    add_launch(parser)
    add_wait(parser)
    add_time(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from anyaccel.launcher.sweep import Commands, parse_each

    each: dict[str, tuple[str, ...]] = {}
    for text in args.each:
        name, values = parse_each(text)
        if name in each:
            raise UsageError(f"--each gives {name!r} twice; separate its values by commas")
        each[name] = values
    if args.address is not None and args.engine == "local":
        raise UsageError("--address belongs to --engine ray and --engine dask")
    commands = Commands(args.command or (), each, None if args.source is None else _lines(args.source))
    for note in commands.notes:
        output.say(note)
    if args.dry_run:
        from anyaccel.launcher.sweep import written

        output.print_lines(written(command) for _, command in commands)
        return 0
    if args.detach:
        return _detach(args, commands)
    return _run(args, commands)


def _detach(args: argparse.Namespace, commands: Commands) -> int:
    """Run the sweep as a job, and print its number."""
    from anyaccel.cli.run import say_detached
    from anyaccel.launcher.jobs import detach

    def keep(keeper: Keeper) -> int:
        try:
            status = _run(args, commands, keeper)
        except AnyaccelError as error:
            output.report_error(error, as_json=args.json and not keeper.job.id)
            status = error.exit_code
        keeper.end(status, cancelled=status in (130, 143))
        return status

    request = str(anyaccel.parse_request(args.request))
    shown = ["sweep", *(f"--each={text}" for text in args.each), *(args.command or (f"--from={args.source}",))]
    job, status = detach(keep, request=request, command=shown, note=args.note)
    if job is not None:
        say_detached(job, as_json=args.json)
    return status


def _run(args: argparse.Namespace, commands: Commands, keeper: Keeper | None = None) -> int:
    from anyaccel.launcher.sweep import JOB_LOG, JobLog, Setting, Sweep, Tally, capacity

    request = anyaccel.parse_request(args.request)
    inventory = survey(args) if args.engine == "local" else None
    at_once = 0 if inventory is None else capacity(inventory, request, args.jobs or len(commands))
    log = JobLog(f"{args.out}/{JOB_LOG}", resume=args.resume)
    tally = Tally(len(commands))
    if log.done:
        tally.skipped = sum(log.was_done(*each) for each in commands)
    left = ((number, command) for number, command in commands if number not in log.done)
    as_json = args.json
    if keeper is not None:
        keeper.begin("running")
        as_json = False  # its output is a log from here on
    progress = _Progress(tally, log.path)
    progress.show()
    try:
        if inventory is None:
            status = _on_cluster(args, left, log, progress)
        else:
            setting = Setting(
                request=request,
                inventory=inventory,
                out=args.out,
                jobs=min(args.jobs or at_once, at_once),
                retries=args.retries,
                stop_on_error=args.stop_on_error,
                grace=args.grace,
                time=args.time,
                wait=wait_options(args),
            )
            sweep = Sweep(
                setting, left, log, tally, on_change=progress.show, on_end=progress.tell, on_wait=progress.wait
            )
            status = sweep.run()
    finally:
        progress.end()
        log.close()
    if as_json:
        output.print_json("sweep/1", _document(args, tally, log, status))
    return status


def _on_cluster(
    args: argparse.Namespace, commands: Iterator[tuple[int, tuple[str, ...]]], log: JobLog, progress: _Progress
) -> int:
    """Run the commands as calls of a pool, whose engine decides where; what they print comes back in one piece."""
    import signal
    from concurrent.futures import FIRST_COMPLETED, wait

    stopped = 0

    def stop(number: int, _: object) -> None:
        nonlocal stopped
        stopped = stopped or number
        raise KeyboardInterrupt

    tally = progress.tally
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")  # else a cluster's logs stand in standard output, between ours
    try:
        # Interrupted, it ends what runs on the cluster before it lets go of it.
        with anyaccel.Pool(
            args.request,
            engine=args.engine,
            address=args.address,
            max_workers=args.jobs,
            timeout=args.time,
            grace=args.grace,
        ) as pool:
            calls = _Calls(args, pool)
            while True:
                while len(calls.pending) < (args.jobs or _WINDOW) and not (args.stop_on_error and tally.failed):
                    command = next(commands, None)
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
                        tally.add(run)
                        log.add(run)
                        progress.tell(run)
                    else:
                        calls.submit(run.number, run.command, run.attempts + 1)
    except KeyboardInterrupt:
        return 128 + (stopped or signal.SIGINT)
    finally:
        tally.running = 0
        for number, handler in before.items():
            signal.signal(number, handler)


class _Calls:
    """Commands that were submitted to a pool and have not ended."""

    def __init__(self, args: argparse.Namespace, pool: anyaccel.Pool) -> None:
        self.pending: dict[Future[Any], tuple[int, tuple[str, ...], int]] = {}
        self._pool = pool
        self._out = args.out

    def submit(self, number: int, command: tuple[str, ...], attempt: int = 1) -> None:
        """Submit a command."""
        from anyaccel.launcher.sweep import call

        self.pending[self._pool.submit(call, command)] = (number, command, attempt)

    def ended(self, future: Future[Any]) -> Ended:
        """Take a command that has ended, and write its log."""
        from anyaccel.launcher.sweep import Ended

        number, command, attempt = self.pending.pop(future)
        try:
            status, by_signal, began, seconds, host, printed = future.result()
        except AnyaccelError as error:
            status, by_signal, began, seconds, host = error.exit_code, 0, time.time(), 0.0, "-"
            printed = f"anyaccel: {error}\n".encode(errors="replace")
        path = f"{self._out}/{number}.log"
        with open(path, "wb" if attempt == 1 else "ab") as file:
            output_bytes = file.write(printed)
        return Ended(
            number=number, command=command, status=status, signal=by_signal, started=began, seconds=seconds,
            host=host, output_bytes=output_bytes, attempts=attempt, log=path,
        )  # fmt: skip


class _Progress:
    """How a sweep goes, on standard error: a line in place on a terminal, next to nothing in a log."""

    def __init__(self, tally: Tally, job_log: str) -> None:
        self.tally = tally
        self._job_log = job_log
        self._line = output.StatusLine()
        self._waits = ""
        self._shown = 0.0

    def show(self) -> None:
        """Show how it goes now, ten times a second at most."""
        now = time.monotonic()
        if self._line.in_place and now - self._shown < 0.1:  # noqa: PLR2004
            return
        self._shown = now
        self._line.show(self._words() if self._line.in_place or self._line.used else f"{self.tally.total} commands")

    def wait(self, place: int, _: object) -> None:
        """Show that it waits for devices."""
        self._waits = f", waiting for devices, place {place} in line"
        self.show()

    def tell(self, run: Ended) -> None:
        """Tell of a command that has failed, of the first ones at least."""
        from anyaccel.launcher.sweep import written

        self._waits = ""
        if run.good or self.tally.failed > _SHOWN_FAILURES:
            return
        self._line.clear()
        again = f" ({run.attempts} times)" if run.attempts > 1 else ""
        output.say(f"{run.number} {run.how}{again}: {written(run.command)} ({run.log})")
        if self.tally.failed == _SHOWN_FAILURES:
            output.say(f"what else fails stands in {self._job_log}")

    def end(self) -> None:
        """Say how it went."""
        self._line.clear()
        output.say(f"{self._counts()} in {self._written(self.tally.seconds)}; job log: {self._job_log}")

    def _counts(self) -> str:
        tally = self.tally
        ended = tally.skipped + tally.done
        failed = f", {tally.failed} failed" if tally.failed else ""
        skipped = f" ({tally.skipped} of them before)" if tally.skipped else ""
        return f"{ended} of {tally.total} done{skipped}{failed}"

    def _words(self) -> str:
        left = self.tally.left_seconds
        about = f", about {self._written(left)} left" if left is not None else ""
        running = f", {self.tally.running} running" if self.tally.running else ""
        return f"{self._counts()}{running}, {self._written(self.tally.seconds)}{about}{self._waits}"

    @staticmethod
    def _written(seconds: float) -> str:
        from anyaccel.launcher.hold import written

        return written(seconds)


def _document(args: argparse.Namespace, tally: Tally, log: JobLog, status: int) -> dict[str, object]:
    return {
        "out": args.out,
        "job_log": log.path,
        "total": tally.total,
        "skipped": tally.skipped,
        "done": tally.done,
        "failed": tally.failed,
        "seconds": round(tally.seconds, 3),
        "exit_status": status,
        "failures": [
            {
                "number": run.number,
                "command": list(run.command),
                "exit_status": run.status,
                "signal": run.signal or None,
                "attempts": run.attempts,
                "log": run.log,
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


def _number(text: str) -> int:
    import argparse

    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more (got {text!r})")
    return int(text)
