"""The notifier: a process that waits for the end of a job, and then runs a command of the user."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from anyaccel.linux import list_descriptors

from anyaccel_jobs import jobs

_SHELL = "/bin/sh"


def start_notifier(command: str) -> int:
    """Start the notifier of a job without a number.

    It starts before the job has devices: later it would carry the mark of the lease, and keep the devices.

    Args:
        command: The command, which a shell runs after the end of the job.

    Returns:
        The descriptor to which the number of the job is written. If it is closed before, the command is not run.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            # An orphan: a supervisor ends its own children with the job.
            if not os.fork():
                _follow(reading, command)
        finally:
            os._exit(0)
    os.close(reading)
    os.waitpid(child, 0)
    return writing


def _follow(reading: int, command: str) -> None:
    """Read the number of the job, wait for its end, and run the command."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # handlers of the supervisor
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for descriptor in list_descriptors():
        if descriptor > 2 and descriptor != reading:  # noqa: PLR2004 - the standard streams
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(descriptor)
    told = os.read(reading, 64)
    if told:
        _notify(jobs.wait(jobs.find(told.decode())), command)


def _notify(job: jobs.Job, command: str) -> None:
    """Run the command after the end of a job. The output and a failure are appended to the job's log."""
    environ = {
        **os.environ,
        "ANYACCEL_JOB": job.id,
        "ANYACCEL_JOB_STATE": job.state,
        "ANYACCEL_JOB_STATUS": "" if job.status is None else str(job.status),
        "ANYACCEL_JOB_LOG": job.log,
    }
    # The directory may have been removed while the job ran.
    directory = job.directory if os.path.isdir(job.directory) else "/"
    with open(job.log, "ab") as log:
        status = subprocess.run(
            [_SHELL, "-c", command], env=environ, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            check=False,
        ).returncode  # fmt: skip
        if status:
            log.write(f"anyaccel: --notify failed with exit status {status}\n".encode())
