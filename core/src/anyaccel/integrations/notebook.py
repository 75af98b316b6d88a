"""``%load_ext anyaccel`` for IPython and Jupyter: devices for the kernel by a line magic.

%accel GPU:1          hold devices for this kernel, and show it these alone
%accel                show what the kernel holds, or else what is on the machine
%accel release        give them back
"""

from __future__ import annotations

import shlex
from typing import Any

from anyaccel.errors import AnyaccelError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.use import Use, use


class Accel:
    """The magic of one kernel, which keeps what the kernel holds."""

    def __init__(self) -> None:
        self.held: Use | None = None

    def __call__(self, line: str) -> Any:
        """Do what a line asks for.

        Args:
            line: A request, ``release``, or nothing; a request may be followed by ``--wait SECONDS``.
        """
        try:
            return self._do(shlex.split(line))
        except (AnyaccelError, ValueError) as error:  # one message, as on the command line, and no traceback
            print(f"anyaccel: {error}")
            if hint := getattr(error, "hint", ""):
                print(f"anyaccel: {hint}")
            return None

    def _do(self, words: list[str]) -> Any:
        if not words:
            return self.held if self.held is not None else detect()
        if words == ["release"]:
            self._release()
            return None
        wait = None
        if "--wait" in words:
            at = words.index("--wait")
            wait = float("".join(words[at + 1 : at + 2]))
            words = words[:at] + words[at + 2 :]
        self._release()
        self.held = use(words, wait=wait, note="notebook")
        return self.held

    def _release(self) -> None:
        if self.held is not None:
            self.held.release()
            self.held = None


def load_ipython_extension(shell: Any) -> None:
    """Give a shell of IPython the magic ``%accel``."""
    shell.register_magic_function(Accel(), magic_kind="line", magic_name="accel")
