"""What is on a machine: this one, a recorded one or a simulated one."""

TASKS = "anyaccel.vendors.tasks"
"""The module whose functions are run guarded; named, since whoever has them run must not import it."""
