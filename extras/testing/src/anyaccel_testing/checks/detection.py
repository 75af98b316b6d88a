"""C06 to C09: detection says what is there, the same each time, by names that stay."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from anyaccel.errors import MachineError, PluginError
from anyaccel.model import Detected, Device, ProblemKind, encode, replace
from anyaccel.probe import SCHEMA, Json, RecordedFacts, read_json

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.subject import LIVE, Subject, TestedMachine
from anyaccel_testing.watch import foreign_modules

EXPECTED = "expected.json"
SHUFFLES = 3
DETECT = "anyaccel_detect"


class EmptyMachine(RecordedFacts):
    """A machine without anything on it, that remembers which questions it was asked."""

    def __init__(self) -> None:
        super().__init__({"schema": SCHEMA})
        self.asked: list[str] = []

    def query(self, name: str, fn: Callable[[], Json]) -> Json:
        """Remember the question; there is no answer."""
        self.asked.append(name)
        return super().query(name, fn)


class Shuffled(RecordedFacts):
    """A recorded machine whose directories list their entries in any order."""

    def __init__(self, recording: dict[str, Any], seed: int) -> None:
        super().__init__(recording)
        self._random = random.Random(seed)  # noqa: S311 - the same order each time

    def glob(self, pattern: str) -> list[str]:
        """List in any order."""
        found = super().glob(pattern)
        self._random.shuffle(found)
        return found


def absent(subject: Subject) -> None:
    """C06: On a machine without a trace of the vendor, the answer is None and nothing is loaded."""
    plugin, facts, machine = subject.plugin, EmptyMachine(), TestedMachine(subject)
    before = set(sys.modules)
    try:
        found = plugin.detect(machine.context(facts))
    except PluginError as error:
        raise CheckFailed(
            f"{DETECT} must return None on an empty machine: {error.problem.reason}; look for files or PCI ids first"
        ) from error
    if found is not None:
        raise CheckFailed(f"{DETECT} must return None on an empty machine (got {found!r:.120})")
    loaded = foreign_modules(set(sys.modules) - before, subject.source)
    demand(
        [
            *(f"{DETECT} asks {name!r} on an empty machine; look for files or PCI ids first" for name in facts.asked),
            *(f"{DETECT} imports {name} on an empty machine; import it inside ctx.query" for name in loaded),
        ]
    )


def expected(subject: Subject, machine: TestedMachine) -> None:
    """C07: A recorded machine gives the inventory that lies beside it."""
    if subject.live:
        with open(os.path.join(machine.path, LIVE), encoding="utf-8") as file:
            _compare_ids(json.load(file), _described(subject, machine))
        return
    wanted, fails = _wanted(subject, machine)
    try:
        found = _described(subject, machine)
    except CheckFailed:
        if fails:
            return
        raise
    if fails:
        raise CheckFailed(f"{EXPECTED} says that detection fails here (got {found!r:.120}); correct one of the two")
    demand(differences(_sorted(wanted), _sorted(found), "the inventory"))


def _wanted(subject: Subject, machine: TestedMachine) -> tuple[Any, bool]:
    """What a recording's ``expected.json`` says of the vendor, and whether it says that detection fails.

    The file holds what ``anyaccel_testing.describe`` returns, or what ``anyaccel record`` writes for all vendors.
    """
    path = os.path.join(machine.path, EXPECTED)
    try:
        wanted = read_json(path, "")
    except MachineError as error:
        raise CheckFailed(
            f"{error}: write it with 'anyaccel check {subject.source.vendor} --write-expected', and compare what it"
            " says with what the vendor's own tool says of that machine"
        ) from error
    if not isinstance(wanted, dict) or "vendors" not in wanted:
        return wanted, False
    vendor = subject.source.vendor
    return wanted["vendors"].get(vendor), vendor in wanted.get("failed", {})


def _sorted(described: Any) -> Any:
    """Put the devices in the order of their indexes: detection may return them in any."""
    if not isinstance(described, dict) or not isinstance(described.get("devices"), list):
        return described
    return {**described, "devices": sorted(described["devices"], key=lambda device: str(device.get("index")))}


def _described(subject: Subject, machine: TestedMachine) -> Any:
    plugin = subject.plugin
    try:
        detected = plugin.detect(machine.replay())
    except PluginError as error:
        if error.problem.kind is ProblemKind.CONTRACT:
            raise NotApplicable(f"what {DETECT} returns breaks the contract; see C09") from error
        raise CheckFailed(f"{DETECT}: {error.problem.reason}") from error
    if detected is None:
        return None
    try:
        devices = tuple(
            replace(device, tags=plugin.tags(device), fractional=plugin.fractional(device))
            for device in detected.devices
        )
    except PluginError as error:
        raise NotApplicable("the tags or shares of a device fail; see C15") from error
    return encode(replace(detected, devices=devices))


def _compare_ids(live: Any, replayed: Any) -> None:
    ids = [sorted(device["id"] for device in answer["devices"]) if answer else None for answer in (live, replayed)]
    if ids[0] != ids[1]:
        raise CheckFailed(
            f"a replay must give what the machine itself gave (got {ids[1]} for {ids[0]}): ask for every fact through"
            " ctx, and give each ctx.query a name of its own"
        )


def differences(wanted: Any, found: Any, where: str) -> Iterator[str]:
    """Name the places where JSON data differs from what it should be."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted({*wanted, *found}):
            yield from differences(wanted.get(key, "nothing"), found.get(key, "nothing"), f"{where}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for position, pair in enumerate(zip(wanted, found, strict=True)):
            yield from differences(*pair, f"{where}[{position}]")
    elif wanted != found:
        yield f"{where} must be {wanted!r:.100} (got {found!r:.100})"


def repeatable(subject: Subject, machine: TestedMachine) -> None:
    """C08: Detecting twice gives the same."""
    try:
        first = subject.plugin.detect(machine.context())
    except PluginError as error:
        raise NotApplicable("detection fails here; see C07 and C09") from error
    try:
        second = subject.plugin.detect(machine.context())
    except PluginError as error:
        raise CheckFailed(f"{DETECT} works once and then not: {error.problem.reason}") from error
    demand(differences(encode(_stable(first)), encode(_stable(second)), "the second answer"))


def _stable(detected: Detected | None) -> Detected | None:
    """Leave out the order of the devices, which does not count."""
    if detected is None:
        return None
    return replace(detected, devices=tuple(sorted(detected.devices, key=lambda device: device.id)))


def identity(subject: Subject, machine: TestedMachine) -> None:
    """C09: Devices have ids that are unique, no indexes, and the same whatever the order of directories."""
    try:
        detected = subject.plugin.detect(machine.replay())
    except PluginError as error:
        if error.problem.kind is ProblemKind.CONTRACT:
            raise CheckFailed(f"{DETECT}: {error.problem.reason}") from error
        raise NotApplicable("detection fails here; see C07") from error
    if detected is None:
        return
    numbered = [device for device in detected.devices if _is_index(device)]
    if len(numbered) > 1:
        raise CheckFailed(
            f"ids must not be indexes (got {', '.join(device.id for device in numbered[:3])}): a device that fails"
            " would give its id to the next one; use a serial number, a UUID or the PCI address"
        )
    wanted = _addresses(detected)
    for seed in range(SHUFFLES):
        try:
            found = subject.plugin.detect(machine.context(Shuffled(machine.recording, seed)))
        except PluginError as error:
            raise CheckFailed(f"with its directories in another order: {error.problem.reason}") from error
        demand(differences(wanted, _addresses(found), "with its directories in another order, the id"))


def _is_index(device: Device) -> bool:
    """Whether an id is an index and some words, although the device has an address that would be a better one."""
    words = device.id.removesuffix(str(device.index))
    return device.pci_bus_id is not None and words != device.id and not any(letter.isdigit() for letter in words)


def _addresses(detected: Detected | None) -> dict[str, str | None]:
    return {device.id: device.pci_bus_id for device in detected.devices} if detected else {}
