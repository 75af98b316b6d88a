"""The values of anyaccel: frozen, made by keyword, without effects on the machine."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.model._value": ("Value", "field", "replace"),
        "anyaccel.model.allocation": ("AGREEMENT", "Allocation", "EnvContext", "EnvEdits", "Gang", "Grant", "Share"),
        "anyaccel.model.device": (
            "ANY_SLOTS",
            "DIVIDED",
            "NOTHING",
            "UNITS_PER_DEVICE",
            "Detected",
            "Device",
            "Extent",
            "Fractional",
            "Health",
            "Product",
            "VisiblePart",
            "format_slots",
            "join_names",
            "slot_mask",
            "slot_numbers",
            "slots_by_id",
        ),
        "anyaccel.model.inventory": ("Inventory", "VendorReport", "VendorState", "parts_of"),
        "anyaccel.model.labels": ("write_labels",),
        "anyaccel.model.plugin": (
            "ContainerEdits",
            "DeviceProcess",
            "Finding",
            "Mount",
            "PluginInfo",
            "Problem",
            "ProblemKind",
            "Severity",
            "Stats",
        ),
        "anyaccel.model.request": (
            "Request",
            "Term",
            "describe_parts",
            "find_memory",
            "format_memory",
            "format_memory_beside",
            "format_share",
            "format_units",
        ),
        "anyaccel.model.wire": ("decode", "encode"),
    },
)
