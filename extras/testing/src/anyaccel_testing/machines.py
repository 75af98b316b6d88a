"""Machines without hardware, for the tests of a plug-in."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from anyaccel.model import Detected, encode, replace
from anyaccel.probe import FILE_NAME, ProbeContext, RecordedFacts, load


def load_recording(directory: str | Path) -> dict[str, Any]:
    """Read the ``machine.json`` of a recording, as a copy that the caller may change.

    Raises:
        MachineError: When the file is missing or damaged.
    """
    return deepcopy(load(os.path.join(directory, FILE_NAME)))


def context(
    recording: Mapping[str, object], *, environ: Mapping[str, str] | None = None, seconds: float = 10.0
) -> ProbeContext:
    """Return a context that replays a recording.

    Args:
        recording: The content of a recording's ``machine.json``.
        environ: The environment; that of the recording when None.
        seconds: Time until the deadline.
    """
    return ProbeContext(RecordedFacts(recording, environ), time.monotonic() + seconds)


def describe(plugin: Any, ctx: ProbeContext) -> dict[str, Any] | None:
    """Detect the devices of a machine, and return the data of an ``expected.json``.

    Args:
        plugin: A module or object with hooks, which may leave out arguments as they may when anyaccel calls them.
        ctx: The machine.

    Returns:
        The detected devices with their tags and whether they may be shared, fields with their default left out;
        None when the vendor is not on the machine.
    """
    detected: Detected | None = _call(plugin.anyaccel_detect, ctx=ctx)
    if detected is None:
        return None
    devices = tuple(
        replace(
            device,
            tags=tuple(_call(plugin.anyaccel_tags, device=device)),
            fractional=_call(plugin.anyaccel_fractional, device=device),
        )
        for device in detected.devices
    )
    described: dict[str, Any] = encode(replace(detected, devices=devices))
    return described


def _call(hook: Callable[..., Any], **arguments: Any) -> Any:
    """Call a hook with the arguments named in its signature."""
    return hook(**{name: arguments[name] for name in inspect.signature(hook).parameters})
