"""Who gets which device: the grammar of requests, placement, the queue and the reasons."""

from anyaccel.scheduler.allocator import RequestLike
from anyaccel.scheduler.choice import Choice
from anyaccel.scheduler.demand import Demand
from anyaccel.scheduler.fleet import Fleet
from anyaccel.scheduler.grammar import parse_request
from anyaccel.scheduler.placement import Validate
from anyaccel.scheduler.reasons import Reason, ReasonCode, Verdict
from anyaccel.scheduler.scheduler import Scheduler
from anyaccel.scheduler.ticket import Ticket

__all__ = [
    "Choice",
    "Demand",
    "Fleet",
    "Reason",
    "ReasonCode",
    "RequestLike",
    "Scheduler",
    "Ticket",
    "Validate",
    "Verdict",
    "parse_request",
]
