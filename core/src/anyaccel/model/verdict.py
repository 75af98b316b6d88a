"""Why a request fits or does not, as data first and as sentences made from it."""

from __future__ import annotations

from enum import Enum

from anyaccel.model._value import Value
from anyaccel.model.request import Request, Term


class ReasonCode(Enum):
    """What stands in a request's way."""

    NOT_ENOUGH = "not-enough"
    """There are fewer such devices on the machine than are asked for."""
    HOSTS = "hosts"
    """Fewer machines can serve it than it is to be on."""
    VENDOR_FAILED = "vendor-failed"
    """A vendor's devices could not be detected, so nobody knows what is there."""
    HIDDEN = "hidden"
    """The environment we started in hides devices."""
    UNHEALTHY = "unhealthy"
    """Devices are there and broken."""
    FILTER = "filter"
    """Devices do not pass a filter of the request, or nobody knows whether they do."""
    PART = "part"
    """Only a part of a device is ours to hand out, since we are in a worker that holds a share."""
    PARTS = "parts"
    """There are enough devices only when some are counted as well as their parts."""
    NOT_FRACTIONAL = "not-fractional"
    """Devices are given out whole only."""
    MIXED_TYPES = "mixed-types"
    """There are enough devices, and not enough that are alike."""
    NOT_LINKED = "not-linked"
    """There are enough devices, and not enough that are linked to each other."""
    VENDOR_RULE = "vendor-rule"
    """The vendor's rule refuses the quantity or the set."""
    VARIABLE = "variable"
    """Two vendors obey one variable, and no value of it means devices of both."""
    TOGETHER = "together"
    """Each term fits, and all of them at once do not."""
    TAKEN = "taken"
    """Devices are held by somebody."""
    LIMIT = "limit"
    """The machine's configuration does not give this user so much, or not while the user holds what it holds."""
    WAITING_BEHIND = "waiting-behind"
    """Requests for the same devices came first."""


class Reason(Value):
    """One thing that stands in a request's way.

    Attributes:
        code: What it is.
        message: The same in words, as a clause without capital and period.
        term: The term concerned; None when it is the whole request.
        devices: Ids of the devices concerned.
        holders: Ids of the allocations that hold them, or of the tickets that wait in front.
        filter: Name of the filter concerned; empty when it is none.
    """

    code: ReasonCode
    message: str
    term: Term | None = None
    devices: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    filter: str = ""

    def to_json(self) -> dict[str, object]:
        """The reason as JSON data."""
        return {
            "code": self.code.value,
            "message": self.message,
            "term": None if self.term is None else str(self.term),
            "devices": list(self.devices),
            "holders": list(self.holders),
            "filter": self.filter or None,
        }


class Verdict(Value):
    """Whether a request fits, and why not.

    Attributes:
        request: The request.
        fits_now: Whether it would be served if it were made now.
        ever_fits: Whether it would be served if nothing were held.
        reasons: What stands in its way; empty when it fits now.
        nearest: The nearest request that this machine can ever serve; None when there is none, or this one can be.
        nearest_now: The nearest request that can be served now; None likewise.
        ways_out: What can be done about what holds the devices or is wrong with them, a line each.
        gaps: What a worker would not be kept from that is given what the request wants, one sentence each; known to
            :func:`anyaccel.why` alone.
    """

    request: Request
    fits_now: bool
    ever_fits: bool
    reasons: tuple[Reason, ...] = ()
    nearest: Request | None = None
    nearest_now: Request | None = None
    ways_out: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def cpu(self) -> bool:
        """Whether the request runs on the CPU instead, since it can never fit and accepts that.

        A limit of its user is no reason to do so: what is over it is refused.
        """
        limited = any(reason.code is ReasonCode.LIMIT for reason in self.reasons)
        return self.request.else_cpu and not self.ever_fits and not limited

    @property
    def message(self) -> str:
        """The verdict in one sentence, without the way out."""
        if self.fits_now:
            return f"{self.request} fits now."
        what = "does not fit now" if self.ever_fits else "can never fit"
        why = "; ".join(reason.message for reason in self.reasons)
        return f"{self.request} {what}: {why}." + (" It runs on the CPU instead." if self.cpu else "")

    @property
    def hint(self) -> str:
        """The way out, or empty."""
        lines = list(self.ways_out)
        if not self.ever_fits and self.nearest:
            lines.append(f"nearest that fits: {self.nearest}")
        if self.nearest_now and self.nearest_now != self.nearest:
            lines.append(f"fits now: {self.nearest_now}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The verdict as JSON data, requests in the form that can be asked for again."""
        return {
            "request": str(self.request),
            "fits_now": self.fits_now,
            "ever_fits": self.ever_fits,
            "cpu": self.cpu,
            "message": self.message,
            "reasons": [reason.to_json() for reason in self.reasons],
            "ways_out": list(self.ways_out),
            "gaps": list(self.gaps),
            "nearest": None if self.nearest is None else str(self.nearest),
            "nearest_now": None if self.nearest_now is None else str(self.nearest_now),
        }

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.message, self.hint)))
