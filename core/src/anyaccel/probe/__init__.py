"""Facts about machines: one gate for plug-ins, with recording and replay."""

from anyaccel._faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.probe.context import CommandResult as CommandResult
    from anyaccel.probe.context import Facts as Facts
    from anyaccel.probe.context import Json as Json
    from anyaccel.probe.context import ProbeContext as ProbeContext
    from anyaccel.probe.host import HostFacts as HostFacts
    from anyaccel.probe.machine import Machine as Machine
    from anyaccel.probe.machine import Simulated as Simulated
    from anyaccel.probe.machine import parse_machine as parse_machine
    from anyaccel.probe.recording import FILE_NAME as FILE_NAME
    from anyaccel.probe.recording import SCHEMA as SCHEMA
    from anyaccel.probe.recording import RecordedFacts as RecordedFacts
    from anyaccel.probe.recording import load as load
    from anyaccel.probe.recording import read_json as read_json
else:
    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "anyaccel.probe.context": ("CommandResult", "Facts", "Json", "ProbeContext"),
            "anyaccel.probe.host": ("HostFacts",),
            "anyaccel.probe.machine": ("Machine", "Simulated", "parse_machine"),
            "anyaccel.probe.recording": ("FILE_NAME", "SCHEMA", "RecordedFacts", "load", "read_json"),
        },
    )
    __all__ += ["HOST", "MACHINE_VARIABLE", "processors"]

MACHINE_VARIABLE = "ANYACCEL_MACHINE"
"""The variable that names the machine where no argument does."""
HOST = "host"
"""Name of this host."""
