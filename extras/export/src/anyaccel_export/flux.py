"""Flux: an entry of ``resource.config``, in TOML, which adds GPUs to the cores from another entry of the host.

With such a table, Flux detects nothing itself. The host's cores are left to the administrator. Flux knows cores and
GPUs only.
"""

from __future__ import annotations

from anyaccel.model import format_slots

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import only_type, quote, slug

_RESOURCE = "gpu"


def export(source: ExportSource) -> Export:
    """Write the entry, or nothing without a device that Flux would call a GPU."""
    devices = [device for device in source.devices if device.resource.lower() == _RESOURCE]
    others = sorted({device.resource for device in source.devices if device not in devices})
    notes = [f"{resource} is left out, because Flux counts no other devices than GPUs." for resource in others]
    if not devices:
        return Export(text="", notes=tuple(notes))
    # Flux passes these numbers on as masks, so they must be the vendor's own.
    indexes = sorted({device.index for device in devices})
    if len(indexes) < len(devices):  # Flux numbers the GPUs of a host in one sequence
        indexes = list(range(len(devices)))
        notes.append("The ids are positions in the list, because devices of several vendors have the same index.")
    notes.append(f"Another entry must give {source.node} its cores: with resource.config, Flux looks for none.")
    lines = ["[[resource.config]]", f"hosts = {quote(source.node)}", f"gpus = {quote(format_slots(indexes))}"]
    lines.append(f"properties = [{quote(slug(only_type(devices), 'a-z0-9_.-'))}]")
    return Export(text="".join(f"{line}\n" for line in lines), notes=tuple(notes))
