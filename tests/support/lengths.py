"""How long those tests run that could run for as long as one likes."""

import os
from typing import TypeVar

T = TypeVar("T")

_FULL = bool(os.environ.get("ANYACCEL_TEST_FULL"))
"""Read once: tests run in an environment that is cleaned of variables of ours."""


def length(short: T, full: T) -> T:
    """How much of something is tried: all of it where ``ANYACCEL_TEST_FULL`` is set, as ``.ci/run`` does."""
    return full if _FULL else short
