"""The child process of the suite: runs checks on the plug-in, or on each machine in turn."""

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
from anyaccel_testing.watch import flush_output

Answer = dict[str, str]


def perform(payload: Mapping[str, Any]) -> dict[str, list[Answer]]:
    """Run checks; return by id the fields of a :class:`~anyaccel_testing.Result` for each machine."""
    sys.path[:] = payload["path"]  # the parent of this fork may have another module path
    os.environ.clear()
    os.environ.update(payload["environ"])
    subject = Subject(
        decode(Source, payload["source"]),
        tuple(payload["recordings"]),
        live=payload["live"],
        timeout=payload["timeout"],
    )
    with _redirect_output():
        return {check.id: list(_run_check(check, subject)) for check in CHECKS if check.id in payload["checks"]}


@contextlib.contextmanager
def _redirect_output() -> Iterator[None]:
    """Redirect stdout and stderr to a memory file, and copy its end to the pipe on exit.

    C13 reads the size of the file to see whether a hook printed. faulthandler writes to the pipe, since a crash or a
    kill skips the copy.
    """
    pipe = os.dup(2)
    faulthandler.enable(pipe)
    output = os.memfd_create("output")
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        yield
    finally:
        flush_output()
        size = os.fstat(output).st_size
        # The parent reads the pipe after the answer: more than a pipe's buffer would block this process for ever.
        os.write(pipe, os.pread(output, PRINTED_LIMIT, max(0, size - PRINTED_LIMIT)))


def _run_check(check: Check, subject: Subject) -> Iterator[Answer]:
    names = [machine.name for machine in subject.machines] if check.per_machine else [""]
    names += [PRODUCTS] if check.simulated and not subject.live else []
    reason = _find_obstacle(check, subject) if names else "there is no recorded machine to check on"
    if reason:
        yield from (_make_answer(State.SKIPPED, name, reason) for name in names or [""])
    elif not check.per_machine:
        yield _attempt("", lambda: check.function(subject))
    else:
        for machine in subject.machines:
            yield _attempt(machine.name, partial(check.function, subject, machine))
        if PRODUCTS in names:
            yield _attempt(PRODUCTS, lambda: demand(_check_products(check, subject)))


def _find_obstacle(check: Check, subject: Subject) -> str:
    """Return the reason why a check does not apply to the plug-in, or an empty string."""
    try:
        missing = bool(check.hook) and not subject.plugin.implements(check.hook)
    except NotApplicable as reason:
        return str(reason)
    return f"the plug-in has no {check.hook}, which is optional" if missing else ""


def _check_products(check: Check, subject: Subject) -> Iterable[str]:
    machines = list(_simulate(subject))
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


def _simulate(subject: Subject) -> Iterator[TestedMachine]:
    try:
        yield from subject.simulated
    except PluginError as error:
        raise NotApplicable("anyaccel_products fails; see C25") from error


def _attempt(name: str, call: Callable[[], None]) -> Answer:
    try:
        call()
    except CheckFailed as failure:
        return _make_answer(State.FAILED, name, str(failure))
    except NotApplicable as reason:
        return _make_answer(State.SKIPPED, name, str(reason))
    # Not BaseException: SystemExit ends this process, which the parent reports.
    except Exception as error:  # noqa: BLE001 - any exception of a plug-in is a finding, not an error of the suite
        what = error.problem.reason if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        return _make_answer(State.FAILED, name, f"unexpected exception: {what}", traceback.format_exc())
    return _make_answer(State.OK, name)


def _make_answer(state: State, name: str, message: str = "", details: str = "") -> Answer:
    return {"state": state.value, "machine": name, "message": message, "details": details}
