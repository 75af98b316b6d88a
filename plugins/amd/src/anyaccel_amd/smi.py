"""The ``amdsmi`` library, asked in a process of its own.

The library may print, hang on a mutex of a dead process, crash, or end its process; together with PyTorch in one
process it finds no device or frees memory twice (pytorch/pytorch#186516, ROCm/TheRock#4476). So this module never
imports it: a fresh interpreter runs ``smi_child.py`` and answers in JSON, and each failure becomes an exception.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from anyaccel.kit import warn
from anyaccel.plugin import CommandTimeoutError, Finding, ProbeContext, QueryError

CHILD = os.path.join(os.path.dirname(__file__), "smi_child.py")
NOT_INSTALLED = ("ModuleNotFoundError", "NotRecorded", "NotThisMachine")
"""Kinds of QueryError for a missing library."""
SHARE_OF_TIME = 0.5
"""Part of the remaining time for the library: the facts of sysfs must not be lost with it."""


def ask(ctx: ProbeContext, question: str) -> list[dict[str, Any]]:
    """Ask the library for the ``names`` or ``metrics`` of its devices, each with its ``bdf``.

    Raises:
        QueryError: The kind is the library's exception, with its error code; SmiDiedError if the library ended its
            process, SmiTimeoutError if it did not answer in time, one of :data:`NOT_INSTALLED` if it is missing.
    """
    answer: list[dict[str, Any]] = ctx.query(f"amdsmi/{question}", lambda: _ask(ctx, question))
    return answer


def _ask(ctx: ProbeContext, question: str) -> Any:
    import importlib.util  # loaded for the library only: a replay asks none
    import json

    if importlib.util.find_spec("amdsmi") is None:
        raise ModuleNotFoundError("the package amdsmi is not installed")
    seconds = ctx.remaining() * SHARE_OF_TIME
    try:
        # -P: the directory of the script must not become a place to import from.
        result = ctx.run([sys.executable, "-P", CHILD, question], timeout=seconds)
    except CommandTimeoutError:
        raise _error(
            "SmiTimeoutError",
            f"amdsmi did not answer within {seconds:.1f} s; when a killed process left its mutex behind, remove"
            " /dev/shm/rocm_smi* while no other program uses it (ROCm/rocm_smi_lib#88)",
        ) from None
    if result is None:
        raise _error("SmiDiedError", f"amdsmi cannot be asked: the interpreter {sys.executable} is gone")
    try:
        reply = json.loads(result.stdout)
    except ValueError:
        status, last = result.returncode, result.stderr.strip().rpartition("\n")[2]
        how = f"with signal {-status}" if status < 0 else f"with status {status}"
        raise _error("SmiDiedError", f"amdsmi ended its process {how}{': ' + last if last else ''}") from None
    if "error" in reply:
        raise _error(**reply["error"])
    return reply["value"]


def _error(kind: str, message: str, value: object = None) -> Exception:
    """Build an exception with a recordable name, such as the library's own, and its error code."""
    error: Exception = type(kind, (RuntimeError,), {"value": value})(message)
    return error


def faults(ctx: ProbeContext) -> Iterator[Finding]:
    """Yield findings on an installed library that fails."""
    try:
        ask(ctx, "names")
    except QueryError as error:
        if error.kind in ("KeyError", "AttributeError"):
            yield warn(
                f"the Python package amdsmi is installed and cannot load ROCm's libamd_smi.so ({error.kind}: {error});"
                " anyaccel works without it, and programs that import it, Ray 2.60 among them, may not start",
                "pip uninstall amdsmi, or install the version that belongs to the installed ROCm",
            )
        elif error.kind not in NOT_INSTALLED:
            reason = f"the library amdsmi does not answer ({error.kind}: {error})"
            yield warn(reason, "run 'amd-smi list' to see what it says; anyaccel works without it")
