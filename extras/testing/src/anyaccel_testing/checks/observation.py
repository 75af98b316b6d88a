"""C26 to C28: stats and diagnose answer, hooks keep their deadline, and presence.json is right."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.model import ProblemKind
from anyaccel.text import listed
from anyaccel.vendors import RECORDED, presence

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.subject import Subject, TestedMachine

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
    """C27: Detection, stats and diagnose return before their deadline."""
    if subject.too_slow:
        raise NotApplicable(f"a hook takes too long on {subject.too_slow} already")
    for hook, call in _make_calls(machine).items():
        with _limit_time(subject, machine, hook), contextlib.suppress(PluginError):  # other checks report errors
            call()


@contextlib.contextmanager
def _limit_time(subject: Subject, machine: TestedMachine, hook: str) -> Iterator[None]:
    """Fail the check when the hook's deadline passes, with the line of the hook then."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the form of signal handlers
        where = f" (it was at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})" if frame else ""
        raise _TooSlowError(where)

    # A signal, not a thread: only a signal handler can raise inside the hook.
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, subject.timeout)
    try:
        yield
    except _TooSlowError as error:
        subject.too_slow = machine.name
        raise CheckFailed(
            f"{hook} takes longer than its deadline of {subject.timeout:g} s{error}, so it always fails on such a"
            " machine; ask for less, or stop when ctx.remaining() is small and say that the answer is partial"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the handler goes: the default action of SIGALRM kills
        signal.signal(signal.SIGALRM, before)


def check_presence(subject: Subject) -> None:
    """C28: Presence.json is valid, names the plug-in's resource, and excludes no machine with the vendor."""
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
    for machine in subject.machines:
        facts = machine.facts
        if _is_found(machine) and not presence.select_present({subject.source.vendor: said}, facts, facts.environ):
            yield (
                f"{presence.FILE_NAME} says that the vendor is certainly not on {machine.name}, where it is found: add"
                " a PCI vendor id, a path or a variable by which it is recognised there"
            )


def _is_found(machine: TestedMachine) -> bool:
    try:
        return machine.detected is not None
    except NotApplicable:
        return False
