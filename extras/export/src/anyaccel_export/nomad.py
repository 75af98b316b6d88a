"""Nomad: blocks of a job's ``resources`` that ask for the devices of this machine.

Names are ``VENDOR/KIND/MODEL``, as Nomad's device plug-ins fingerprint devices; a block asks for every device of a
model.
"""

from __future__ import annotations

from collections import Counter

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import quote, slug


def export(source: ExportSource) -> Export:
    """Write a block for each model."""
    names = (f"{device.vendor}/{slug(device.kind, 'a-z0-9_-')}/{device.model}" for device in source.devices)
    counts = Counter(names)
    blocks = [f"device {_string(name)} {{\n  count = {count}\n}}\n" for name, count in counts.items()]
    return Export(text="\n".join(blocks))


def _string(text: str) -> str:
    """Write a string of HCL, where ``${`` and ``%{`` would begin a template."""
    return quote(text).replace("${", "$${").replace("%{", "%%{")
