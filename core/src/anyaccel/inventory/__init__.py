"""The accelerators of a machine: of this host, a recorded machine or a simulated machine."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.inventory.answers": ("VendorNames", "interpret"),
        "anyaccel.inventory.contested": ("contest",),
        "anyaccel.inventory.current": ("ALLOCATION_VARIABLE",),
        "anyaccel.inventory.declared": ("find_named",),
        "anyaccel.inventory.record": ("EXPECTED", "expect", "write_json"),
    },
)
