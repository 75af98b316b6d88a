"""Scheduling: the grammar of requests, placement, the queue and reasons."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.scheduler.allocator": ("RequestLike",),
        "anyaccel.scheduler.choice": ("Choice", "extent_of", "share"),
        "anyaccel.scheduler.demand": ("Demand",),
        "anyaccel.scheduler.filters": ("asked", "facts", "shared_facts"),
        "anyaccel.scheduler.grammar": ("parse_request",),
        "anyaccel.scheduler.names": ("goes_by",),
        "anyaccel.scheduler.placement": ("Validate", "choose_slots", "with_units"),
        "anyaccel.model.verdict": ("Reason", "ReasonCode", "Verdict"),
        "anyaccel.scheduler.scheduler": ("Fleet", "Scheduler"),
        "anyaccel.scheduler.serving": ("rules", "serves"),
        "anyaccel.scheduler.ticket": ("Ticket",),
    },
)
