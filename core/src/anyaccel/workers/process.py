"""What the kernel is told about our processes, beyond what Python's ``os`` knows."""

from __future__ import annotations

import ctypes
import os
import stat

from anyaccel.ledger.process import prctl

_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36
_HARMLESS_MAJORS = {1, 4, 5, 136, 137, 138, 139, 140, 141, 142, 143}
"""Memory, consoles and terminals: all other character devices are hardware."""

_MEMORY = ("/dev/shm/", "/dev/zero")  # noqa: S108 - nothing is written there


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none of them escapes."""
    prctl(_SET_CHILD_SUBREAPER, 1)


def touched_devices() -> list[str]:
    """Hardware that this process has open or mapped, by path: a fork would share it with the child."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) not in _HARMLESS_MAJORS:
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    return sorted(found | {path for path in _mapped() if path.startswith("/dev/") and not path.startswith(_MEMORY)})


def threads() -> list[str]:
    """Names of the threads of this process, the first one first."""
    found = []
    for thread in sorted(map(int, os.listdir("/proc/self/task"))):
        with open(f"/proc/self/task/{thread}/comm") as file:
            found.append(file.read().strip())
    return found


def _mapped() -> set[str]:
    with open("/proc/self/maps") as file:
        return {line[line.index("/") :].strip() for line in file if "/" in line}


def set_name(name: str) -> None:
    """Be called so in lists of processes."""
    text = ctypes.create_string_buffer(name.encode())  # which must live until the kernel has read it
    prctl(_SET_NAME, ctypes.addressof(text))
