"""Nomad: blocks for a job's ``resources`` that ask for the devices of this machine.

Names are ``VENDOR/KIND/MODEL``, as Nomad's device plug-ins fingerprint them; a block asks for all devices of a model.
"""

from __future__ import annotations

from anyaccel.exports.source import Export, Source
from anyaccel.exports.text import quote, slug


def export(source: Source) -> Export:
    """Write one block for each model."""
    counts: dict[str, int] = {}
    for device in source.devices:
        name = f"{device.vendor}/{slug(device.kind, 'a-z0-9_-')}/{device.model}"
        counts[name] = counts.get(name, 0) + 1
    blocks = [f"device {_string(name)} {{\n  count = {count}\n}}\n" for name, count in counts.items()]
    return Export(text="\n".join(blocks))


def _string(text: str) -> str:
    """Write a string of HCL, where ``${`` and ``%{`` would begin a template."""
    return quote(text).replace("${", "$${").replace("%{", "%%{")
