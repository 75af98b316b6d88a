"""C13, C14, C22 and C25: hooks have no side effects, survive a fork, and read the machine only through ctx."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.model import (
    AGREEMENT,
    ContainerEdits,
    Device,
    EnvContext,
    Health,
    ProblemKind,
    Severity,
    Share,
    Stats,
    Term,
    encode,
)
from anyaccel.vendors import HOOKS

from anyaccel_testing.check import CheckFailed, demand
from anyaccel_testing.checks.environment import STALE, choose_subsets, list_accepted
from anyaccel_testing.subject import Subject, TestedMachine
from anyaccel_testing.watch import Watch, find_changes, read_process_state

FORK_SECONDS = 30.0
END = b"\0"
MOST_DEVICES = 8
POSSIBLE = {
    "utilization": (0, 1, "a part of one"),
    "temperature_celsius": (-100, 300, "degrees Celsius"),
    "power_watts": (0, 100_000, "watts"),
    "clock_hz": (1_000_000, 100_000_000_000, "hertz"),
    "memory_clock_hz": (1_000_000, 100_000_000_000, "hertz"),
}
"""Possible ranges of statistics with a unit that is easily mistaken, such as percent or millidegrees."""

OF_LIBRARIES = "open file descriptors", "kernel threads"
"""What a vendor's library may keep on this host, by the names of :func:`read_process_state`."""

WHOLE = frozenset(("/", *("/boot", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/usr", "/var")))
"""Directories of the host that no container needs as a whole for a device."""

Answers = dict[str, Any]


def exercise(subject: Subject, machine: TestedMachine, *, replay: bool = True) -> Answers:
    """Call every hook with access to the machine, then every pure hook.

    Returns:
        By name of the call, the answer as JSON data, or the reason of the failure.
    """
    context = machine.replay if replay else machine.context
    devices = machine.known_devices
    of_machine = [name for name in HOOKS if not (name == "info" or HOOKS[name].changes or _is_pure(subject, name))]
    calls = {f"anyaccel_{name}": machine.call(name, devices=lambda: devices, ctx=context) for name in of_machine}
    for device in devices[:MOST_DEVICES]:
        calls |= _make_pure_calls(subject, machine, device)
    return {name: _get_answer(call) for name, call in calls.items()}


def _is_pure(subject: Subject, hook: str) -> bool:
    """Return True if a hook answers from its arguments about devices alone."""
    return HOOKS[hook].pure and bool(subject.plugin.arguments(hook))


def _make_pure_calls(subject: Subject, machine: TestedMachine, device: Device) -> dict[str, Callable[[], Any]]:
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


def _get_answer(call: Callable[[], Any]) -> Any:
    try:
        return encode(call())
    except PluginError as error:
        return error.problem.reason


def check_unchanged(subject: Subject, machine: TestedMachine) -> None:
    """C13: Hooks do not change the process: environment, directory, signals, files, threads, children, output."""
    before = read_process_state()  # taken after the import, which C02 judges
    if subject.live:
        # With hardware, a vendor's library keeps nodes open from its first call on, and may start a thread: NVML of
        # driver 580 does, and keeps both after its shutdown. A second round may not add to what the first one left.
        exercise(subject, machine, replay=False)
        settled = read_process_state()
        before |= {name: settled[name] for name in OF_LIBRARIES}
    exercise(subject, machine, replay=False)
    demand(
        f"the hooks change {change}; undo it, or ask through ctx, which leaves nothing behind"
        for change in find_changes(before, read_process_state())
    )


def check_fork(subject: Subject, machine: TestedMachine) -> None:
    """C14: After detection the process may fork, and the hooks work in the child."""
    before = exercise(subject, machine, replay=False)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _repeat_in_child(subject, machine, before, write_end)
    os.close(write_end)
    heard = _read_message(read_end)
    os.close(read_end)
    # Whether it answered or not: a child that holds a lock of a library may never exit by itself.
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
        failed = [f"{name} fails: {after[name]}" for name in before if _has_newly_failed(before[name], after[name])]
        message = "; ".join(failed[:3])
    except BaseException:  # noqa: BLE001 - the parent reports it
        message = traceback.format_exc(limit=-1)
    os.write(pipe, message.encode(errors="replace")[:4000] + END)
    os._exit(0)  # no exit handlers: they belong to the parent


def _has_newly_failed(before: Any, after: Any) -> bool:
    return isinstance(after, str) and not isinstance(before, str)


def _read_message(pipe: int) -> bytes | None:
    """Read the message of the child up to its end; None on a time-out."""
    heard = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(FORK_SECONDS):
            chunk = os.read(pipe, 4096)
            heard += chunk
            if not chunk or heard.endswith(END):
                return heard
    return None


def check_context_only(subject: Subject) -> None:
    """C22: Hooks read the machine only through ctx, hooks without ctx are pure, and no hook reads os.environ."""
    machines = subject.machines or subject.simulated
    for machine in machines:  # the suite's own reads come first, outside of the watch
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
        demand(_find_environ_readers(subject, machine, first))


def _find_environ_readers(subject: Subject, machine: TestedMachine, before: Answers) -> Iterator[str]:
    with _set_environ(dict.fromkeys(subject.plugin.info.env_vars, STALE)):
        after = exercise(subject, machine)
    changed = [name for name, answer in after.items() if answer != before[name]]
    # A hook with other answers each time is C08's; here the difference would be blamed on os.environ.
    if changed and exercise(subject, machine) == before:
        for name in changed:
            yield (
                f"on {machine.name}, {name} changes with os.environ: read ctx.environ, or the environ argument, which"
                " may be that of another machine or process"
            )


@contextlib.contextmanager
def _set_environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in ``os.environ`` within the context."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()  # a hook may have added variables of its own
        os.environ.update(before)


def check_observations(subject: Subject, machine: TestedMachine) -> None:
    """C25: The results of products, stats, diagnose and container keep the contract, and are possible."""
    demand(_find_observation_faults(subject, machine))


def _find_unit_faults(stats: Mapping[str, Stats], devices: Sequence[Device]) -> Iterator[str]:
    memory = {device.id: device.memory_bytes for device in devices}
    for device_id, seen in stats.items():
        used, total = seen.memory_used_bytes, memory.get(device_id)
        if used is not None and total is not None and used > total:
            yield (
                f"Stats.memory_used_bytes must be bytes, at most Device.memory_bytes (got {used} of {total} for"
                f" {device_id!r})"
            )
        for name, (least, most, unit) in POSSIBLE.items():
            value = getattr(seen, name)
            if value and not least <= value <= most:  # 0 is a clock that stands still
                yield f"Stats.{name} must be {unit}, from {least} to {most} (got {value:g} for {device_id!r})"


def _make_observing_calls(subject: Subject, machine: TestedMachine) -> dict[str, Callable[[], Any]]:
    """Return calls of the optional hooks on the state of devices or of the vendor, by name."""
    # A pure hook is asked about devices that a launch can get; validate may refuse all of them together.
    usable = tuple(device for device in machine.devices if device.usable)
    given = max(list_accepted(subject, choose_subsets(usable)), key=len, default=())
    found: dict[str, Callable[[], Any]] = {}
    for name, hook in HOOKS.items():
        if not hook.required and not hook.changes and {"environ", "request"}.isdisjoint(subject.plugin.arguments(name)):
            devices = given if _is_pure(subject, name) else machine.devices
            found[name] = machine.call(name, devices=partial(tuple, devices), ctx=machine.replay)
    return found


def _find_observation_faults(subject: Subject, machine: TestedMachine) -> Iterator[str]:
    devices = machine.devices
    for device in devices:
        if device.health is Health.UNHEALTHY and not device.health_reason.strip():
            yield f"an unhealthy device must say why (got no Device.health_reason for {device.id!r})"
    answers: dict[str, Any] = {}
    for name, call in _make_observing_calls(subject, machine).items():
        try:
            answers[f"anyaccel_{name}"] = call()
        except PluginError as error:
            if error.problem.kind is ProblemKind.CONTRACT or HOOKS[name].seconds is not None:
                yield f"anyaccel_{name}: {error.problem.reason}"
    unknown = set(answers.get("anyaccel_stats", ())) - {device.id for device in devices}
    if unknown:
        yield f"anyaccel_stats tells of {', '.join(sorted(unknown))}, which it was not asked about; use Device.id"
    yield from _find_unit_faults(answers.get("anyaccel_stats", {}), devices)
    for finding in answers.get("anyaccel_diagnose", ()):
        if finding.severity is not Severity.OK and not finding.remedy.strip():
            yield f"anyaccel_diagnose finds {finding.reason!r} without a way out; put it into Finding.remedy"
    yield from _find_container_faults(answers.get("anyaccel_container"))


def _find_container_faults(container: ContainerEdits | None) -> Iterator[str]:
    if container is None:
        return
    mounts = container.mounts
    for path in (*container.nodes, *(each.source for each in mounts), *(each.target for each in mounts)):
        if not path.startswith("/"):
            yield f"anyaccel_container must name absolute paths (got {path!r})"
    for mount in mounts:
        if os.path.normpath(mount.source) in WHOLE:
            yield (
                f"anyaccel_container must not mount {mount.source!r} of the host, which shows a container far more than"
                " devices; name the vendor's files"
            )
