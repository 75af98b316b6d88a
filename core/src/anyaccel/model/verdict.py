"""Verdicts: whether a request fits, and the reasons, as data and as sentences."""

from __future__ import annotations

from enum import Enum

from anyaccel.model.device import Request, Term
from anyaccel.model.value import Value


class ReasonCode(Enum):
    """The obstacle of a request."""

    NOT_ENOUGH = "not-enough"
    """The machine has fewer such devices than the request asks for."""
    UNKNOWN_NAME = "unknown-name"
    """No installed plug-in knows one of several names, and the devices of the others do not suffice."""
    HOSTS = "hosts"
    """Fewer machines can serve the request than it asks for."""
    VENDOR_FAILED = "vendor-failed"
    """A vendor's devices could not be detected."""
    HIDDEN = "hidden"
    """The environment hides devices."""
    UNHEALTHY = "unhealthy"
    """Devices are unhealthy."""
    FILTER = "filter"
    """Devices do not pass a filter of the request, or their property is unknown."""
    PART = "part"
    """This process is a worker with a share, and can hand out only that part of a device."""
    PARTS = "parts"
    """There are enough devices only if some are counted together with their parts."""
    NOT_FRACTIONAL = "not-fractional"
    """The devices cannot be shared."""
    MIXED_TYPES = "mixed-types"
    """There are enough devices, but not enough of one type."""
    NOT_LINKED = "not-linked"
    """There are enough devices, but not enough with links between each other."""
    VENDOR_RULE = "vendor-rule"
    """The vendor's rule refuses the quantity or the set."""
    VARIABLE = "variable"
    """Two vendors obey the same variable, and no value stands for devices of both."""
    TOGETHER = "together"
    """Each term fits alone, and the terms together do not."""
    TAKEN = "taken"
    """Devices are in use."""
    LIMIT = "limit"
    """The request exceeds the user's limits in the machine's configuration, by itself or with the user's leases."""
    WAITING_BEHIND = "waiting-behind"
    """Earlier requests ask for the same devices."""


class Reason(Value):
    """An obstacle of a request.

    Attributes:
        code: Kind of the obstacle.
        message: The obstacle in a clause, without capital and period.
        term: The term concerned; None for the whole request.
        devices: Ids of the devices concerned.
        holders: Ids of the allocations that hold the devices, of a gang those of its members; or of the tickets ahead.
        filter: Name of the filter concerned; may be empty.
    """

    code: ReasonCode
    message: str
    term: Term | None = None
    devices: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    filter: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the reason as JSON data."""
        return {
            "code": self.code.value,
            "message": self.message,
            "term": None if self.term is None else str(self.term),
            "devices": list(self.devices),
            "holders": list(self.holders),
            "filter": self.filter or None,
        }


class Verdict(Value):
    """Whether a request fits, and the reasons.

    Attributes:
        request: The request.
        fits_now: Whether the request would be served now.
        ever_fits: Whether the request would be served on a free machine.
        reasons: The obstacles; empty when the request fits now.
        nearest: The nearest request that this machine can ever serve; None without one, and for a request that fits.
        nearest_now: The nearest request that can be served now; None likewise.
        ways_out: Ways out of the obstacles, a line each.
        gaps: A sentence for each access that a worker would have beyond its devices; filled by :func:`anyaccel.why`
            alone.
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
        """Whether the request runs on the CPU, since it can never fit and accepts the CPU.

        A request over a limit of its user is refused instead.
        """
        limited = any(reason.code is ReasonCode.LIMIT for reason in self.reasons)
        return self.request.else_cpu and not self.ever_fits and not limited

    @property
    def message(self) -> str:
        """The verdict in a sentence, without the way out."""
        if self.fits_now:
            return f"{self.request} fits now."
        what = "does not fit now" if self.ever_fits else "can never fit"
        why = "; ".join(dict.fromkeys(reason.message for reason in self.reasons))  # equal terms have equal reasons
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
        """Return the verdict as JSON data, with requests in the form of the grammar."""
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
