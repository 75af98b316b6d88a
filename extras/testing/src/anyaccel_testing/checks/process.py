"""C13, C14, C22 and C25: hooks leave the process as it was, survive a fork, and touch the machine only through ctx."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.model import AGREEMENT, Device, EnvContext, ProblemKind, Severity, Share, Stats, Term, encode
from anyaccel.vendors import HOOKS

from anyaccel_testing.check import CheckFailed, demand
from anyaccel_testing.checks.environment import STALE, accepted
from anyaccel_testing.subject import Subject, TestedMachine
from anyaccel_testing.watch import Watch, changes, process_state

FORK_SECONDS = 30.0
END = b"\0"
MOST_DEVICES = 8
POSSIBLE = {
    "utilization": (0, 1, "a part of one"),
    "temperature_celsius": (-100, 300, "degrees Celsius"),
    "power_watts": (0, 100_000, "watts"),
}
"""Statistics whose unit is easily mistaken, such as for percent or millidegrees, and what devices can have."""

Answers = dict[str, Any]


def exercise(subject: Subject, machine: TestedMachine, *, replay: bool = True) -> Answers:
    """Call every hook that touches the machine, then every pure one.

    Returns:
        By name of the call, what was answered as JSON data, or the reason why it failed.
    """
    context = machine.replay if replay else machine.context
    devices = machine.known_devices
    of_machine = [name for name in HOOKS if name != "info" and not _is_pure(subject, name)]
    calls = {f"anyaccel_{name}": machine.call(name, devices=lambda: devices, ctx=context) for name in of_machine}
    for device in devices[:MOST_DEVICES]:
        calls |= _pure_calls(subject, machine, device)
    return {name: _answer(call) for name, call in calls.items()}


def _is_pure(subject: Subject, hook: str) -> bool:
    """Whether a hook answers from what it is told about devices."""
    return HOOKS[hook].seconds is not None and bool(subject.plugin.arguments(hook))


def _pure_calls(subject: Subject, machine: TestedMachine, device: Device) -> dict[str, Callable[[], Any]]:
    info, devices = subject.plugin.info, machine.known_devices
    share = Share(
        device=device,
        units=5000,
        memory_bytes=(device.memory_bytes or 0) // 2 or None,
        memory_by=AGREEMENT,
        compute_by=AGREEMENT,
    )
    whole = EnvContext(devices=devices, shares={device.id: Share(device=device)})
    part = EnvContext(devices=devices, shares={device.id: share}, mask="index")
    told: dict[str, Callable[[], Any]] = {
        "device": lambda: device,
        "devices": lambda: (device,),
        "environ": lambda: dict.fromkeys(info.env_vars, "0"),
        "request": lambda: Term(names=(info.resource,)),
        "ctx": lambda: whole,
    }
    pure = [name for name in HOOKS if _is_pure(subject, name)]
    calls = {f"anyaccel_{name} of {device.id}": machine.call(name, **told) for name in pure}
    calls[f"anyaccel_visible of {device.id}"] = machine.call("visible", **{**told, "devices": lambda: devices})
    calls[f"anyaccel_env of a share of {device.id}"] = machine.call("env", **{**told, "ctx": lambda: part})
    return calls


def _answer(call: Callable[[], Any]) -> Any:
    try:
        return encode(call())
    except PluginError as error:
        return error.problem.reason


def unchanged(subject: Subject, machine: TestedMachine) -> None:
    """C13: Hooks leave the process as it was: environment, directory, signals, files, threads, children, output."""
    before = process_state()
    exercise(subject, machine, replay=False)
    demand(
        f"the hooks change {change}; undo it, or ask through ctx, which leaves nothing behind"
        for change in changes(before, process_state())
    )


def forked(subject: Subject, machine: TestedMachine) -> None:
    """C14: After detection the process may fork, and the hooks work in the child."""
    before = exercise(subject, machine, replay=False)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _repeat_in_child(subject, machine, before, write_end)
    os.close(write_end)
    heard = _hear(read_end)
    os.close(read_end)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if heard is None:
        how = f"does not come back within {FORK_SECONDS:g} s"
    elif not heard.endswith(END):
        code = os.waitstatus_to_exitcode(status)
        how = f"is killed by {signal.Signals(-code).name}" if code < 0 else f"ends with exit status {code}"
    elif heard != END:
        raise CheckFailed(f"after anyaccel_detect, in a forked process: {heard.removesuffix(END).decode()}")
    else:
        return
    raise CheckFailed(
        f"after anyaccel_detect, a forked process that calls the hooks {how}: keep no thread, lock or handle of a"
        " library when the hook returns"
    )


def _repeat_in_child(subject: Subject, machine: TestedMachine, before: Answers, pipe: int) -> None:
    try:
        after = exercise(subject, machine, replay=False)
        failed = [f"{name} fails: {after[name]}" for name in before if _newly_failed(before[name], after[name])]
        message = "; ".join(failed[:3])
    except BaseException:  # noqa: BLE001 - the parent tells
        message = traceback.format_exc(limit=-1)
    os.write(pipe, message.encode(errors="replace")[:4000] + END)
    os._exit(0)


def _newly_failed(before: Any, after: Any) -> bool:
    return isinstance(after, str) and not isinstance(before, str)


def _hear(pipe: int) -> bytes | None:
    """What the child says until it ends; None when it does not end in time."""
    heard = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(FORK_SECONDS):
            chunk = os.read(pipe, 4096)
            heard += chunk
            if not chunk or heard.endswith(END):
                return heard
    return None


def only_through_context(subject: Subject) -> None:
    """C22: Hooks touch the machine through ctx alone; those without ctx are pure, and none reads os.environ."""
    machines = subject.machines or tuple(subject.simulated())
    for machine in machines:  # what we load ourselves does not count
        _ = machine.known_devices, machine.recording
    watch = Watch(subject.source)
    for machine in machines:
        with watch:
            first = exercise(subject, machine)
        if watch.events:
            raise CheckFailed(
                f"on {machine.name}, a hook {watch.events[0]} by itself: hooks that get a ctx see the machine through"
                " it alone, and all others are pure functions of their arguments"
            )
        if exercise(subject, machine) == first:
            demand(_reads_environ(subject, machine, first))


def _reads_environ(subject: Subject, machine: TestedMachine, before: Answers) -> Iterator[str]:
    with _environ(dict.fromkeys(subject.plugin.info.env_vars, STALE)):
        after = exercise(subject, machine)
    for name, answer in after.items():
        if answer != before[name]:
            yield (
                f"on {machine.name}, {name} changes with os.environ: read ctx.environ, or the environ argument, which"
                " may be that of another machine or process"
            )


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Some variables in ``os.environ``, for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def observed(subject: Subject, machine: TestedMachine) -> None:
    """C25: What products, stats, diagnose and container say keeps the contract."""
    demand(_observation_faults(subject, machine))


def _unit_faults(stats: Mapping[str, Stats]) -> Iterator[str]:
    for device_id, seen in stats.items():
        for name, (least, most, unit) in POSSIBLE.items():
            value = getattr(seen, name)
            if value is not None and not least <= value <= most:
                yield f"Stats.{name} must be {unit}, from {least} to {most} (got {value:g} for {device_id!r})"


def _observing_calls(subject: Subject, machine: TestedMachine) -> dict[str, Callable[[], Any]]:
    """Calls of the optional hooks that tell of devices, or of the vendor, as they are."""
    given = max(accepted(subject, machine.devices), key=len, default=())
    found: dict[str, Callable[[], Any]] = {}
    for name, hook in HOOKS.items():
        if not hook.required and {"environ", "request"}.isdisjoint(subject.plugin.arguments(name)):
            devices = given if _is_pure(subject, name) else machine.devices
            found[name] = machine.call(name, devices=partial(tuple, devices), ctx=machine.replay)
    return found


def _observation_faults(subject: Subject, machine: TestedMachine) -> Iterator[str]:
    devices = machine.devices
    answers: dict[str, Any] = {}
    for name, call in _observing_calls(subject, machine).items():
        try:
            answers[f"anyaccel_{name}"] = call()
        except PluginError as error:
            if error.problem.kind is ProblemKind.CONTRACT or HOOKS[name].seconds is not None:
                yield f"anyaccel_{name}: {error.problem.reason}"
    unknown = set(answers.get("anyaccel_stats", ())) - {device.id for device in devices}
    if unknown:
        yield f"anyaccel_stats tells of {', '.join(sorted(unknown))}, which it was not asked about; use Device.id"
    yield from _unit_faults(answers.get("anyaccel_stats", {}))
    for finding in answers.get("anyaccel_diagnose", ()):
        if finding.severity is not Severity.OK and not finding.remedy.strip():
            yield f"anyaccel_diagnose finds {finding.reason!r} without a way out; put it into Finding.remedy"
    container = answers.get("anyaccel_container")
    paths = (
        [*container.nodes, *(m.source for m in container.mounts), *(m.target for m in container.mounts)]
        if container
        else []
    )
    for path in paths:
        if not path.startswith("/"):
            yield f"anyaccel_container must name absolute paths (got {path!r})"
