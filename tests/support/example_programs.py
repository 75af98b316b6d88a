"""The programs of ``examples/``, and waiting for what they do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 240.0
T = TypeVar("T")


def until(condition: Callable[[], T], what: str) -> T:
    """Wait for something to become true; what it returned."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found
