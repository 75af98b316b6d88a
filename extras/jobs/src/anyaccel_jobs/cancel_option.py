"""Jobs for ``anyaccel cancel``."""

from __future__ import annotations

from anyaccel_jobs import jobs


def list_own() -> tuple[list[str], list[str], set[int]]:
    """Return the waiting jobs, the running or lost jobs, and the supervisors of active jobs."""
    mine = [job for job in jobs.jobs() if job.here and (job.live or (job.state == "lost" and job.lease))]
    waiting = [job.id for job in mine if job.state == "waiting"]
    running = [job.id for job in mine if job.state != "waiting"]
    return waiting, running, {job.pid for job in mine if job.live}


def cancel(what: str, grace: float | None) -> str | None:
    """Cancel a job by number or by lease.

    Args:
        what: Number of a job, or identity of a lease.
        grace: Seconds between SIGTERM and SIGKILL; None for those of the job.

    Returns:
        The message for the user; None if no job has the lease.

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
    # A lease of a job ends with the job: its end must be recorded as cancelled.
    for job in jobs.jobs():
        if job.lease == what and job.live and job.here:
            return f"job {jobs.cancel(job, grace=grace).id} is cancelled, which held lease {what}"
    return None
