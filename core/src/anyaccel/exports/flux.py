"""Flux: an entry of ``resource.config``, in TOML, which adds GPUs to the cores that another entry gives the host.

Where there is such a table, Flux looks for nothing by itself. The host's cores are not ours to count. Flux knows cores
and GPUs only.
"""

from __future__ import annotations

from anyaccel.exports.source import Export, ExportSource
from anyaccel.exports.text import only_type, quote, slug
from anyaccel.model import format_slots

_RESOURCE = "gpu"


def export(source: ExportSource) -> Export:
    """Write the entry, or nothing where there is no device that Flux would call a GPU."""
    devices = [device for device in source.devices if device.resource.lower() == _RESOURCE]
    others = sorted({device.resource for device in source.devices if device not in devices})
    notes = [f"{resource} is left out, because Flux counts no other devices than GPUs." for resource in others]
    if not devices:
        return Export(text="", notes=tuple(notes))
    indexes = sorted({device.index for device in devices})
    if len(indexes) < len(devices):
        indexes = list(range(len(devices)))
        notes.append("The ids are positions in the list, because devices of several vendors have the same index.")
    notes.append(f"Another entry must give {source.node} its cores: with resource.config, Flux looks for none.")
    lines = ["[[resource.config]]", f"hosts = {quote(source.node)}", f"gpus = {quote(format_slots(indexes))}"]
    lines.append(f"properties = [{quote(slug(only_type(devices), 'a-z0-9_.-'))}]")
    return Export(text="".join(f"{line}\n" for line in lines), notes=tuple(notes))
