"""What the worker that we are in holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from anyaccel.errors import UsageError
from anyaccel.launcher.environment import ALLOCATION_VARIABLE
from anyaccel.model import Allocation
from anyaccel.model.wire import decode


def current(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Say what this process was given by the launcher that started it.

    Args:
        environ: The environment to read; that of this process when None.

    Returns:
        The allocation, with its devices in the order in which the vendor's runtime numbers them here; None outside
        of a worker.

    Raises:
        UsageError: When somebody has written nonsense into ``ANYACCEL_ALLOCATION``.
    """
    text = (os.environ if environ is None else environ).get(ALLOCATION_VARIABLE)
    if not text:
        return None
    try:
        return decode(Allocation, json.loads(text))
    except ValueError as error:
        raise UsageError(f"{ALLOCATION_VARIABLE} must hold what the launcher wrote: {error}; unset it") from error
