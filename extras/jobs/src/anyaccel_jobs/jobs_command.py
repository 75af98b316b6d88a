"""List jobs: those that wait, run, or ended within a day; or show everything about one: anyaccel jobs 3.

With --runs, commands of the past that ran in the foreground are listed, too, from the journal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyaccel
from anyaccel.cli import Column, output, print_table
from anyaccel.errors import AnyaccelError
from anyaccel.ledger import Ledger, journal
from anyaccel.linux import users
from anyaccel.text import clock, elapsed, span

from anyaccel_jobs import supervisor
from anyaccel_jobs.jobs import STATES, Job, active_jobs, find, jobs, list_ids
from anyaccel_jobs.moments import moment
from anyaccel_jobs.supervisor import Supervisor

_RECENT_SECONDS = 86400.0
_STATES = (*STATES, "ended")
"""States of jobs and of foreground runs: of these the exit status is often unknown."""
_COLUMNS = (
    Column(heading="JOB", turn=0),
    Column(heading="STATE", turn=1),
    Column(heading="REQUEST", turn=4, least=10),
    Column(heading="DEVICES", turn=5, least=10),
    Column(heading="STARTED", turn=6),
    Column(heading="TOOK", turn=7),
    Column(heading="EXIT", turn=3),
    Column(heading="REASON", turn=3, least=16, fold=True),
    Column(heading="COMMAND", turn=2, least=16),
)


EXAMPLES = (
    ("anyaccel jobs", "the jobs that wait or run, and those that ended lately"),
    ("anyaccel jobs 3", "everything about a job"),
    ("anyaccel jobs --state failed,timeout --since 2d", "the failures of two days"),
    ("anyaccel jobs --runs --since 2026-11-01", "also commands that ran in the foreground"),
)
COMPLETERS = {"job": list_ids}
"""Completers of arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", nargs="*", metavar="ID", help="show everything about these jobs")
    parser.add_argument("--all", action="store_true", help="also jobs that ended more than a day ago")
    parser.add_argument("--since", metavar="TIME", type=moment(ahead=False), help="jobs that ended since 2d, or a date")
    parser.add_argument("--state", metavar="STATE,...", type=_states, help=f"those in a state: {', '.join(_STATES)}")
    parser.add_argument("--runs", action="store_true", help="also foreground commands of the past, from the journal")
    parser.add_argument("--user", metavar="NAME", help="foreground commands of a user, or of 'all', from the journal")


def _states(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    for state in found:
        if state not in _STATES:
            raise argparse.ArgumentTypeError(f"there is no state {state!r:.40}; there are {', '.join(_STATES)}")
    return found


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.job:
        found = [find(number) for number in dict.fromkeys(args.job)]
        reasons = _explain_waits(found)
        if args.json:
            output.print_json("jobs/1", {"jobs": [describe(job, reasons) for job in found]})
        else:
            output.print_lines(line for job in found for line in _details(job, reasons))
        return 0
    since = 0.0 if args.all else time.time() - _RECENT_SECONDS if args.since is None else args.since
    # A lease ends a moment after its job: where those of jobs are left out, older jobs count, too.
    own = jobs(since=0.0 if args.runs or args.user else since)
    found = [
        job
        for job in own
        if (args.user in (None, "all", _own_name()))  # jobs of other users are private
        and (job.live or (job.ended or job.started or job.created) >= since)
        and job.state in (args.state or STATES)
    ]
    reasons = _explain_waits(found)
    runs = _find_runs(args, {job.lease for job in own}, since) if args.runs or args.user else []
    if args.json:
        content = {"jobs": [describe(job, reasons) for job in found]}
        output.print_json("jobs/1", content | ({"runs": [_describe_run(run) for run in runs]} if args.runs else {}))
    elif found or runs:
        rows = [(job.created, _row(job, reasons)) for job in found]  # as numbered: two jobs may start in another order
        rows += [(run.began, _run_row(run, named=args.user not in (None, _own_name()))) for run in runs]
        print_table(_COLUMNS, [row for _, row in sorted(rows, key=lambda row: row[0])])
    else:
        print_nothing = args.all or args.since is not None or args.state or args.user
        output.print_line(
            "No jobs." if print_nothing else "No jobs of the last day; 'anyaccel jobs --all' lists older ones."
        )
    return 0


def _explain_waits(found: Sequence[Job]) -> dict[str, str]:
    """Say why each waiting job waits, by number: for an earlier job, for its begin, or as ``anyaccel queue`` does.

    A sweep that has begun waits if it has no device.
    """
    waiting = [job for job in found if job.here and (job.state == "waiting" or (job.live and job.job_log))]
    if not waiting:
        return {}
    reasons: dict[int, str] = {}
    with contextlib.suppress(AnyaccelError):  # jobs are listed although the ledger cannot be read
        ledger = Ledger.open()
        holders = {each.pid for each in ledger.leases() if each.id}
        tickets = (each for each in ledger.tickets() if each.uid == os.geteuid() and each.pid not in holders)
        reasons = {each.pid: each.reason for each in tickets}
    live = {job.id for job in active_jobs()}
    texts = {}
    for job in waiting:
        earlier = [each for each in (*job.after, *job.after_ok) if each in live]
        # As the supervisor does: earlier jobs, then the begin, then the queue for devices.
        if earlier:
            texts[job.id] = f"after job {', '.join(earlier)}"
        elif job.begins is not None and job.begins > time.time():
            texts[job.id] = f"begins at {clock(job.begins)}"
        elif job.pid in reasons:
            texts[job.id] = reasons[job.pid]
    return texts


def _own_name() -> str:
    return users.user_name(os.geteuid())


def _find_runs(args: argparse.Namespace, of_jobs: set[str], since: float) -> list[journal.JournalEntry]:
    """Return the entries of the journal that are no jobs of this user."""
    user = args.user or _own_name()
    return [
        entry
        for entry in journal.read(since=since)
        if user in ("all", entry.user) and entry.lease not in of_jobs and _run_state(entry) in (args.state or _STATES)
    ]


def _run_state(run: journal.JournalEntry) -> str:
    if run.timeouts:
        return "timeout"
    # A command that took the place of 'anyaccel run' told its exit status to the shell alone.
    return "ended" if run.exit is None else "failed" if run.exit else "done"


def _describe_run(run: journal.JournalEntry) -> dict[str, Any]:
    """Return a run of the past as JSON."""
    return {
        "state": _run_state(run),
        **output.take_fields(run, "user", "request", "note", "program"),
        "devices": [used.device for used in run.devices],
        "lease": run.lease,
        "started": output.moment(run.began),
        "ended": output.moment(run.ended),
        "took_seconds": round(run.held, 3),
        "exit_status": run.exit,
    }


def _run_row(run: journal.JournalEntry, *, named: bool) -> tuple[str, ...]:
    return (
        "-",
        _run_state(run),
        run.request or "-",
        output.device_names(used.device for used in run.devices),
        clock(run.began),
        elapsed(run.held),
        "-" if run.exit is None else str(run.exit),
        "-",
        f"{run.user}: " * named + f"[{run.note}] " * bool(run.note) + (run.program or "-"),
    )


def _details(job: Job, reasons: Mapping[str, str]) -> list[str]:
    """Return lines with the name and value of each known fact about a job."""
    took = job.took
    facts = {
        "job": job.id,
        "state": job.state if job.here else f"{job.state} on {job.host}",
        "reason": reasons.get(job.id) or job.reason or "-",
        "progress": _describe_progress(job),
        "exit status": "-" if job.exit_status is None else str(job.exit_status),
        "request": job.request or "-",
        "devices": output.device_names(job.devices),
        "lease": job.lease or "-",
        "note": job.note or "-",
        "command": shlex.join(job.command) or "-",
        "submitted as": shlex.join(["anyaccel", *job.arguments]) if job.arguments else "-",
        "directory": job.directory or "-",
        "log": job.log,
        "submitted": clock(job.created),
        "after": ", ".join(job.after) or "-",
        "after success": ", ".join(job.after_ok) or "-",
        "begins": clock(job.begins),
        "started": clock(job.started),
        "ended": clock(job.ended),
        "took": "-" if took is None else elapsed(took),
        "time limit": "-" if job.time_limit is None else span(job.time_limit),
        "notify": job.notify or "-",
        "supervisor": str(job.pid) if job.live and job.here else "-",
    }
    width = max(map(len, facts))
    # Facts that a job does not have are left out.
    return [f"{name:<{width}}  {value}" for name, value in facts.items() if value != "-"]


def _describe_progress(job: Job) -> str:
    """Return how many commands of a sweep have succeeded, or a dash if that is unknown."""
    if not job.job_log:
        return "-"
    from anyaccel_jobs.sweep import read_done  # jobs that are no sweeps do without its imports

    try:
        return f"{len(read_done(job.job_log))} of {job.commands} done"
    except (OSError, AnyaccelError):  # the user may have moved the folder
        return "-"


def describe(job: Job, reasons: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a job as JSON.

    Args:
        job: The job.
        reasons: Why jobs wait, by number; None for a job that was just submitted, or has ended.
    """
    times = {
        name: None if at is None else output.moment(at)
        for name, at in (
            ("created", job.created),
            ("begins", job.begins),
            ("started", job.started),
            ("ended", job.ended),
        )
    }
    took = job.took
    return {
        "job": job.id,
        **output.take_fields(job, "state", "request", "note", "command"),
        "reason": (reasons or {}).get(job.id) or job.reason or None,
        "directory": job.directory,
        **output.take_fields(job, "devices", "lease", "arguments", "after", "after_ok", "notify"),
        **times,
        "took_seconds": None if took is None else round(took, 3),
        "exit_status": job.status,
        "time_limit_seconds": job.time_limit,
        "pid": job.pid if job.live and job.here else None,
        "host": job.host,
        "log": job.log,
    }


def detach(
    args: argparse.Namespace, command: Sequence[str], body: Callable[[Supervisor], int], *, each: str = ""
) -> int:
    """Start a job, and print the number.

    Args:
        args: The arguments; their request and note are recorded.
        command: The command to record.
        body: Called in the job's process, with its supervisor; returns its exit status.
        each: Text behind the time limit, if that is not the job's own.
    """

    def tell(error: AnyaccelError, begun: bool) -> None:
        output.report_error(error, as_json=args.json and not begun)

    request = str(anyaccel.parse_request(args.request))
    job, status = supervisor.detach(
        body, tell, request=request, command=tuple(command), note=args.note, arguments=tuple(args.typed),
        after=tuple(args.after), after_ok=tuple(args.after_ok), begins=args.begin, notify=args.notify,
    )  # fmt: skip
    if job is None:
        return status
    if args.json:
        output.print_json("job/1", describe(job))
        return status
    output.print_line(job.id)
    if job.state == "waiting":
        # Such a job is not in the queue for devices yet. What is over, an earlier job or a time, is not waited for.
        live = {each.id for each in active_jobs()}
        reasons = [f"for job {each}" for each in (*job.after, *job.after_ok) if each in live]
        reasons += [f"until {clock(job.begins)}"] if (job.begins or 0) > time.time() else []
        how = f"waits {' and '.join(reasons) or 'for its devices'}"
    else:
        how = f"runs with {output.device_names(job.devices)}" if job.devices else "runs"
    if args.time is not None:
        how += f", time limit {span(args.time)}{each}"
    output.say(f"job {job.id} {how}; see 'anyaccel logs -f {job.id}', end it with 'anyaccel cancel {job.id}'")
    return status


def _row(job: Job, reasons: Mapping[str, str]) -> tuple[str, ...]:
    took = job.took
    return (
        job.id,
        job.state if job.here else f"{job.state} on {job.host}",
        job.request or "-",
        output.device_names(job.devices),
        clock(job.started),
        "-" if took is None else elapsed(took),
        "-" if job.exit_status is None else str(job.exit_status),
        "; ".join(filter(None, (_describe_progress(job).strip("-"), reasons.get(job.id)))) or "-",
        written_job(job),
    )


def written_job(job: Job) -> str:
    """Format the note and the command of a job."""
    return f"[{job.note}] " * bool(job.note) + (shlex.join(job.command) or "-")
