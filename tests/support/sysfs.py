"""Directories of the kernel's own, which every process of the machine can lock."""

import os
import random


def any_directories(count: int) -> list[str]:
    """Some of those of virtual devices, sorted; others each time, as another run on this machine may lock some.

    Returns:
        As many as were asked for, or fewer where the kernel shows fewer.
    """
    found = [path for path, _, _ in os.walk("/sys/devices/virtual") if len(path) < 120]
    return sorted(random.sample(found, min(count, len(found))))
