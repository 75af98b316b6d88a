"""C26 to C28: stats and diagnose answer, hooks keep their deadline, and presence.json is right."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.model import ProblemKind, encode
from anyaccel.plugin import PciFunction
from anyaccel.text import listed
from anyaccel.vendors import ANSWER_LIMIT, HOOKS, RECORDED, presence

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.subject import Subject, TestedMachine

EVERYWHERE = {0x8086: "Intel", 0x1022: "AMD", 0x1AF4: "virtio", 0x1B36: "QEMU", 0x15AD: "VMware", 0x1D0F: "Amazon"}
"""PCI vendors with functions of other kinds on nearly every machine."""
COMMON_PATHS = (
    *("/dev", "/dev/dri", "/dev/dri/card0", "/dev/dri/renderD128", "/dev/null", "/etc", "/opt", "/proc"),
    *("/sys", "/sys/bus/pci", "/sys/bus/pci/devices", "/sys/class", "/sys/class/drm", "/sys/module", "/usr"),
)
"""Paths that exist on machines without the vendor."""
STATS, DIAGNOSE = "anyaccel_stats", "anyaccel_diagnose"


def check_answers(subject: Subject) -> None:
    """C26: Stats and diagnose answer where there are devices: neither fails on every such machine."""
    hooks = [hook for hook in (STATS, DIAGNOSE) if subject.plugin.implements(hook)]
    if not hooks:
        raise NotApplicable(f"the plug-in has neither {STATS} nor {DIAGNOSE}, which are optional")
    machines = [machine for machine in subject.machines if machine.known_devices]
    if not machines:
        raise NotApplicable("there is no recorded machine with devices to check on")
    demand(_find_silent(machines, hooks))


def _find_silent(machines: list[TestedMachine], hooks: list[str]) -> Iterator[str]:
    """Yield hooks that fail on every machine with devices. C25 reports violations of the contract."""
    for hook in hooks:
        reasons = [(machine.name, _describe_failure(machine, hook)) for machine in machines]
        if all(reason for _, reason in reasons):
            name, reason = reasons[0]
            yield (
                f"{hook} fails on every recorded machine with devices, on {name}: {reason}; answer, with None for what"
                " is unknown"
            )


def _describe_failure(machine: TestedMachine, hook: str) -> str:
    try:
        _make_calls(machine)[hook]()
    except PluginError as error:
        return "" if error.problem.kind is ProblemKind.CONTRACT else error.problem.reason
    return ""


def _make_calls(machine: TestedMachine) -> dict[str, Callable[[], Any]]:
    """Return calls of the hooks with access to a machine, by name."""
    return {
        f"anyaccel_{name}": machine.call(name, devices=lambda: machine.known_devices, ctx=machine.context)
        for name in RECORDED
    }


class _TooSlowError(BaseException):
    """Raised in a hook after its deadline. Derives from BaseException to pass ``except Exception``."""


def check_deadlines(subject: Subject, machine: TestedMachine) -> None:
    """C27: Detection, stats and diagnose return before their deadline, and not more than a process may answer."""
    if subject.too_slow:
        raise NotApplicable(f"a hook takes too long on {subject.too_slow} already")
    for hook, call in _make_calls(machine).items():
        with limit_time(subject, machine, hook), contextlib.suppress(PluginError):  # other checks report errors
            # Here everything is one process; in a vendor's own process, a longer answer is lost.
            size = len(json.dumps(encode(call())))
            if size > ANSWER_LIMIT:
                raise CheckFailed(f"{hook} answers {size} bytes, and at most {ANSWER_LIMIT} are taken; answer less")


@contextlib.contextmanager
def limit_time(subject: Subject, machine: TestedMachine, hook: str) -> Iterator[None]:
    """Fail the check when the hook's deadline passes, with the line of the hook then."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the form of signal handlers
        raise _TooSlowError(_find_hook(frame) or hook, _format_place(frame))

    # A signal, not a thread: only a signal handler can raise inside the hook.
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, subject.timeout)
    try:
        yield
    except _TooSlowError as error:
        subject.too_slow = machine.name
        name, place = error.args
        raise CheckFailed(
            f"{name} takes longer than its deadline of {subject.timeout:g} s{place}, so it always fails on such a"
            " machine; ask for less, or stop when ctx.remaining() is small and say that the answer is partial"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the handler goes: the default action of SIGALRM kills
        signal.signal(signal.SIGALRM, before)


def _find_hook(frame: FrameType | None) -> str:
    """Return the name of the innermost hook; before stats are asked for, the devices are detected by other hooks."""
    while frame is not None:
        name = frame.f_code.co_name
        # A hook of the kit is a method without the beginning.
        if name in HOOKS or name.removeprefix("anyaccel_") in HOOKS:
            return f"anyaccel_{name.removeprefix('anyaccel_')}"
        frame = frame.f_back
    return ""


def _format_place(frame: FrameType | None) -> str:
    return f" (it was at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})" if frame else ""


def check_presence(subject: Subject) -> None:
    """C28: Presence.json is valid, names the plug-in's resource, and each sign of the vendor in the file is right."""
    source, info = subject.source, subject.plugin.info
    try:
        said = presence.read_presence(source)
    except ValueError as error:
        raise CheckFailed(str(error)) from error
    if said is None:
        raise NotApplicable(f"the plug-in has no {presence.FILE_NAME}, which is optional")
    demand(_find_presence_faults(subject, said, info.resource))


def _find_presence_faults(subject: Subject, said: presence.Presence, resource: str) -> Iterator[str]:
    file = presence.FILE_NAME
    if said.resource not in ("", resource):
        yield f"'resource' of {file} must be {resource!r}, as in PluginInfo (got {said.resource!r})"
    if said.names is not None:
        names = {name.casefold() for product in subject.plugin.products() for name in (product.name, *product.aliases)}
        if missing := sorted(names - said.names):
            yield f"'names' of {file} must list every name and alias of a product ({listed(missing)} is missing)"
        if unknown := sorted(said.names - names):
            yield f"'names' of {file} must list names and aliases of products alone (got {listed(unknown)})"
    yield from _find_wide_signs(said)
    yield from _find_wrong_signs(subject, said)
    for machine in subject.machines:
        facts = machine.facts
        if _is_found(machine) and not presence.select_present({subject.source.vendor: said}, facts, facts.environ):
            yield (
                f"{presence.FILE_NAME} says that the vendor is certainly not on {machine.name}, where it is found: add"
                " a PCI vendor id, a path or a variable by which it is recognised there"
            )


def _find_wide_signs(said: presence.Presence) -> Iterator[str]:
    """Yield signs that are there on nearly every machine, so that the plug-in is imported and asked everywhere."""
    for sign in said.pci:
        vendor = int(sign.vendor, 16)
        if vendor in EVERYWHERE and not sign.classes:
            yield (
                f"'pci' of {presence.FILE_NAME} must give 'classes' for {vendor:04x}: functions of {EVERYWHERE[vendor]}"
                " are on nearly every machine, and the plug-in would be asked there"
            )
    for path in said.paths:
        if wide := [known for known in COMMON_PATHS if fnmatch.fnmatchcase(known, path)]:
            yield (
                f"{path!r} in 'paths' of {presence.FILE_NAME} exists on machines without the vendor ({wide[0]}): name a"
                " path of the vendor's driver"
            )


def _find_wrong_signs(subject: Subject, said: presence.Presence) -> Iterator[str]:
    """Yield signs that find no recorded device: another sign hides the mistake, until a machine lacks the other."""
    missed: dict[str, str] = {}
    found = [machine for machine in subject.machines if _is_found(machine)]
    seen = any(machine.facts.glob(path) for machine in found for path in said.paths)
    for machine in found:
        functions = {function.address: function for function in _list_functions(machine)}
        for device in machine.known_devices if said.pci else ():
            function = functions.get(device.pci_bus_id or "")
            if function is not None and not any(sign.fits(function.vendor, function.class_code) for sign in said.pci):
                kind = f"the vendor {function.vendor:04x} and the class {function.class_code:04x}"
                missed.setdefault(kind, f"{device.id} on {machine.name}")
    for kind, where in missed.items():
        yield f"'pci' of {presence.FILE_NAME} must list {kind}, of {where}: without the driver, there is no other sign"
    # A single path may be that of a machine which no recording shows; all of them are wrong.
    if said.paths and found and not seen:
        yield (
            f"none of 'paths' of {presence.FILE_NAME} ({listed(said.paths)}) exists on a recorded machine with the"
            " vendor: correct them"
        )


def _list_functions(machine: TestedMachine) -> list[PciFunction]:
    try:
        return machine.replay().pci()
    except (OSError, ValueError):  # a function that cannot be read counts for every vendor
        return []


def _is_found(machine: TestedMachine) -> bool:
    try:
        return machine.detected is not None
    except NotApplicable:
        return False
