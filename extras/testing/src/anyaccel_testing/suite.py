"""Run the checks, each in a guarded process, and collect the results."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from anyaccel.errors import UsageError
from anyaccel.model import encode, replace
from anyaccel.probe import FILE_NAME, Machine, load, read_json
from anyaccel.text import shown
from anyaccel.vendors import (
    DEADLINE_SECONDS,
    PRELOAD,
    GuardedProcess,
    Outcome,
    Source,
    ask,
    call_all,
    installed,
)

from anyaccel_testing.check import Check, Result, State
from anyaccel_testing.subject import HOST, LIVE, PRODUCTS
from anyaccel_testing.table import CHECKS

PERFORM = "anyaccel_testing.perform"
NEEDED = (PERFORM, *PRELOAD)
"""Modules that the template process imports before it forks the processes of the checks."""
SECONDS = 100.0
SECONDS_TO_RECORD = 30.0
LOADS = "C01"
DETECTS = "C07"
NEEDS_PYTEST = "C23"
SLOW = "C27"
TOGETHER = (
    ("C07", "C08", "C09", "C10", "C11", "C12"),
    ("C15", "C16", "C17", "C18", "C19", "C20", "C21", "C25", "C26", "C28"),
)
"""Checks that share a process, and so what it has detected on each machine, as long as all of them pass."""
EXPECTED_FAILURES = "expected_failures.json"
WAY_OUT = f"expected failures must map ids of checks ({CHECKS[0].id} to {CHECKS[-1].id}) to reasons"


def run_checks(
    vendor: str,
    recordings: str | Path | None = None,
    *,
    real: bool = False,
    only: Iterable[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    timeout: float = DEADLINE_SECONDS,
    tell: Callable[[str], None] | None = None,
) -> list[Result]:
    """Check an installed plug-in.

    Nothing of the plug-in runs in this process.

    Args:
        vendor: Key of the vendor.
        recordings: Directory whose sub-directories are recordings, or a recording; None for simulated machines alone.
        real: Check on this host instead of recordings.
        only: Ids of checks; all when empty.
        expected_failures: Reasons by ids of checks; read from ``expected_failures.json`` in the directory of recordings
            when None. A declared check that fails on no recording is reported as failed, so that its entry is removed.
        seconds: Time limit of each check.
        timeout: Time limit in seconds of each hook that touches the machine.
        tell: Called with a sentence when checks take long.

    Returns:
        One result per check and machine, in the order of the table.

    Raises:
        MachineError: When a recording is damaged.
        UsageError: When the expected failures are not ids of checks with reasons.
    """
    declared = dict(read_declared_failures(recordings) if expected_failures is None else expected_failures)
    for fault in find_declaration_faults(declared):
        raise UsageError(fault)
    chosen = [check for check in CHECKS if not only or check.id in set(only)]
    source, reason = find(vendor)
    if source is None:
        first = Result(check=LOADS, state=State.FAILED, message=reason)
        return [first, *(_skip(check, "the plug-in is not installed") for check in chosen if check.id != LOADS)]
    limits = _Limits(seconds, timeout, tell)
    if real:
        return list(_mark_declared(_run_real(source, chosen, limits), declared))
    machines = list_recordings(recordings)
    for path in machines.values():  # a damaged recording is no fault of the plug-in: report it before any check runs
        load(os.path.join(path, FILE_NAME))
    results = list(_mark_declared(_run(source, machines, chosen, limits, live=False), declared))
    return [_fail_stale_declaration(result, declared, results) for result in results]


def read_declared_failures(recordings: str | Path | None) -> dict[str, str]:
    """Read ``expected_failures.json`` of a directory of recordings; empty when there is no such file.

    Raises:
        MachineError: When the file cannot be read.
        UsageError: When it does not map ids of checks to reasons.
    """
    path = os.path.join(recordings or "", EXPECTED_FAILURES)
    if recordings is None or not os.path.lexists(path):
        return {}
    declared = read_json(path, WAY_OUT)
    for fault in find_declaration_faults(declared):
        raise UsageError(f"{path}: {fault}")
    return dict(declared)


def find_declaration_faults(declared: object) -> Iterator[str]:
    """Yield the faults of declared failures."""
    if not isinstance(declared, Mapping):
        yield f"{WAY_OUT} (got a {type(declared).__name__})"
        return
    for check, reason in declared.items():
        if check not in {known.id for known in CHECKS} or not isinstance(reason, str) or not reason.strip():
            yield f"{WAY_OUT} (got {shown(check)}: {shown(reason)})"


def find(vendor: str) -> tuple[Source | None, str]:
    """Find the plug-in of a vendor, or return the reason why there is none."""
    sources, problems = installed()
    source = next((source for source in sources if source.vendor == vendor), None)
    if source is not None:
        return source, ""
    for problem in problems:
        if problem.vendor == vendor:
            return None, str(problem)
    names = ", ".join(source.vendor for source in sources) or "none"
    return None, (
        f"no plug-in for {vendor!r} is installed (installed: {names}): declare the entry point {vendor!r} in the group"
        " 'anyaccel', install the project with 'pip install -e .', and see that ANYACCEL_PLUGINS and ANYACCEL_DISABLE"
        " do not leave it out"
    )


def list_recordings(directory: str | Path | None) -> dict[str, str]:
    """List recordings by name: each sub-directory with a ``machine.json``, or the directory itself."""
    if directory is None or not os.path.isdir(directory):
        return {}
    path = os.path.abspath(directory)
    if os.path.lexists(os.path.join(path, FILE_NAME)):
        return {os.path.basename(path): path}
    paths = {name: os.path.join(path, name) for name in sorted(os.listdir(path))}
    return {name: path for name, path in paths.items() if os.path.lexists(os.path.join(path, FILE_NAME))}


def list_machines(check: Check, recordings: Iterable[str]) -> list[str]:
    """List the names of the machines for which a check reports results; ``""`` for the plug-in as a whole."""
    if not check.per_machine:
        return [""]
    return [*recordings, *([PRODUCTS] if check.simulated else [])] or [""]


def _mark_declared(results: Iterable[Result], declared: Mapping[str, str]) -> Iterator[Result]:
    """Mark declared failures as expected, with the declared reason."""
    for result in results:
        if result.state is State.FAILED and result.check in declared:
            message = f"{declared[result.check]} ({result.message})"
            yield replace(result, state=State.EXPECTED, message=message)
        else:
            yield result


def _fail_stale_declaration(result: Result, declared: Mapping[str, str], results: list[Result]) -> Result:
    """Turn the result of a check that was declared to fail and passes into a failure."""
    # A check that is skipped everywhere may still fail elsewhere, such as on a newer kernel: its entry stays.
    ends = {each.state for each in results if each.check == result.check}
    if result.check not in declared or State.EXPECTED in ends or ends == {State.SKIPPED}:
        return result
    message = f"{result.check} no longer fails: take it out of the expected failures"
    return replace(result, state=State.FAILED, message=message)


class _Limits(NamedTuple):
    """Time limits of checks and hooks in seconds, and whom to tell when checks take long."""

    check: float
    hook: float
    tell: Callable[[str], None] | None


def _run(
    source: Source, recordings: Mapping[str, str], chosen: Iterable[Check], limits: _Limits, *, live: bool
) -> list[Result]:
    performed = {check.id: check for check in chosen if check.id != NEEDS_PYTEST}
    shared = {
        "source": encode(source),
        "recordings": list(recordings.values()),
        "live": live,
        "timeout": limits.hook,
        "path": [str(entry) for entry in sys.path],  # pytest and authors change it at run time
        "environ": dict(os.environ),
    }
    groups = [[key for key in group if key in performed] for group in TOGETHER]
    alone = [[key] for key in performed if not any(key in group for group in groups)]
    with _tell_progress(limits):
        outcomes = _perform([*groups, *alone], shared, limits.check, limits.hook)
        slow = SLOW in outcomes and _is_failed(outcomes[SLOW])
        # A crash or a leak of one check must not change another: then each has a process of its own.
        failed = [group for group in groups if any(outcomes[key].fault or _is_failed(outcomes[key]) for key in group)]
        again = [[key] for group in failed if len(group) > 1 for key in group]
        outcomes |= _perform(again, shared, 2 * limits.hook if slow else limits.check, limits.hook)
    # One cause, one failure: checks that time out or die behind the first one are skipped with a reference to it.
    deadly = next((key for key in (LOADS, DETECTS) if key in outcomes and outcomes[key].fault), None)
    results: list[Result] = []
    for check in chosen:
        names = list_machines(check, recordings)
        if check.id not in performed:
            results.append(_skip(check, "it is about test classes; see anyaccel_testing.AcceleratorPluginTests"))
        elif slow and outcomes[check.id].fault == "timeout":
            results.append(_skip(check, f"the plug-in is too slow; see {SLOW}"))
        elif deadly and check.id != deadly and outcomes[check.id].fault:
            results.append(_skip(check, f"the plug-in does not survive; see {deadly}"))
        else:
            results += _collect_results(check, names, outcomes[check.id])
    return results


def _perform(groups: Iterable[list[str]], shared: Mapping[str, Any], seconds: float, hook: float) -> dict[str, Outcome]:
    """Run groups of checks, each in a process of its own; return the outcome of each check by its id."""
    processes = {GuardedProcess(*NEEDED): group for group in groups if group}
    calls = {process: (f"{PERFORM}:perform", {**shared, "checks": group}) for process, group in processes.items()}

    def give_up(ended: Mapping[GuardedProcess, Outcome]) -> float | None:
        """Let checks of a hanging hook not take all of their time, once C27 has named the hook."""
        slow = any(
            SLOW in processes[process] and not outcome.fault and _is_failed(_outcome_of(SLOW, outcome))
            for process, outcome in ended.items()
        )
        return 2 * hook if slow else None

    ended = call_all(calls, seconds, enough=give_up)
    for process in processes:
        process.close()
    return {key: _outcome_of(key, outcome) for process, outcome in ended.items() for key in processes[process]}


def _outcome_of(key: str, outcome: Outcome) -> Outcome:
    """Return the outcome of one check of a process; a fault is that of all of them."""
    return outcome if outcome.fault else Outcome(value=outcome.value[key])


def _is_failed(outcome: Outcome) -> bool:
    return any(answer["state"] == State.FAILED.value for answer in outcome.value or ())


@contextlib.contextmanager
def _tell_progress(limits: _Limits) -> Iterator[None]:
    """Tell after the time limit of a hook that checks still run: a hook may hang, and checks are patient."""
    import threading

    if limits.tell is None:
        yield
        return
    text = f"checks still run after {limits.hook:g} s; each may take {limits.check:g} s"
    timer = threading.Timer(limits.hook, limits.tell, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _collect_results(check: Check, names: list[str], outcome: Outcome) -> Iterator[Result]:
    if outcome.fault:
        message = f"the plug-in did not survive the check: {outcome.reason}"
        yield from (
            Result(check=check.id, state=State.FAILED, machine=name, message=message, details=outcome.details)
            for name in names
        )
        return
    for answer in outcome.value:
        yield Result(check=check.id, **{**answer, "state": State(answer["state"])})


def _run_real(source: Source, chosen: list[Check], limits: _Limits) -> list[Result]:
    """Record this host once in a guarded process, then check the plug-in on the recording and on the host."""
    import json
    import tempfile

    answers, _ = ask("record", Machine(), timeout=SECONDS_TO_RECORD, vendors=[source.vendor])
    _, outcome = answers[source.vendor]
    answer: dict[str, Any] = outcome.value or {}
    reason = outcome.reason or answer.get("problem", {}).get("reason", "")
    with tempfile.TemporaryDirectory(prefix="anyaccel-check-") as directory:
        recordings = {HOST: os.path.join(directory, HOST)}
        os.mkdir(recordings[HOST])
        for name, content in ((FILE_NAME, answer.get("recording")), (LIVE, answer.get("detected"))):
            Path(recordings[HOST], name).write_text(json.dumps(content), encoding="utf-8")
        results = _run(source, {} if reason else recordings, chosen, limits, live=True)
    if not reason:
        return results
    failure = Result(check=DETECTS, state=State.FAILED, machine=HOST, message=reason, details=outcome.details)
    return [failure if result.check == DETECTS else result for result in results]


def _skip(check: Check, reason: str) -> Result:
    return Result(check=check.id, state=State.SKIPPED, message=reason)
