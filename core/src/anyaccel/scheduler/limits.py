"""Verdicts about requests that are over a limit of the queue policy."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.model import Reason, ReasonCode, Verdict, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.policy import OverLimit


def apply_limits(verdict: Verdict, limits: Sequence[OverLimit], *, user: str = "", machine: bool = True) -> Verdict:
    """Return the verdict with the exceeded limits in front of the reasons, and their remedies in front of the ways out.

    With a lasting limit, the request never fits, for the lasting limits alone: other reasons and ways out are dropped.
    Else it does not fit until the user releases devices. The nearest requests are dropped. Without limits, or if the
    request never fits anyway, the verdict stays the same.

    Args:
        verdict: The verdict without limits.
        limits: The exceeded limits.
        user: Name of the user; empty to address the reader.
        machine: Whether the limits are those of the machine's configuration, and not of a program's own policy.
    """
    if not limits or not verdict.ever_fits:
        return verdict
    lasting = [each for each in limits if each.lasting]
    told = lasting or limits
    reasons = tuple(Reason(code=ReasonCode.LIMIT, message=each.message(user)) for each in told)
    ways_out = tuple(way for each in told if (way := each.remedy if machine else each.lower))
    return replace(
        verdict,
        fits_now=False,
        ever_fits=not lasting,
        reasons=reasons if lasting else (*reasons, *verdict.reasons),
        ways_out=ways_out if lasting else (*ways_out, *verdict.ways_out),
        nearest=None,
        nearest_now=None,
    )
