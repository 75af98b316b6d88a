"""Kubernetes: the objects of a driver for dynamic resource allocation on a node."""

from __future__ import annotations

from anyaccel_export.slices import MOST_BYTES, Features, Obstacle, device_classes, fits, list_facts, make_slices
from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import slug, to_yaml


def export(source: ExportSource) -> Export:
    """Write ResourceSlices and DeviceClasses, as documents of one YAML stream.

    The slices serve any cluster: unusable devices are left out, and of a device and its parts the parts.
    """
    unusable = {each.id: Obstacle(kind="unhealthy") for each in source.inventory.devices if not each.usable}
    documents = make_slices(
        source.inventory,
        slug(source.node, "a-z0-9.-"),
        obstacles=unusable,
        facts=source.facts,
        features=Features(taints=False, counters=False),
    )
    if source.devices:
        documents += device_classes({device.type: device.resource for device in source.devices})
    notes = [
        f"Attributes longer than {MOST_BYTES} bytes are left out, such as {key} of {device.id}."
        for device in source.devices
        for key, value in list_facts(device, source.facts.get(device.id, {}))
        if value != "" and not fits(value)
    ]
    text = "---\n".join(to_yaml(document) for document in documents)
    return Export(text=text, notes=tuple(dict.fromkeys(notes)))
