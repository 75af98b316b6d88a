"""Jobs for ``anyaccel cancel``."""

from __future__ import annotations

import math
from collections.abc import Collection

from anyaccel.ledger import Ledger

from anyaccel_jobs import jobs


def list_own(leases: Collection[str]) -> tuple[list[str], list[str], set[int], set[str]]:
    """Return the waiting jobs, the running or lost jobs, the supervisors of active jobs, and the leases of these jobs.

    A lost job counts as long as its lease is active.

    Args:
        leases: Identities of the active leases of this user.
    """
    here = [job for job in jobs.jobs(since=math.inf) if job.here]
    mine = [job for job in here if job.live or (job.state == "lost" and job.lease in leases)]
    waiting = [job.id for job in mine if job.state == "waiting"]
    running = [job.id for job in mine if job.state != "waiting"]
    return waiting, running, {job.pid for job in mine if job.live}, {job.lease for job in mine if job.lease}


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
        left = job.state == "lost" and any(lease.id == job.lease for lease in Ledger.open().leases())
        before, job = job.state, jobs.cancel(job, grace=grace)
        if before in jobs.LIVE:
            return f"job {job.id} is {job.state}"
        how = "ended by its time limit" if before == "timeout" else before
        return f"job {job.id} was {how} already{'; what it had left running is ended' if left else ''}"
    # A lease of a job ends with the job: its end must be recorded as cancelled.
    for job in jobs.jobs(since=math.inf):
        if job.lease == what and job.live and job.here:
            return f"job {jobs.cancel(job, grace=grace).id} is cancelled, which held lease {what}"
    return None
