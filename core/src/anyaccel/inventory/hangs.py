"""Vendors whose detection hung less than a minute ago: commands do not wait for these again.

Without this memory, each command on the host would wait for the whole time limit. The memory is a file below the user's
cache directory. Only the user's own file in the user's own directory counts, since an entry hides a vendor.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

from anyaccel.configuration import user_directory
from anyaccel.model import Problem, ProblemKind, Value, decode, encode, replace
from anyaccel.vendors import DENY_VARIABLE, Source, make_problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.vendors import Outcome  # 'anyaccel' alone calls no vendor process through it

MEMORY_SECONDS = 60.0
"""How long a hang counts."""
_LARGEST = 1 << 16


class Hang(Value):
    """A detection that exceeded its time limit.

    Attributes:
        vendor: Key of the vendor.
        seconds: The time limit.
        since: Time of the end of the detection, in seconds since 1970.
        reason: Reason of the problem.
    """

    vendor: str
    seconds: float
    since: float
    reason: str


def recall(sources: Sequence[Source], seconds: float, environ: Mapping[str, str]) -> dict[str, Problem]:
    """Return the problems of vendors that would exceed a time limit again.

    Args:
        sources: The plug-ins.
        seconds: The time limit. A vendor that hung for less is asked again, and so is one whose plug-in has changed.
        environ: The environment, which names the cache directory.
    """
    now, found = time.time(), {}
    by_vendor = {source.vendor: source for source in sources}
    for hang in _read(environ):
        source = by_vendor.get(hang.vendor)
        age, began = now - hang.since, hang.since - hang.seconds
        # A negative age: the clock was set back.
        if source and 0 <= age < MEMORY_SECONDS and seconds <= hang.seconds and _find_change(source) < began:
            reason = f"{hang.reason.rstrip('.')} {age:.0f} s ago, so it is not asked again for a minute."
            problem = make_problem(source, ProblemKind.TIMEOUT, reason, "anyaccel_detect")
            way_out = f"'anyaccel doctor' asks at once, and {DENY_VARIABLE}={source.vendor} leaves the vendor out."
            found[source.vendor] = replace(problem, next_step=way_out)
    return found


def remember(outcomes: Mapping[str, tuple[Source, Outcome]], seconds: float, environ: Mapping[str, str]) -> None:
    """Store which vendors hung, and forget the hangs of vendors that answered.

    Args:
        outcomes: Outcomes of a detection of the host, by vendor.
        seconds: Time limit of the detection.
        environ: The environment, which names the cache directory.
    """
    known = _read(environ)
    hung = [
        Hang(vendor=vendor, seconds=seconds, since=time.time(), reason=outcome.reason)
        for vendor, (_, outcome) in outcomes.items()
        if outcome.fault == "timeout"
    ]
    kept = [hang for hang in known if hang.vendor not in outcomes and 0 <= time.time() - hang.since < MEMORY_SECONDS]
    path = _path(environ)
    if path and (hung or len(kept) < len(known)):
        from anyaccel.linux.files import write_whole

        with contextlib.suppress(OSError):  # a full disk, or another command that writes: the next one remembers
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            write_whole(path, json.dumps(encode([*kept, *hung])), 0o600)


def _path(environ: Mapping[str, str]) -> str:
    """Return the path of the file; empty without a cache directory of this user."""
    directory = user_directory("XDG_CACHE_HOME", ".cache", environ)
    # Under sudo, the directory may belong to another user.
    return f"{directory}/hangs.json" if directory and "SUDO_UID" not in environ else ""


def _read(environ: Mapping[str, str]) -> tuple[Hang, ...]:
    path = _path(environ)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return ()
            return tuple(decode(Hang, each) for each in json.loads(file.read(_LARGEST)))
    except (OSError, ValueError, TypeError, RecursionError):  # no file, or a damaged one
        return ()


def _find_change(source: Source) -> float:
    """Return the time of the last change of a plug-in's module, in seconds since 1970; 0 if unknown."""
    name = source.target.partition(":")[0].partition(".")[0]
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)  # imports nothing
    origin = next((spec.origin for spec in specs if spec), None)
    try:
        return os.stat(origin or "").st_mtime
    except OSError:
        return 0.0
