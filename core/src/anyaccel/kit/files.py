"""Reading what a machine shows when some of it may be absent, closed to this user, or not what was expected."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from anyaccel.plugin import CommandTimeoutError, ProbeContext, QueryError

PCI_DEVICES = "/sys/bus/pci/devices"
"""Directory of the PCI functions, by address."""
KERNEL_LOG_SECONDS = 2.0
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")


def text(ctx: ProbeContext, path: str) -> str:
    """Read a file that detection can do without: its text, stripped; empty when it is absent or cannot be read."""
    try:
        return (ctx.read(path) or "").strip()
    except OSError:
        return ""


def number(ctx: ProbeContext, path: str) -> int | None:
    """Read a number, decimal or ``0x`` hexadecimal; None when the file is absent, cannot be read or holds another."""
    try:
        return ctx.read_int(path)
    except OSError:
        return None


def total(ctx: ProbeContext, paths: Iterable[str]) -> int | None:
    """Add up the numbers in some files; None where there are no files, or one of them holds none."""
    found = [number(ctx, path) for path in paths]
    return sum(filter(None, found)) if found and None not in found else None


def numbered(ctx: ProbeContext, start: str) -> dict[int, str]:
    """List the paths that consist of a beginning and a number, by that number, ascending.

    ``/dev/acme`` lists ``/dev/acme0`` and ``/dev/acme10``, and leaves out ``/dev/acme0_control``.
    """
    found = ((path.removeprefix(start), path) for path in ctx.glob(f"{start}[0-9]*"))
    return dict(sorted((int(end), path) for end, path in found if re.fullmatch("[0-9]+", end)))


def asked(ctx: ProbeContext, name: str, fn: Callable[[], Any]) -> Any | None:
    """Ask what detection can do without; None where the question fails, or the machine is not this one.

    Args:
        ctx: The machine.
        name: Name of the question in recordings.
        fn: What asks it on this machine; answers in plain JSON data.
    """
    try:
        return ctx.query(name, fn)
    except QueryError:
        return None


def in_container(ctx: ProbeContext) -> bool:
    """Whether we run in a container, where PCI and sysfs show devices that belong to others."""
    return any(map(ctx.exists, _CONTAINER_FILES)) or any(map(ctx.environ.get, _CONTAINER_VARIABLES))


def physical_function(ctx: ProbeContext, address: str) -> str | None:
    """PCI address of the card of which a PCI function is a virtual one; None when it is none."""
    link = ctx.readlink(f"{PCI_DEVICES}/{address}/physfn")
    return link.rpartition("/")[2].lower() if link else None


def kernel_log(ctx: ProbeContext, pattern: str = "") -> str:
    """Read the kernel's log; empty where this user may not, or where there is no ``dmesg``.

    Args:
        ctx: The machine.
        pattern: Regular expression of the lines that count. Then no other line gets into a recording: the log names
            hosts, users and serial numbers.
    """
    if pattern:
        path, seconds = ctx.environ.get("PATH", os.defpath), min(KERNEL_LOG_SECONDS, ctx.remaining() / 2)
        try:
            return str(ctx.query(f"dmesg/{pattern}", lambda: _matching(pattern, path, seconds)))
        except QueryError as error:
            if error.kind != "NotRecorded":
                return ""
    try:  # recordings made by hand have the whole log
        result = ctx.run(["dmesg"], timeout=min(KERNEL_LOG_SECONDS, ctx.remaining() / 2))
    except (CommandTimeoutError, OSError):
        return ""
    return result.stdout if result is not None and result.returncode == 0 else ""


def _matching(pattern: str, path: str, seconds: float) -> str:
    """Ask ``dmesg`` for the lines that a pattern matches; empty when it does not answer."""
    import shutil  # loaded on a host alone: a replay runs nothing
    import subprocess

    program = shutil.which("dmesg", path=path)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=seconds,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "".join(line for line in done.stdout.splitlines(keepends=True) if re.search(pattern, line))
