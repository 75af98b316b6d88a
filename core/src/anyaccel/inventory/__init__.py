"""The accelerators of a machine: of this host, a recorded machine or a simulated machine."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.inventory.answers": "VendorNames interpret",
        "anyaccel.inventory.contested": "contest families places",
        "anyaccel.inventory.current": "ALLOCATION_VARIABLE LEASE_VARIABLE",
        "anyaccel.inventory.declared": "find_named",
        "anyaccel.inventory.observe": "stats",
        "anyaccel.inventory.record": "EXPECTED expect verify write_json",
    },
)
