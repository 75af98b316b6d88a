"""Ray: labels, quantities and variables of nodes, and the export targets."""

from anyaccel._faces import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "anyaccel_export.ray.labels": (
            "MIXED PREDEFINED PREFIX TYPE_PREFIX UNIT_VARIABLE label_name label_value mask_switch node_labels "
            "node_resources own_unit_instances slice_label slice_labels slice_resources type_label unit_instances"
        ),
        "anyaccel_export.ray.node": "RayNode countable describe",
        "anyaccel_export.text": "by_resource",
        "anyaccel_export.ray.targets": "command kuberay node_type",
    },
)
