"""How facts about a machine are gathered: one gate for plug-ins, a guarded child process, record and replay."""

MACHINE_VARIABLE = "ANYACCEL_MACHINE"
"""Names the machine where no argument does."""
HOST = "host"
"""The machine that we run on."""
