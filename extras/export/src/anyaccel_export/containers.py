"""Docker and podman: the flags that give a container the devices, for engines without CDI support."""

from __future__ import annotations

from anyaccel.errors import UsageError
from anyaccel.launcher import merge_edits
from anyaccel.model import Mount

from anyaccel_export.source import Export, ExportSource, nothing_needed
from anyaccel_export.text import shell_join


def export(source: ExportSource) -> Export:
    """Write flags for ``docker run``, ``docker create`` and the same of podman, on one line.

    Raises:
        EnvConflictError: When two vendors want one variable to differ.
        UsageError: When a path or a variable cannot be written as a flag.
    """
    edits = merge_edits(source.together)
    flags = [f"--device={_path(node, ':')}" for node in edits.nodes]
    flags += [f"--group-add={group}" for group in edits.groups]
    flags += [_mount(mount) for mount in edits.mounts]
    flags += [f"--env={name}={value}" for name, value in sorted(edits.env.items())]
    if flags:  # the label shows in 'docker inspect' which devices a container has
        flags.append(f"--label=anyaccel.devices={','.join(device.id for device in source.devices)}")
    return Export(text=f"{shell_join(flags)}\n" if flags else "", notes=tuple(nothing_needed(source)))


def _mount(mount: Mount) -> str:
    fields = ["type=bind", f"source={_path(mount.source, ',')}", f"target={_path(mount.target, ',')}"]
    return "--mount=" + ",".join([*fields, "readonly"] if mount.read_only else fields)


def _path(path: str, separator: str) -> str:
    if separator in path or '"' in path:  # no escape is understood by both docker and podman
        raise UsageError(
            f"the path {path!r} cannot be a flag of docker or podman, because {separator!r} separates parts there;"
            " use 'anyaccel export cdi', which has no such limit"
        )
    return path
