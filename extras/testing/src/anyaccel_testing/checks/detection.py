"""C06 to C09: detection finds the devices of a machine, repeatably, with stable ids."""

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
from anyaccel.vendors import presence

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.subject import LIVE, Subject, TestedMachine
from anyaccel_testing.watch import list_foreign_modules

EXPECTED = "expected.json"
SHUFFLES = 3
DETECT = "anyaccel_detect"


class EmptyMachine(RecordedFacts):
    """An empty machine; records the queries of a plug-in."""

    def __init__(self) -> None:
        super().__init__({"schema": SCHEMA})
        self.asked: list[str] = []

    def query(self, name: str, fn: Callable[[], Json]) -> Json:
        """Record the query and fail."""
        self.asked.append(name)
        return super().query(name, fn)


class Shuffled(RecordedFacts):
    """A recorded machine with shuffled directory entries."""

    def __init__(self, recording: dict[str, Any], seed: int) -> None:
        super().__init__(recording)
        self._random = random.Random(seed)  # noqa: S311 - the same order each time

    def glob(self, pattern: str) -> list[str]:
        """Return the matching paths in a random order."""
        found = super().glob(pattern)
        self._random.shuffle(found)
        return found


def check_absent(subject: Subject) -> None:
    """C06: On a machine without a trace of the vendor, detection returns None and loads no library."""
    plugin, facts, machine = subject.plugin, EmptyMachine(), TestedMachine(subject)
    before = set(sys.modules)  # the plug-in itself is imported by now, so a difference is the hook's work
    try:
        found = plugin.detect(machine.context(facts))
    except PluginError as error:
        raise CheckFailed(
            f"{DETECT} must return None on an empty machine: {error.problem.reason}; look for files or PCI ids first"
        ) from error
    if found is not None:
        raise CheckFailed(f"{DETECT} must return None on an empty machine (got {found!r:.120})")
    loaded = list_foreign_modules(set(sys.modules) - before, subject.source)
    demand(
        [
            *(f"{DETECT} asks {name!r} on an empty machine; look for files or PCI ids first" for name in facts.asked),
            *(f"{DETECT} imports {name} on an empty machine; import it inside ctx.query" for name in loaded),
        ]
    )


def check_expected(subject: Subject, machine: TestedMachine) -> None:
    """C07: Detection on a recorded machine returns the inventory of its expected.json."""
    if subject.live:
        with open(os.path.join(machine.path, LIVE), encoding="utf-8") as file:
            _compare_ids(json.load(file), _describe(subject, machine))
        return
    wanted, fails = _read_expected(subject, machine)
    try:
        found = _describe(subject, machine)
    except CheckFailed:
        # The reason is not compared: its text belongs to the core and may improve.
        if fails:
            return
        raise
    if fails:
        raise CheckFailed(f"{EXPECTED} says that detection fails here (got {found!r:.120}); correct one of the two")
    demand(find_differences(_sort_described(wanted), _sort_described(found), "the inventory"))


def _read_expected(subject: Subject, machine: TestedMachine) -> tuple[Any, bool]:
    """Read the vendor's entry in ``expected.json``, and True if detection is expected to fail.

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


def _sort_described(described: Any) -> Any:
    """Sort the devices by index, since detection may return any order."""
    # An expected.json written by hand may hold anything: the comparison reports it.
    if not isinstance(described, dict) or not isinstance(described.get("devices"), list):
        return described
    return {**described, "devices": sorted(described["devices"], key=lambda device: str(device.get("index")))}


def _describe(subject: Subject, machine: TestedMachine) -> Any:
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


def find_differences(wanted: Any, found: Any, where: str) -> Iterator[str]:
    """Yield the places where JSON data differs from the wanted data."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted({*wanted, *found}):
            yield from find_differences(wanted.get(key, "nothing"), found.get(key, "nothing"), f"{where}.{key}")
    # Lists of different lengths are shown as a whole: by position, one missing device would make all later ones differ.
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for position, pair in enumerate(zip(wanted, found, strict=True)):
            yield from find_differences(*pair, f"{where}[{position}]")
    elif wanted != found:
        yield f"{where} must be {wanted!r:.100} (got {found!r:.100})"


def check_repeatable(subject: Subject, machine: TestedMachine) -> None:
    """C08: A second detection returns the same inventory."""
    try:
        first = subject.plugin.detect(machine.context())
    except PluginError as error:
        raise NotApplicable("detection fails here; see C07 and C09") from error
    try:
        second = subject.plugin.detect(machine.context())
    except PluginError as error:
        raise CheckFailed(f"{DETECT} works once and then not: {error.problem.reason}") from error
    demand(find_differences(encode(_sort_devices(first)), encode(_sort_devices(second)), "the second answer"))


def _sort_devices(detected: Detected | None) -> Detected | None:
    """Sort the devices by id, since detection may return any order."""
    if detected is None:
        return None
    return replace(detected, devices=tuple(sorted(detected.devices, key=lambda device: device.id)))


def check_identity(subject: Subject, machine: TestedMachine) -> None:
    """C09: Ids of devices are unique, are not indexes, and do not depend on the order of directories."""
    try:
        detected = subject.plugin.detect(machine.replay())
    except PluginError as error:
        if error.problem.kind is ProblemKind.CONTRACT:
            raise CheckFailed(f"{DETECT}: {error.problem.reason}") from error
        raise NotApplicable("detection fails here; see C07") from error
    if detected is None:
        return
    numbered = [device for device in detected.devices if _is_index(device)]
    # One device called 'acme-0' may be a coincidence; one called '0' is not.
    if len(numbered) > 1 or any(device.id == str(device.index) for device in numbered):
        raise CheckFailed(
            f"ids must not be indexes (got {', '.join(device.id for device in numbered[:3])}): a device that fails"
            " would give its id to the next one; use a serial number, a UUID or the PCI address"
        )
    demand(_find_foreign_functions(subject, machine, detected))
    wanted = _map_addresses(detected)
    for seed in range(SHUFFLES):
        try:
            found = subject.plugin.detect(machine.context(Shuffled(machine.recording, seed)))
        except PluginError as error:
            raise CheckFailed(f"with its directories in another order: {error.problem.reason}") from error
        demand(find_differences(wanted, _map_addresses(found), "with its directories in another order, the id"))


def _find_foreign_functions(subject: Subject, machine: TestedMachine, detected: Detected) -> Iterator[str]:
    """Yield devices at the PCI address of a function with another vendor's id, which presence.json does not list."""
    try:
        signs = presence.read_presence(subject.source)
        functions = {function.address: function for function in machine.replay().pci()}
    except (OSError, ValueError):  # C28 reports the file; a function without ids belongs to any vendor
        return
    ids = {int(sign.vendor, 16) for sign in signs.pci} if signs else set()
    for device in detected.devices:
        function = functions.get(device.pci_bus_id or "")
        if ids and function is not None and function.vendor not in ids:
            yield (
                f"{device.id} has the PCI address {function.address} of a function of the vendor"
                f" {function.vendor:04x}, which 'pci' of {presence.FILE_NAME} does not list; correct one of the two"
            )


def _is_index(device: Device) -> bool:
    """Return True if an id is the index alone, or the index behind words although the device has an address."""
    words = device.id.removesuffix(str(device.index))
    if words == device.id or any(letter.isdigit() for letter in words):
        return False
    # Without an address, words and the index may be the best that the machine shows.
    return device.pci_bus_id is not None or not any(letter.isalpha() for letter in words)


def _map_addresses(detected: Detected | None) -> dict[str, str | None]:
    return {device.id: device.pci_bus_id for device in detected.devices} if detected else {}
