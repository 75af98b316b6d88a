"""``%load_ext anyaccel`` for IPython and Jupyter: devices for the kernel by the line magic ``%accel``."""

from __future__ import annotations

import shlex
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.use import in_use, use
from anyaccel.text import duration


def accel(line: str) -> Any:
    """Hold devices for this kernel.

    %accel GPU:1              hold a device; --wait 1m waits at most a minute
    %accel                    show what the kernel holds, or else what is on the machine
    %accel release            give it back
    """
    try:
        return _do(shlex.split(line))
    except (AnyaccelError, ValueError) as error:  # one message, as on the command line, and no traceback
        print(f"anyaccel: {error}")
        if hint := getattr(error, "hint", ""):
            print(f"anyaccel: {hint}")
        return None


def _do(words: list[str]) -> Any:
    if not words:
        return in_use() or detect()
    if words == ["release"]:
        held = in_use()  # also what a cell has taken by anyaccel.use()
        if held is not None:
            held.release()
        return None
    wait = None
    if "--wait" in words:
        at = words.index("--wait")
        try:
            wait = duration("".join(words[at + 1 : at + 2]))
        except ValueError as error:
            raise UsageError(f"--wait {error}") from None
        words = words[:at] + words[at + 2 :]
    use(words, wait=wait, note="notebook")  # a statement: nothing changes when the cell is run again
    return in_use()


def load_ipython_extension(shell: Any) -> None:
    """Give a shell of IPython the magic ``%accel``."""
    shell.register_magic_function(accel, magic_kind="line")
