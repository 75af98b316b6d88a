"""The child side of the suite: one check, on the plug-in or on one machine after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.model import decode
from anyaccel.vendors import PRINTED_LIMIT, Source

from anyaccel_testing.check import Check, CheckFailed, NotApplicable, State, demand
from anyaccel_testing.subject import PRODUCTS, Subject, TestedMachine
from anyaccel_testing.table import CHECKS

Answer = dict[str, str]


def perform(payload: Mapping[str, Any]) -> list[Answer]:
    """Make one check; what it says of each machine, as the fields of :class:`~anyaccel_testing.Result`."""
    sys.path[:] = payload["path"]  # the process was forked from one that may have looked for modules elsewhere
    os.environ.clear()
    os.environ.update(payload["environ"])
    check = next(check for check in CHECKS if check.id == payload["check"])
    subject = Subject(
        decode(Source, payload["source"]),
        tuple(payload["recordings"]),
        live=payload["live"],
        timeout=payload["timeout"],
    )
    with _output_in_a_file():
        return list(_answers(check, subject))


@contextlib.contextmanager
def _output_in_a_file() -> Iterator[None]:
    """Let what is printed go to a file, whose size a check can see, and from there to the pipe in the end.

    Where the process is when it crashes or hangs is written to the pipe at once.
    """
    pipe = os.dup(2)
    faulthandler.enable(pipe)
    output = os.memfd_create("output")
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        size = os.fstat(output).st_size
        os.write(pipe, os.pread(output, PRINTED_LIMIT, max(0, size - PRINTED_LIMIT)))


def _answers(check: Check, subject: Subject) -> Iterator[Answer]:
    names = [machine.name for machine in subject.machines] if check.per_machine else [""]
    names += [PRODUCTS] if check.simulated and not subject.live else []
    reason = _obstacle(check, subject) if names else "there is no recorded machine to check on"
    if reason:
        yield from (_answer(State.SKIPPED, name, reason) for name in names or [""])
    elif not check.per_machine:
        yield _attempt("", lambda: check.function(subject))
    else:
        for machine in subject.machines:
            yield _attempt(machine.name, partial(check.function, subject, machine))
        if PRODUCTS in names:
            yield _attempt(PRODUCTS, lambda: demand(_faults_of_products(check, subject)))


def _obstacle(check: Check, subject: Subject) -> str:
    """Why the check does not apply to this plug-in, or an empty string."""
    try:
        missing = bool(check.hook) and not subject.plugin.implements(check.hook)
    except NotApplicable as reason:
        return str(reason)
    return f"the plug-in has no {check.hook}, which is optional" if missing else ""


def _faults_of_products(check: Check, subject: Subject) -> Iterable[str]:
    machines = list(_simulated(subject))
    reasons = []
    for machine in machines:
        try:
            check.function(subject, machine)
        except CheckFailed as failure:
            yield f"{machine.name}: {failure}"
        except NotApplicable as reason:
            reasons.append(reason)
    if reasons and len(reasons) == len(machines):
        raise reasons[0]
    if not machines:
        raise NotApplicable("the plug-in lists no product, so nothing can be simulated")


def _simulated(subject: Subject) -> Iterator[TestedMachine]:
    try:
        yield from subject.simulated()
    except PluginError as error:
        raise NotApplicable("anyaccel_products fails; see C25") from error


def _attempt(name: str, call: Callable[[], None]) -> Answer:
    try:
        call()
    except CheckFailed as failure:
        return _answer(State.FAILED, name, str(failure))
    except NotApplicable as reason:
        return _answer(State.SKIPPED, name, str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a plug-in raises where nobody expects it is its fault
        what = error.problem.reason if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        return _answer(State.FAILED, name, f"it raised where it should not: {what}", traceback.format_exc())
    return _answer(State.OK, name)


def _answer(state: State, name: str, message: str = "", details: str = "") -> Answer:
    return {"state": state.value, "machine": name, "message": message, "details": details}
