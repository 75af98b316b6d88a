"""The values of anyaccel: frozen, made by keyword, without effects on the machine."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel.model.device": (
            "AGREEMENT ANY_SLOTS DIVIDED MOST_SLOTS NOTHING PCI_ADDRESS PCI_DEVICES UNITS_PER_DEVICE Allocation "
            "Detected Device Extent Fractional Gang Grant Health Product Request Share Term VisiblePart bits "
            "describe_parts find_memory format_memory format_memory_beside format_row format_share format_slots "
            "format_units join_names read_row rows_of share_table slot_mask slot_numbers slots_by_id union"
        ),
        "anyaccel.model.inventory": (
            "ContainerEdits DeviceProcess EnvContext EnvEdits Finding Inventory Mount PluginInfo Problem ProblemKind "
            "Severity Stats VendorReport VendorState parts_of"
        ),
        "anyaccel.model.labels": "MOST_LABELS read_label read_labels write_label write_labels",
        "anyaccel.model.value": "Value decode encode faults field fields hints read replace",
        "anyaccel.model.verdict": "Reason ReasonCode Verdict",
    },
)
