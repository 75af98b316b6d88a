"""Machines without hardware, for the tests of a plug-in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from anyaccel.model import replace
from anyaccel.model.wire import encode
from anyaccel.probe.context import ProbeContext
from anyaccel.probe.loading import FILE_NAME, load
from anyaccel.probe.recording import RecordedFacts


def load_recording(directory: Path) -> dict[str, Any]:
    """Read the ``machine.json`` of a recording; it may be changed."""
    return deepcopy(load(str(directory / FILE_NAME)))


def context(
    recording: Mapping[str, object], *, environ: Mapping[str, str] | None = None, seconds: float = 10.0
) -> ProbeContext:
    """Show a plug-in the machine of a recording.

    Args:
        recording: The content of a recording's ``machine.json``.
        environ: The environment; that of the recording when None.
        seconds: Time until the deadline.
    """
    return ProbeContext(RecordedFacts(recording, environ), time.monotonic() + seconds)


def describe(plugin: Any, ctx: ProbeContext) -> dict[str, Any] | None:
    """Say what a plug-in's pure functions make of a machine, as the data of a recording's ``expected.json``.

    Returns:
        The detected devices with their tags and whether they may be shared, fields with their default left out;
        None when the vendor is not on the machine.
    """
    detected = plugin.anyaccel_detect(ctx)
    if detected is None:
        return None
    devices = tuple(
        replace(device, tags=tuple(plugin.anyaccel_tags(device)), fractional=plugin.anyaccel_fractional(device))
        for device in detected.devices
    )
    described: dict[str, Any] = encode(replace(detected, devices=devices))
    return described
