"""What is on a machine: this one, a recorded one or a simulated one."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.inventory.record": ("EXPECTED", "write_expected"),
    },
)
