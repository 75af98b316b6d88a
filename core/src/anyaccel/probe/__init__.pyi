from anyaccel.probe import processors as processors
from anyaccel.probe.context import CommandResult as CommandResult
from anyaccel.probe.context import DeviceNode as DeviceNode
from anyaccel.probe.context import Facts as Facts
from anyaccel.probe.context import Json as Json
from anyaccel.probe.context import PciFunction as PciFunction
from anyaccel.probe.context import ProbeContext as ProbeContext
from anyaccel.probe.host import HostFacts as HostFacts
from anyaccel.probe.machine import SIMULATION as SIMULATION
from anyaccel.probe.machine import Machine as Machine
from anyaccel.probe.machine import Simulated as Simulated
from anyaccel.probe.machine import parse_machine as parse_machine
from anyaccel.probe.recording import FILE_NAME as FILE_NAME
from anyaccel.probe.recording import SCHEMA as SCHEMA
from anyaccel.probe.recording import RecordedFacts as RecordedFacts
from anyaccel.probe.recording import Recorder as Recorder
from anyaccel.probe.recording import load as load
from anyaccel.probe.recording import read_json as read_json
from anyaccel.probe.sanitize import PrivateNames as PrivateNames
from anyaccel.probe.sanitize import replace_in as replace_in

MACHINE_VARIABLE: str
HOST: str
