"""Start the interpreter that forks guarded processes, before what talks to it is imported.

Both take as long, and there may be two processors. So this imports next to nothing.
"""

from __future__ import annotations

import os
from _thread import allocate_lock

from anyaccel.interpreter import Interpreter, start
from anyaccel.linux.fork import renew_in_child, tidy_in_child

END_SECONDS = 1.0
"""How long an interpreter is waited for that may still be starting."""

_ahead: dict[tuple[str, ...], Interpreter] = {}
_lock = renew_in_child(allocate_lock())


def begin(*preload: str) -> None:
    """Start an interpreter that imports these modules, for :func:`take`; nothing happens when one has been started.

    Raises:
        OSError: When it cannot be started.
    """
    with _lock:
        if preload not in _ahead:
            _ahead[preload] = _start(preload)


def take(*preload: str) -> Interpreter:
    """The interpreter that was started ahead, which is the caller's from now on, or a new one.

    Raises:
        OSError: When it cannot be started.
    """
    with _lock:
        return _ahead.pop(preload, None) or _start(preload)


def close() -> None:
    """End what nobody has taken."""
    with _lock:
        left = [_ahead.popitem()[1] for _ in list(_ahead)]
    for interpreter in left:
        os.close(interpreter.control)
        interpreter.wait(END_SECONDS)


def _start(preload: tuple[str, ...]) -> Interpreter:
    return start("anyaccel.probe.forkserver", preload, quiet=True, first=True)


@tidy_in_child
def _forget() -> None:
    """Leave alone what belongs to the process that we are a fork of."""
    while _ahead:
        os.close(_ahead.popitem()[1].control)
