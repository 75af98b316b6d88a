"""Apptainer: the flags that give a container the devices, for versions without CDI.

Without ``--contain`` a container sees the whole ``/dev`` of the host, so the flags begin with this option.
"""

from __future__ import annotations

import re

from anyaccel.errors import UsageError
from anyaccel.launcher import merge_edits
from anyaccel.text import shown

from anyaccel_export.source import Export, ExportSource, nothing_needed
from anyaccel_export.text import shell_join

_EVALUATED = re.compile(r"[=\"'`$\\]")
"""Special characters in a value of ``--env``: two ``=`` begin a list, and a shell in the container evaluates others."""


def export(source: ExportSource) -> Export:
    """Write flags for ``apptainer exec`` and ``apptainer run``, on one line.

    Raises:
        EnvConflictError: When two vendors want one variable to differ.
        UsageError: When a path or a value cannot be written as a flag.
    """
    edits = merge_edits(source.together)
    flags = [f"--bind={_path(node)}" for node in edits.nodes]
    flags += [
        f"--bind={_path(mount.source)}:{_path(mount.target)}{':ro' if mount.read_only else ''}"
        for mount in edits.mounts
    ]
    flags += [f"--env={name}={_value(value)}" for name, value in sorted(edits.env.items())]
    if flags:  # without a device there is no reason to change the view of /dev
        flags.insert(0, "--contain")
    notes = [*nothing_needed(source)]
    if edits.groups:  # a container without root keeps the user's groups and cannot add others
        numbers = " and ".join(map(str, edits.groups))
        notes.append(f"The devices are open to group {numbers}: the user of the container must be a member.")
    return Export(text=f"{shell_join(flags)}\n" if flags else "", notes=tuple(notes))


def _path(path: str) -> str:
    if set(path) & set(',:\\"'):
        raise UsageError(
            f"the path {shown(path)} cannot be a flag of apptainer, because ',' and ':' separate parts there",
            hint="use 'anyaccel export cdi', which has no such limit",
        )
    return path


def _value(value: str) -> str:
    # Refused, not escaped: two readers in turn would unescape, Apptainer and the shell.
    if _EVALUATED.search(value):
        raise UsageError(
            f"the value {shown(value)} cannot be a flag of apptainer, which reads quotes, '$' and '=' in it",
            hint="use 'anyaccel export cdi', which has no such limit",
        )
    return value
