"""Facts about machines: one gate for plug-ins, with recording and replay."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.probe.context": "CommandResult DeviceNode Facts Json PciFunction ProbeContext",
        "anyaccel.probe.host": "HostFacts",
        "anyaccel.probe.machine": "SIMULATION Machine Simulated parse_machine",
        "anyaccel.probe.recording": "FILE_NAME SCHEMA RecordedFacts Recorder load read_json",
        "anyaccel.probe.sanitize": "PrivateNames replace_in",
    },
)
__all__ += ["HOST", "MACHINE_VARIABLE", "processors"]

MACHINE_VARIABLE = "ANYACCEL_MACHINE"
"""The variable that names the machine where no argument does."""
HOST = "host"
"""Name of this host."""
