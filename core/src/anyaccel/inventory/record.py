"""Record the facts that plug-ins read on a machine, and compare the replay of a recording.

A recording is a directory with two files: ``machine.json`` (see :mod:`anyaccel.probe.recording`) and beside it
``expected.json``, the inventory that the recording replays to:

    {"schema": "anyaccel.expected/1",
     "vendors": {"acme": {"driver_version": "7.1", "devices": [{"id": ..., "index": 0, ...}]},    as testing.describe()
                 "zeta": null},                                                            not on this machine
     "visible": {"acme": ["id", ...]},                         ids that the environment leaves, in the order of use
     "failed": {"omega": "anyaccel_detect: it raised ..."}}    vendors that could not be detected

Fields with their default value are left out, and so are the fields that the core adds.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path

from anyaccel.errors import MachineError, UsageError
from anyaccel.inventory.answers import interpret
from anyaccel.model import Detected, Device, Problem, Value, VendorState, encode, replace
from anyaccel.probe import FILE_NAME, HOST, Machine, PrivateNames, parse_machine, read_json, replace_in
from anyaccel.probe.recording import merge
from anyaccel.probe.sanitize import sanitize
from anyaccel.text import shown
from anyaccel.vendors import ALLOW_VARIABLE, DEADLINE_SECONDS, DENY_VARIABLE, RECORDED, Answers, ask, problem_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = "anyaccel.expected/1"
EXPECTED = "expected.json"
PARTS = ("vendors", "visible", "failed")
PERSONS = range(1000, 65_534)
"""User ids of people."""


class Recorded(Value):
    """The result of a recording.

    Attributes:
        path: Path of ``machine.json``.
        size: Size in bytes.
        vendors: Vendors whose plug-ins were asked.
        problems: Problems of plug-ins that could not be asked.
        differences: Vendors whose devices differ between the machine and the replay.
    """

    path: str
    size: int
    vendors: tuple[str, ...]
    problems: tuple[Problem, ...]
    differences: tuple[str, ...]


def record(
    directory: str,
    machine: str | Machine | None = None,
    *,
    raw: bool = False,
    timeout: float = DEADLINE_SECONDS,
) -> Recorded:
    """Record a machine.

    Args:
        directory: Directory for the two files; made when missing.
        machine: See :func:`anyaccel.detect`; a recording can be recorded again, for example to sanitize it.
        raw: Keep serial numbers, addresses and names.
        timeout: Seconds that each vendor may take for each of its hooks.

    Raises:
        MachineError: When ``machine`` names no machine.
        UsageError: When the machine is simulated, or the recording exists or cannot be written.
    """
    where = parse_machine(machine)
    if where.simulated:
        raise UsageError(f"a simulated machine has no facts to record (got --machine {where.text})")
    target = os.path.join(directory, FILE_NAME)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists and is not overwritten; choose another directory or remove it")
    answers, problems = ask("record", where, timeout=timeout * len(RECORDED))
    recorded = {vendor for vendor, (_, outcome) in answers.items() if "recording" in (outcome.value or {})}
    recording = merge(answers[vendor][1].value["recording"] for vendor in answers if vendor in recorded)
    replacements: dict[str, str] = {}
    if not raw:
        recording, replacements = sanitize(recording, collect_private_names() if where.text == HOST else None)
    size = write_json(target, recording)
    found = expect(directory, timeout=timeout)  # by a replay, which is what tests will see
    write_json(os.path.join(directory, EXPECTED), found)
    for vendor, (source, outcome) in answers.items():  # a hook that failed shows in what the replay finds
        if vendor not in recorded and (fault := problem_in(source, outcome, "")):
            problems.append(fault)
    return Recorded(
        path=target,
        size=size,
        vendors=tuple(sorted(answers)),
        problems=tuple(problems),
        differences=tuple(_differences(_expected(answers), found, replacements)),
    )


def expect(
    directory: str,
    *,
    timeout: float = DEADLINE_SECONDS,
    vendors: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Replay a recording without the environment of this process; return the data of ``expected.json``.

    Args:
        directory: Directory of the recording.
        timeout: Seconds that each vendor may take.
        vendors: Vendors to ask; all when None.
    """
    # Masks of this process would hide devices of the recording, which must replay alike everywhere.
    environ = {name: os.environ[name] for name in (ALLOW_VARIABLE, DENY_VARIABLE) if name in os.environ}
    answers, _ = ask("detect", parse_machine(directory), timeout=timeout, environ=environ, vendors=vendors)
    return _expected(answers)


def verify(directory: str, *, timeout: float = DEADLINE_SECONDS) -> tuple[str, ...]:
    """Compare the replay of a recording with ``expected.json``.

    Returns:
        Keys of the installed vendors for which the two differ.

    Raises:
        MachineError: When the directory holds no such recording.
    """
    path = os.path.join(directory, EXPECTED)
    replace_it = " --force" if os.path.lexists(path) else ""
    way_out = f"write a new one: anyaccel check VENDOR --recordings DIR --write-expected{replace_it}"
    expected = read_json(path, way_out)
    schema = expected.get("schema") if isinstance(expected, dict) else None
    if schema != SCHEMA:
        raise MachineError(f'{path} must say "schema": "{SCHEMA}" (got {shown(schema)})', hint=way_out)
    for part in PARTS:
        if not isinstance(expected.get(part), dict):
            raise MachineError(f"{path}: {part!r} must be an object (got {shown(expected.get(part))})", hint=way_out)
    return tuple(_differences(expected, expect(directory, timeout=timeout), {}))


def collect_private_names() -> PrivateNames:
    """Return the names and addresses of this host, which must not be in a recording."""
    import pwd
    import socket

    full = socket.gethostname()
    people = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid in PERSONS or entry.pw_uid == os.getuid()]
    people += [os.environ[name] for name in ("USER", "LOGNAME", "SUDO_USER") if os.environ.get(name)]
    hosts = dict.fromkeys((full, full.partition(".")[0]))
    return PrivateNames(hosts=tuple(hosts), users=tuple(dict.fromkeys(people)), addresses=_addresses())


def _addresses() -> tuple[str, ...]:
    """Return this host's link and network addresses, from the kernel."""
    import re
    import socket

    found = []
    for link in glob("/sys/class/net/*/address"):
        with contextlib.suppress(OSError):
            found.append(Path(link).read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        routes = Path("/proc/net/fib_trie").read_text(encoding="ascii")
        found += re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", routes)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return tuple(dict.fromkeys(filter(None, found)))


def _expected(answers: Answers) -> dict[str, Any]:
    vendors: dict[str, Any] = {}
    visible: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    for vendor, (source, outcome) in sorted(answers.items()):
        report, devices = interpret(source, outcome)
        if (problem := report.problem) is not None:
            failed[vendor] = f"{problem.hook}: {problem.reason}"
            continue
        vendors[vendor] = None
        if report.state is VendorState.OK:
            visible[vendor] = [device.id for device in devices if device.visible]
            detected = Detected(
                devices=tuple(_own(device) for device in sorted(devices, key=lambda device: device.index)),
                driver_version=report.driver_version,
                partial=report.partial,
                notes=report.notes,
            )
            vendors[vendor] = encode(detected)
    return {"schema": SCHEMA, "vendors": vendors, "visible": visible, "failed": failed}


def _own(device: Device) -> Device:
    """Return a device as its plug-in described the device, without fields of the core and the environment."""
    return replace(device, vendor="", resource="", kind="", visible=True, order=0)


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any], replacements: Mapping[str, str]) -> list[str]:
    """Return the vendors of both inventories with a difference. Messages of failures may differ."""
    wanted = json.loads(json.dumps(replace_in(expected, replacements)))  # tuples become lists, as in the file
    known = {*wanted["vendors"], *wanted["failed"]} & {*found["vendors"], *found["failed"]}
    return sorted(
        vendor
        for vendor in known
        if (vendor in wanted["failed"]) != (vendor in found["failed"])
        or any(wanted[part].get(vendor) != found[part].get(vendor) for part in ("vendors", "visible"))
    )


def write_json(path: str, data: Any) -> int:
    """Write JSON data to a file, and make its directory when missing; return the size in bytes.

    Raises:
        UsageError: When the file cannot be written.
    """
    whole = json.loads(json.dumps(data, ensure_ascii=False).encode(errors="replace"))  # halves of characters become "?"
    text = json.dumps(whole, indent=1) + "\n"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=_open_at_once) as file:
            return file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another directory") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file for writing without waiting: a FIFO without a reader raises an error."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
