"""The values of anyaccel: frozen, made by keyword, without effects on the machine."""

from anyaccel.model._value import Value, field, replace
from anyaccel.model.allocation import AGREEMENT, Allocation, EnvContext, EnvEdits, Gang, Grant, Share
from anyaccel.model.device import (
    UNITS_PER_DEVICE,
    Detected,
    Device,
    Fractional,
    Health,
    Product,
    VisiblePart,
    slots_by_id,
)
from anyaccel.model.extent import ANY_SLOTS, DIVIDED, NOTHING, Extent, format_slots, join_names, slot_mask, slot_numbers
from anyaccel.model.inventory import Inventory, VendorReport, VendorState, parts_of
from anyaccel.model.labels import write_labels
from anyaccel.model.observation import (
    ContainerEdits,
    DeviceProcess,
    Finding,
    Mount,
    Severity,
    Stats,
)
from anyaccel.model.plugin import PluginInfo, Problem, ProblemKind
from anyaccel.model.request import (
    Request,
    Term,
    describe_parts,
    find_memory,
    format_memory,
    format_memory_beside,
    format_share,
    format_units,
)
from anyaccel.model.wire import decode, encode

__all__ = [
    "AGREEMENT",
    "ANY_SLOTS",
    "DIVIDED",
    "NOTHING",
    "UNITS_PER_DEVICE",
    "Allocation",
    "ContainerEdits",
    "Detected",
    "Device",
    "DeviceProcess",
    "EnvContext",
    "EnvEdits",
    "Extent",
    "Finding",
    "Fractional",
    "Gang",
    "Grant",
    "Health",
    "Inventory",
    "Mount",
    "PluginInfo",
    "Problem",
    "ProblemKind",
    "Product",
    "Request",
    "Severity",
    "Share",
    "Stats",
    "Term",
    "Value",
    "VendorReport",
    "VendorState",
    "VisiblePart",
    "decode",
    "describe_parts",
    "encode",
    "field",
    "find_memory",
    "format_memory",
    "format_memory_beside",
    "format_share",
    "format_slots",
    "format_units",
    "join_names",
    "parts_of",
    "replace",
    "slot_mask",
    "slot_numbers",
    "slots_by_id",
    "write_labels",
]
