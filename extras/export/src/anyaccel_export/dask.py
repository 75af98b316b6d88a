"""Dask: a shell script that starts a worker with fitting variables and resources for each device.

Dask counts resources per worker process and sets no variable, so a worker must start with the right variables.
"""

from __future__ import annotations

from anyaccel.model import Device
from anyaccel.shell import shell_quote

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import assignments, comment, slug

_SCRIPT = """\
#!/bin/sh
# {machine}: written by anyaccel export dask.
# Usage: sh FILE SCHEDULER [OPTION OF 'dask worker' ...], for example sh FILE tcp://10.0.0.1:8786 --no-dashboard
scheduler=${{1:?the address of the Dask scheduler, such as tcp://10.0.0.1:8786}}
shift
workers=
trap 'kill $workers 2>/dev/null' INT TERM
{workers}wait
wait  # the first is cut short by a signal; the workers then end by themselves
"""
_WORKER = """\
env {environment} \\
  dask worker "$scheduler" --name {name} --nthreads 1 --resources {resources} "$@" &
workers="$workers $!"
"""


def export(source: ExportSource) -> Export:
    """Write the script.

    Raises:
        UsageError: When the value of a variable is not printable.
    """
    workers = "".join(_worker(source, device) for device in source.devices)
    return Export(text=_SCRIPT.format(machine=comment(source.inventory.machine), workers=workers))


def _worker(source: ExportSource, device: Device) -> str:
    # A resource may be asked for by kind or by type, and each worker has one device: 1 of both.
    names = [slug(name, "A-Za-z0-9._-") for name in dict.fromkeys((device.resource, device.type))]
    return _WORKER.format(
        environment=assignments(source.environments[device.id]),
        name=shell_quote(f"{slug(source.node, 'A-Za-z0-9._-')}-{device.vendor}-{device.index}"),
        resources=shell_quote(" ".join(f"{name}=1" for name in names)),
    )
