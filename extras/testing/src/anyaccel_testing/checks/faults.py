"""C10 to C12: unreadable files, missing tools and hanging tools never make devices vanish silently."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from anyaccel.errors import CommandTimeoutError, PluginError
from anyaccel.model import Detected, Health
from anyaccel.probe import CommandResult, ProbeContext, RecordedFacts

from anyaccel_testing.check import CheckFailed, demand
from anyaccel_testing.subject import SECONDS, Subject, TestedMachine

MOST_FAULTS = 40
"""Limit of faults tried on a machine, each alone."""
EFFORT = 6_000
"""Limit of faults times recorded paths on a machine: each fault copies and detects the whole machine."""
MOST_COMMANDS = 200
DETECT = "anyaccel_detect"

Recording = dict[str, Any]


def check_unreadable(subject: Subject, machine: TestedMachine) -> None:
    """C10: A file or node without permission makes detection partial or failed, or a device unhealthy."""
    demand(_find_losses(subject, machine, list(_deny_paths(machine.recording))))


def _deny_paths(recording: Recording) -> Iterator[tuple[str, Recording]]:
    paths = recording.get("paths", {})
    for path in _sort_by_kind([path for path, entry in paths.items() if entry.keys() & {"text", "char", "block"}]):
        entry = paths[path]
        denied = {"errno": "EACCES"} if "text" in entry else {**entry, "access": ""}
        yield f"when {path} cannot be opened", {**recording, "paths": {**paths, path: denied}}


def _sort_by_kind(paths: Sequence[str]) -> list[str]:
    """Sort paths so that each kind comes first; paths of a kind differ only in numbers."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", path), []).append(path)
    # The first and the last of a kind: a loop that ends at the first fault treats them differently.
    ends = [kind[0] for kind in kinds.values()] + [kind[-1] for kind in kinds.values() if len(kind) > 1]
    return ends + [path for path in paths if path not in set(ends)]


def check_missing(subject: Subject, machine: TestedMachine) -> None:
    """C11: Devices do not vanish silently when the vendor's tool or library is missing or fails."""
    recording, devices = machine.recording, machine.devices
    if not devices:
        return
    # Unlike in _find_losses, fewer devices with a note are right here: PCI alone cannot tell partitions.
    silent = []
    for what, changed in _remove_tools(recording):
        found = _detect_changed(subject, machine, changed)
        if isinstance(found, Detected) and (found.devices or found.partial or found.notes):
            continue
        if not isinstance(found, str):
            answer = "None" if found is None else "no device"
            silent.append(f"{what}, {DETECT} returns {answer} for {len(devices)} devices; raise, or say so in notes")
    demand([*silent, *_find_losses(subject, machine, list(_break_tools(recording)))])


def _remove_tools(recording: Recording) -> Iterator[tuple[str, Recording]]:
    queries = recording.get("queries", {})
    yield "when the vendor's tools are not installed", {**recording, "commands": []}
    for kind, message in (
        ("ModuleNotFoundError", "No module named 'vendor'"),
        ("OSError", "libvendor.so.1: cannot open shared object file: No such file or directory"),
    ):
        error = {"error": {"kind": kind, "message": message}}
        # Libraries fail in two ways: the Python package is missing, or its shared library is.
        changed = {**recording, "commands": [], "queries": dict.fromkeys(queries, error)}
        yield f"when the vendor's tools and library are missing ({kind})", changed


def _break_tools(recording: Recording) -> Iterator[tuple[str, Recording]]:
    """Yield recordings with one failing command or query each."""
    commands, queries = recording.get("commands", []), recording.get("queries", {})
    broken = {
        "fails": {"returncode": 1, "stdout": "", "stderr": "error: cannot talk to the driver\n"},
        "prints nothing": {"returncode": 0, "stdout": "", "stderr": ""},
        "prints junk": {"returncode": 0, "stdout": "<html>\0\x1b[31m503</html>\n", "stderr": ""},
    }
    for position, command in enumerate(commands):
        for how, result in broken.items():
            changed = [*commands]
            changed[position] = {"argv": command["argv"], **result}
            yield f"when '{' '.join(command['argv'])}' {how}", {**recording, "commands": changed}
    error = {"error": {"kind": "RuntimeError", "message": "the driver does not answer"}}
    for name, answer in queries.items():
        if "error" not in answer:
            yield f"when the query {name!r} fails", {**recording, "queries": {**queries, name: error}}


class EndlessError(BaseException):
    """Raised to stop an endless hook; derives from BaseException to pass ``except Exception``."""


class HangingTools(RecordedFacts):
    """A recorded machine with hanging tools and a virtual clock, which only a time-out advances."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.now = 0.0
        self.hung: list[tuple[str, ...]] = []
        self.programs = {entry["argv"][0] for entry in recording.get("commands", [])}

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        """Advance the clock by the time-out, and raise."""
        # A program that the recording lacks is not installed there: it cannot hang.
        if argv[0] not in self.programs:
            return super().run(argv, timeout)
        if len(self.hung) >= MOST_COMMANDS:
            raise EndlessError
        self.hung.append(tuple(argv))
        self.now += timeout
        raise CommandTimeoutError(f"{argv[0]} did not end within {timeout:.1f} s and was killed")


class VirtualTime(ProbeContext):
    """A context on the virtual clock of a machine with hanging tools."""

    def __init__(self, facts: HangingTools) -> None:
        super().__init__(facts, time.monotonic() + SECONDS)
        self._machine = facts

    def remaining(self) -> float:
        """Return the seconds left on the virtual clock."""
        return max(0.0, SECONDS - self._machine.now)


def check_hanging(subject: Subject, machine: TestedMachine) -> None:
    """C12: A hanging tool is run once, and devices do not vanish silently."""
    facts = HangingTools(machine.recording)
    try:
        losses = list(_find_losses(subject, machine, [("when the vendor's tools hang", facts)]))
    except EndlessError:
        raise CheckFailed(f"{DETECT} runs commands that hang for ever; stop after the first time-out") from None
    repeated = [" ".join(argv) for argv in dict.fromkeys(facts.hung) if facts.hung.count(argv) > 1]
    again = (f"{DETECT} runs '{argv}' again after it has hung; take what it would say as unknown" for argv in repeated)
    demand([*losses, *again])


def _find_losses(
    subject: Subject, machine: TestedMachine, faults: Sequence[tuple[str, Recording | HangingTools]]
) -> Iterator[str]:
    """Yield the faults after which devices vanish silently."""
    before = machine.detected
    if before is None or not before.devices:
        return
    paths = len(machine.recording.get("paths", {}))
    for what, changed in faults[: max(4, min(MOST_FAULTS, EFFORT // (paths + 1)))]:
        found = _detect_changed(subject, machine, changed)
        reason = _describe_loss(before, found)
        if reason:
            yield f"{what}, {reason}; raise, set partial, or list the device as unhealthy"


def _describe_loss(before: Detected, found: Detected | str | None) -> str:
    if isinstance(found, str):  # detection failed, which is not silent
        return ""
    if found is None:
        return "the vendor counts as absent"
    unhealthy = [_count_unhealthy(answer) for answer in (before, found)]
    if len(found.devices) >= len(before.devices) or found.partial or unhealthy[1] > unhealthy[0]:
        return ""
    return f"{len(found.devices)} of {len(before.devices)} devices are left"


def _count_unhealthy(detected: Detected) -> int:
    return sum(device.health is Health.UNHEALTHY for device in detected.devices)


def _detect_changed(
    subject: Subject, machine: TestedMachine, changed: Recording | HangingTools
) -> Detected | str | None:
    """Detect on a changed machine; return the reason if detection fails."""
    if isinstance(changed, HangingTools):
        context: ProbeContext = VirtualTime(changed)
    else:
        context = machine.context(RecordedFacts(changed))
    try:
        found: Detected | None = subject.plugin.detect(context)
    except PluginError as error:
        return error.problem.reason
    return found
