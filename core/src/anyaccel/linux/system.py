"""Functions of the C library, and system calls, that Python does not offer."""

from __future__ import annotations

import os
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    import signal as signal  # noqa: PLC0414 - other modules import it from here
else:
    import _signal as signal  # noqa: F401 - without enumerations, which take a hundredth of the time of detection

PIDFD_GETFD = 438
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""Numbers of system calls, the same on every architecture that Python supports."""

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVS = 38


def call(name: str, *arguments: bytes | int | None, subject: str | None = None) -> int:
    """Call a function of the C library, and return the result.

    Args:
        name: Name of the function.
        arguments: Its arguments; a number is passed as a ``long``.
        subject: A file or option for the error message.

    Raises:
        OSError: When the function returns a negative number, with the error of ``errno``.
    """
    import ctypes

    passed = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    result: int = getattr(_libc(), name)(*passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), subject)
    return result


def syscall(number: int, *arguments: bytes | int | None) -> int:
    """Call the kernel by the number of a system call, and return the result.

    Raises:
        OSError: When the kernel refuses.
    """
    return call("syscall", number, *arguments)


def prctl(option: int, value: int) -> None:
    """Call ``prctl(2)``.

    Raises:
        OSError: When the kernel refuses.
    """
    call("prctl", option, value, 0, 0, 0, subject=f"prctl({option})")


@cache
def _libc() -> ctypes.CDLL:
    import ctypes  # late: few processes need it, and the import takes several ms

    return ctypes.CDLL(None, use_errno=True)
