"""Jobs for ``anyaccel cancel``: the jobs that this user can cancel, and how that is done."""

from __future__ import annotations

from anyaccel_jobs import jobs


def list_own() -> tuple[list[str], list[str], set[int]]:
    """Return the jobs that wait, those that run or left something running, and the supervisors of all active jobs."""
    mine = [job for job in jobs.jobs() if job.here and (job.live or (job.state == "lost" and job.lease))]
    waiting = [job.id for job in mine if job.state == "waiting"]
    running = [job.id for job in mine if job.state != "waiting"]
    return waiting, running, {job.pid for job in mine if job.live}


def cancel(what: str, grace: float | None) -> str | None:
    """Cancel the job of a number, or that which holds a lease.

    Args:
        what: The number of a job, or the identity of a lease.
        grace: Seconds between SIGTERM and SIGKILL; None for those that the job was given.

    Returns:
        The message for the user; None when there is no such job.

    Raises:
        JobNotFoundError: When no job has this number.
        AnyaccelError: When the job does not end.
    """
    if jobs.is_id(what):
        job = jobs.find(what)
        before, job = job.state, jobs.cancel(job, grace=grace)
        if before in jobs.LIVE:
            return f"job {job.id} is {job.state}"
        left = "; what it had left running is ended" if before == "lost" else ""
        how = "ended by its time limit" if before == "timeout" else before
        return f"job {job.id} was {how} already{left}"
    for job in jobs.jobs():
        if job.lease == what and job.live and job.here:
            return f"job {jobs.cancel(job, grace=grace).id} is cancelled, which held lease {what}"
    return None
