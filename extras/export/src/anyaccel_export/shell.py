"""Shells: the variables that show a process the exported devices only."""

from __future__ import annotations

from anyaccel.shell import statements

from anyaccel_export.source import Export, ExportSource


def export(source: ExportSource) -> Export:
    """Write ``unset`` and ``export`` lines for a shell, as for .envrc or /etc/profile.d."""
    return Export(text=statements(source.everything.set, source.everything.unset))
