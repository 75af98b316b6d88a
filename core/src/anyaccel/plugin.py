"""Everything that the author of a plug-in imports, in one module."""

from anyaccel.errors import CommandTimeoutError, QueryError
from anyaccel.hookspecs import hookimpl
from anyaccel.model import (
    AGREEMENT,
    ContainerEdits,
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Health,
    Mount,
    PluginInfo,
    Product,
    Severity,
    Share,
    Stats,
    Term,
    replace,
)
from anyaccel.probe.context import CommandResult, DeviceNode, PciFunction, ProbeContext

__all__ = [
    "AGREEMENT",
    "CommandResult",
    "CommandTimeoutError",
    "ContainerEdits",
    "Detected",
    "Device",
    "DeviceNode",
    "DeviceProcess",
    "EnvContext",
    "EnvEdits",
    "Finding",
    "Fractional",
    "Health",
    "Mount",
    "PciFunction",
    "PluginInfo",
    "ProbeContext",
    "Product",
    "QueryError",
    "Severity",
    "Share",
    "Stats",
    "Term",
    "hookimpl",
    "replace",
]
