"""One vendor's plug-in in a process of its own: the only way to its hooks.

The process is started by the first call, keeps the devices that it detected, and is asked by their ids. It ends with
this process, or when nobody has called it for a minute. A process that dies is started again once; when it dies again,
the vendor has failed until it is asked to detect once more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from anyaccel.errors import PluginError
from anyaccel.linux.fork import renew_in_child
from anyaccel.model import (
    ContainerEdits,
    Device,
    EnvContext,
    EnvEdits,
    PluginInfo,
    Problem,
    ProblemKind,
    Product,
    Share,
    Term,
    Value,
    replace,
)
from anyaccel.model.wire import build, decode, encode
from anyaccel.probe.machine import Machine
from anyaccel.vendors import DEADLINE_SECONDS, PRELOAD, TASKS, contract
from anyaccel.vendors.discovery import ALLOW_VARIABLE, DENY_VARIABLE, Source, installed, problem_of
from anyaccel.vendors.guarded import ANSWER_LIMIT, GuardedProcess, Outcome, call_all, close_processes

SIMULATION_LIMIT = 256 << 20
"""Bytes of an answer of which the core makes up most itself."""
MOST_DEATHS = 2
_MOST_EDITS = 64

Answers = dict[str, tuple[Source, Outcome]]
Enough = Callable[[Mapping[str, Outcome]], "float | None"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")


class VendorProcess:
    """A plug-in in its process.

    Every method may be called by any thread, and raises :class:`~anyaccel.errors.PluginError` when the hook fails, does
    not answer in time, or answers what the contract does not allow.

    Args:
        source: Where the plug-in comes from.

    Attributes:
        source: Likewise.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.process = GuardedProcess(*PRELOAD)
        path: list[object] = [*sys.path]
        self._path = [entry for entry in path if isinstance(entry, str)]
        self._starts = 0
        self._deaths: dict[str, int] = {}
        self._detected: Outcome | None = None
        self._last_words: Outcome | None = None
        self._known: dict[str, Device] = {}
        self._said: dict[str, Any] = {}
        self._info: tuple[Any, PluginInfo] | None = None
        self._edits: dict[object, tuple[object, EnvEdits]] = {}
        self._reasons: dict[tuple[Term, tuple[str, ...]], tuple[tuple[Device, ...], str | None]] = {}

    @property
    def info(self) -> PluginInfo:
        """What the plug-in says about itself."""
        said = self._hello()["info"]
        if self._info is None or self._info[0] != said:
            self._info = said, self.checked("info", said)
        return self._info[1]

    def implements(self, hook: str) -> bool:
        """Whether the plug-in has a hook of this name."""
        return hook in self._hello()["hooks"]

    def env(self, devices: Sequence[Device], ctx: EnvContext, *, seconds: float | None = None) -> EnvEdits:
        """Edits that make a worker see exactly these devices. Answers are kept."""
        key = tuple(device.id for device in devices), ctx.mask
        asked = tuple(devices), ctx.devices, ctx.shares, dict(ctx.environ)
        kept = self._edits.get(key)
        if kept is not None and kept[0] == asked:
            return kept[1]
        shares = [_encode_share(share) for share in ctx.shares.values()]
        payload = {"shares": shares, "environ": asked[3], "mask": ctx.mask}
        with self.process:
            edits: EnvEdits = self.ask("env", devices, seconds=seconds, everything=ctx.devices, **payload)
        if len(self._edits) >= _MOST_EDITS:
            self._edits.clear()
        self._edits[key] = asked, edits
        return edits

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Why the hardware cannot serve a term with exactly these devices; None when it can. Answers are kept.

        What the vendor said of its numbers is looked at first, so that placement asks for sets of these numbers only.
        """
        refused = self.info.refusal(term, devices)
        if refused or not self.implements("anyaccel_validate"):
            return refused
        key = term, tuple(device.id for device in devices)
        kept = self._reasons.get(key)
        if kept is None or kept[0] != tuple(devices):
            kept = self._reasons[key] = tuple(devices), self.ask("validate", devices, request=encode(term))
        return kept[1]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """What a container needs so that exactly these devices work inside."""
        edits: ContainerEdits = self.ask("container", devices)
        return edits

    def ask(
        self,
        name: str,
        devices: Sequence[Device] = (),
        *,
        seconds: float | None = None,
        everything: Sequence[Device] = (),
        **told: Any,
    ) -> Any:
        """Ask a hook; its answer is compared with the contract.

        Args:
            name: Name of the hook, without ``anyaccel_``.
            devices: The devices that it is about.
            seconds: Time that it may take; that of the contract when None.
            everything: All devices of the vendor, where it needs them.
            told: What else it is told, as JSON data.
        """
        seconds = seconds or contract.HOOKS[name].seconds or DEADLINE_SECONDS
        return self.checked(name, self.call(name, told, seconds, devices=devices, everything=everything), devices)

    def checked(self, name: str, data: Any, devices: Sequence[Device] = ()) -> Any:
        """Build the answer of a hook from data, and compare it with the contract.

        Args:
            name: Name of the hook, without ``anyaccel_``.
            data: The answer as its process sent it.
            devices: The devices that it was asked about.
        """
        hook = contract.HOOKS[name]
        value = build(hook.answer, data)
        told = {"devices": devices, "device": next(iter(devices), None), "vendor": self.source.vendor}
        self._check(hook.faults(value, told, self), f"anyaccel_{name}")
        return value

    def call(
        self,
        task: str,
        payload: Mapping[str, Any],
        seconds: float,
        *,
        devices: Sequence[Device] = (),
        everything: Sequence[Device] = (),
    ) -> Any:
        """Call a function of :mod:`anyaccel.vendors.tasks` in the process; returns its answer as JSON data.

        Args:
            task: Name of the function.
            payload: What it needs.
            seconds: Time that it may take.
            devices: The devices that it is about.
            everything: All devices of the vendor, where it needs them.
        """
        full = {**payload, "devices": [each.raw_id for each in devices]}
        full["everything"] = [each.raw_id for each in everything]
        outcome = call_vendors({self: (task, full, (*devices, *everything))}, seconds)[self]
        problem = problem_in(self.source, outcome, f"anyaccel_{task}")
        if problem is not None:
            raise PluginError(problem)
        if "value" not in outcome.value:
            self._refuse("its process sent what is no answer", f"anyaccel_{task}")
        return outcome.value["value"]

    def completed(self, payload: Mapping[str, Any], devices: Iterable[Device]) -> dict[str, Any]:
        """A payload with what the process does not know yet; called with the process entered, which starts it."""
        self.process.start()
        full = dict(payload)
        if self.process.starts != self._starts:
            self._starts = self.process.starts
            self._known.clear()
            full["load"] = {"source": encode(self.source), "path": self._path}
        new = {each.raw_id: each for each in devices if self._known.get(each.raw_id) is not each}
        unknown = {name: device for name, device in new.items() if self._known.get(name) != device}
        if unknown:
            full["introduce"] = [encode(unqualified(device)) for device in unknown.values()]
        self._known |= new
        return full

    def heard(self, task: str, outcome: Outcome) -> None:
        """Take notice of what came of a call."""
        if outcome.fault in {"died", "timeout"}:
            self._deaths[task] = self._deaths.get(task, 0) + 1
            self._last_words = outcome
        else:
            self._deaths.pop(task, None)
        if isinstance(outcome.value, dict) and outcome.value.keys() >= {"info", "hooks"}:
            self._said = {name: outcome.value[name] for name in ("info", "hooks")}
        if task == "detect":
            self._reasons.clear()
            self._edits.clear()
            self._known.clear()
            self._detected = outcome

    def learn(self, outcome: Outcome, devices: Iterable[Device]) -> None:
        """Take notice of the devices that the process has just detected."""
        with self.process:
            if self._detected is outcome and self.process.starts == self._starts:
                self._known = {device.raw_id: device for device in devices} | self._known

    def refusal(self, task: str) -> Outcome | None:
        """The outcome of a call that is not made, since the process has died too often; None when it is made."""
        if task == "detect":
            self._deaths.clear()
        return self._last_words if self._deaths.get(task, 0) >= MOST_DEATHS else None

    def may_try_again(self, task: str, outcome: Outcome) -> bool:
        """Whether a call is made once more, in a new process."""
        return outcome.fault == "died" and self._deaths.get(task, 0) < MOST_DEATHS

    def _hello(self) -> dict[str, Any]:
        if not self._said:
            self.call("hello", {"machine": None}, DEADLINE_SECONDS)
        if not self._said:
            self._refuse("its process sent what is no answer", "anyaccel_info")
        return self._said

    def _check(self, faults: Iterator[str], hook: str) -> None:
        found = list(faults)
        if found:
            self._refuse("; ".join(found), hook)

    def _refuse(self, reason: str, hook: str) -> None:
        raise PluginError(problem_of(self.source, ProblemKind.CONTRACT, f"{reason}.", hook))


def call_vendors(  # noqa: C901 - who waits, who has answered and who is tried again, told in one place
    calls: Mapping[VendorProcess, tuple[str, Mapping[str, Any], Sequence[Device]]],
    seconds: float,
    *,
    limit: int = ANSWER_LIMIT,
    enough: Enough | None = None,
) -> dict[VendorProcess, Outcome]:
    """Call a function in the processes of several vendors at once.

    Args:
        calls: By vendor, the name of the function of :mod:`anyaccel.vendors.tasks`, its payload, and devices that the
            payload names by id.
        seconds: Time that each may take.
        limit: Bytes that an answer may have.
        enough: Told what has come in, by vendor, after each answer; returns seconds after which the others are given
            up, or None when all of the time is theirs.
    """
    began = time.monotonic()
    outcomes: dict[VendorProcess, Outcome] = {}
    owners = {vendor.process: vendor for vendor in calls}
    with contextlib.ExitStack() as rest:
        held = {vendor: contextlib.ExitStack() for vendor in sorted(calls, key=lambda vendor: id(vendor.process))}
        for vendor, entered in held.items():  # in one order for all threads
            rest.enter_context(entered).enter_context(vendor.process)
        waiting = set(calls)

        def done(vendor: VendorProcess, outcome: Outcome) -> None:
            outcomes[vendor] = outcome
            waiting.discard(vendor)
            held[vendor].close()  # others need not wait for those that are slow

        def came(process: GuardedProcess, outcome: Outcome) -> None:
            vendor = owners[process]
            vendor.heard(calls[vendor][0], outcome)
            outcomes[vendor] = outcome
            if not vendor.may_try_again(calls[vendor][0], outcome):
                done(vendor, outcome)

        def patience() -> float | None:
            came_in = {vendor.source.vendor: each for vendor, each in outcomes.items() if vendor not in waiting}
            return enough(came_in) if enough else None

        for vendor, (task, *_) in calls.items():
            if (refusal := vendor.refusal(task)) is not None:
                done(vendor, refusal)
        left = seconds
        while waiting and left > 0:
            try:
                payloads = {}
                for vendor in sorted(waiting, key=lambda vendor: vendor.source.vendor):
                    try:
                        full = vendor.completed(*calls[vendor][1:])
                    except OSError as error:  # no descriptor or no process is left
                        reason = f"its process cannot be started: {error}"
                        done(vendor, Outcome(fault="died", reason=reason))
                    else:
                        payloads[vendor.process] = (f"{TASKS}:{calls[vendor][0]}", full)
                call_all(payloads, left, limit=limit, enough=patience, came=came)
            except BaseException:
                for vendor in waiting:
                    vendor.process.close()  # it has not heard of what it is told once
                raise
            left = seconds - (time.monotonic() - began)
    return outcomes


def problem_in(source: Source, outcome: Outcome, hook: str) -> Problem | None:
    """The problem that an outcome tells of: the plug-in's own, or that its process did not live to answer."""
    if outcome.fault:
        return problem_of(source, ProblemKind(outcome.fault), f"{outcome.reason}.", hook, outcome.details)
    if not isinstance(outcome.value, dict):
        return problem_of(source, ProblemKind.CONTRACT, "its process sent what is no answer.", hook)
    if "problem" in outcome.value:
        try:
            return decode(Problem, outcome.value["problem"])
        except ValueError as error:
            return problem_of(source, ProblemKind.CONTRACT, f"{error}.", hook)
    return None


def answer_in(
    name: str, source: Source, outcome: Outcome, devices: Sequence[Device] = ()
) -> tuple[Any, Problem | None]:
    """The answer of a hook in an outcome, or the problem that it tells of.

    Args:
        name: Name of the hook, without ``anyaccel_``.
        source: The plug-in.
        outcome: What came of the call.
        devices: The devices that it was asked about.
    """
    problem = problem_in(source, outcome, f"anyaccel_{name}")
    if problem is not None:
        return None, problem
    try:
        return process_of(source).checked(name, outcome.value.get("value"), devices), None
    except PluginError as error:
        return None, error.problem


def qualified(device: Device) -> Device:
    """The device with ids that begin with its vendor."""
    return _renamed(device, lambda name: f"{device.vendor}/{name}")


def unqualified(device: Device) -> Device:
    """The device with ids as its vendor knows them."""
    if device.raw_id == device.id:
        return device
    return _renamed(device, lambda name: name.removeprefix(f"{device.vendor}/"))


def _renamed(device: Device, name: Callable[[str], str]) -> Device:
    links = {name(peer): strength for peer, strength in device.links.items()}
    return replace(device, id=name(device.id), parent=device.parent and name(device.parent), links=links)


def _encode_share(share: Share) -> Any:
    """A share of a device that is named by its id alone, since the process knows it."""
    return encode(replace(share, device=Device(id=share.device.raw_id, index=0, model="")))


_vendors: dict[tuple[Source, tuple[str, ...]], VendorProcess] = {}
_asked: dict[tuple[str, tuple[str, ...]], VendorProcess] = {}
_lock = renew_in_child(allocate_lock())


def process_of(source: Source) -> VendorProcess:
    """The process of a plug-in, not started before the first call."""
    key = source, tuple(sys.path)
    with _lock:
        if key not in _vendors:
            _vendors[key] = VendorProcess(source)
        return _vendors[key]


def vendor_process(name: str) -> VendorProcess:
    """The plug-in of one vendor: that which was asked for its devices last, whatever environment named it.

    Raises:
        PluginError: When it is not installed.
    """
    asked = _asked.get((name, tuple(sys.path)))
    return asked or _find(name, os.environ.get(ALLOW_VARIABLE), os.environ.get(DENY_VARIABLE), tuple(sys.path))


@functools.lru_cache(maxsize=64)
def _find(name: str, *_: object) -> VendorProcess:
    sources, problems = installed()
    for source in sources:
        if source.vendor == name:
            return process_of(source)
    for problem in problems:
        if problem.vendor == name:
            raise PluginError(problem)
    missing = problem_of(Source(vendor=name, target=""), ProblemKind.LOAD, "no plug-in of that name is installed.")
    raise PluginError(missing)


def ask(
    task: str,
    machine: Machine,
    *,
    timeout: float = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
    vendors: Iterable[str] | None = None,
    sources: Sequence[Source] | None = None,
    devices: Mapping[str, Sequence[Device]] | None = None,
    enough: Enough | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Answers, list[Problem]]:
    """Run one function of :mod:`anyaccel.vendors.tasks` for every installed plug-in.

    Args:
        task: Name of the function.
        machine: The machine that it is about.
        timeout: Seconds that each vendor may take.
        environ: The environment that detection sees; that of this process when None.
        vendors: Vendors to ask; all when None.
        sources: The plug-ins of which these are chosen; those that are installed when None.
        devices: Devices that it is about, by vendor.
        enough: As of :func:`call_vendors`.
        more: What else the function is told, by vendor.

    Returns:
        Outcomes by vendor, and the problems that kept a plug-in from being asked.

    Raises:
        UsageError: When ``ANYACCEL_PLUGINS`` names a vendor that has no plug-in.
    """
    environ = dict(os.environ if environ is None else environ)
    problems: list[Problem] = []
    if sources is None:
        sources, problems = installed(environ)
    wanted = None if vendors is None else set(vendors)
    chosen = [process_of(source) for source in sources if wanted is None or source.vendor in wanted]
    shared = {"machine": encode(machine), "environ": environ, "adopt": True, "seconds": timeout}
    calls: dict[VendorProcess, tuple[str, Mapping[str, Any], Sequence[Device]]] = {}
    for each in chosen:
        about = (devices or {}).get(each.source.vendor, ())
        told = {**shared, **(more or {}).get(each.source.vendor, {})}
        calls[each] = task, {**told, "devices": [device.raw_id for device in about]}, about
    limit = SIMULATION_LIMIT if machine.simulated else ANSWER_LIMIT
    if task == "detect":
        _asked.update({(each.source.vendor, tuple(sys.path)): each for each in chosen})
    outcomes = call_vendors(calls, timeout, limit=limit, enough=enough)
    return {each.source.vendor: (each.source, outcomes[each]) for each in chosen}, problems


class Known(Value):
    """What a plug-in knows without a machine.

    Attributes:
        info: What it says about itself.
        products: Its products.
    """

    info: PluginInfo
    products: tuple[Product, ...]


def known() -> tuple[list[Known], list[Problem]]:
    """Ask the installed plug-ins what they know without a machine; also the problems of those that cannot say."""
    answers, problems = ask("products", Machine())
    found = []
    for source, outcome in answers.values():
        products, problem = answer_in("products", source, outcome)
        try:
            if problem is None:
                found.append(Known(info=process_of(source).info, products=products))
                continue
        except PluginError as error:
            problem = error.problem
        problems.append(problem)
    return found, problems


def close(*, interpreter: bool = True) -> None:
    """End the processes of all vendors. The next call starts them again.

    Args:
        interpreter: Whether what forks them ends as well, which knows no plug-in and takes longest to start.
    """
    _find.cache_clear()
    with _lock:
        ended = list(_vendors.values())
        _vendors.clear()
        _asked.clear()
    if interpreter:
        close_processes()
        return
    for vendor in ended:
        vendor.process.close()
