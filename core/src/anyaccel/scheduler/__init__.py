"""Scheduling: the grammar of requests, placement, the queue and reasons."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.model.verdict": "Reason ReasonCode Verdict",
        "anyaccel.scheduler.allocator": "Fleet RequestLike Scheduler",
        "anyaccel.scheduler.books": "Books HeldAllocation RequestPlan",
        "anyaccel.scheduler.chosen": "facts shared_facts",
        "anyaccel.scheduler.demand": "Demand",
        "anyaccel.scheduler.filters": "FILTERS asked asked_memory goes_by rules serves",
        "anyaccel.scheduler.grammar": "parse_request",
        "anyaccel.scheduler.limits": "apply_limits",
        "anyaccel.scheduler.placement": "Choice NameRegistry Validate choose_slots extent_of share with_units",
        "anyaccel.scheduler.ticket": "Ticket notify",
    },
)
