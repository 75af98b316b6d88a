"""What the author of a plug-in, or of a scheduler, needs to test without hardware. Never imported by the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping

from anyaccel.probe.context import ProbeContext
from anyaccel.probe.recording import RecordedFacts

__all__ = ["context"]


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
