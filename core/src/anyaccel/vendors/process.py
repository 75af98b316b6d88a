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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from anyaccel.errors import PluginError
from anyaccel.model import (
    ContainerEdits,
    Device,
    EnvContext,
    EnvEdits,
    Fractional,
    PluginInfo,
    Problem,
    ProblemKind,
    Product,
    Share,
    Term,
    replace,
)
from anyaccel.model.wire import decode, encode
from anyaccel.probe.guard import ANSWER_LIMIT, GuardedProcess, Outcome, call_all, close_all
from anyaccel.probe.machine import Machine
from anyaccel.vendors import DEADLINE_SECONDS, contract
from anyaccel.vendors.discovery import ALLOW_VARIABLE, DENY_VARIABLE, Source, installed, problem_of

TASKS = "anyaccel.vendors.tasks"
"""The module that runs in a vendor's process; named, since nobody else must import it."""
ANSWER_SECONDS = 5.0
"""Time for a pure hook."""
SIMULATION_LIMIT = 256 << 20
"""Bytes of an answer of which the core makes up most itself."""
MOST_DEATHS = 2

T = TypeVar("T")
Answers = dict[str, tuple[Source, Outcome]]


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
        self.process = GuardedProcess(TASKS)
        self._path = list(sys.path)
        self._starts = 0
        self._deaths = 0
        self._last_words: Outcome | None = None
        self._known: dict[str, Device] = {}
        self._said: dict[str, Any] = {}
        self._reasons: dict[tuple[Term, tuple[str, ...]], str | None] = {}

    @property
    def info(self) -> PluginInfo:
        """What the plug-in says about itself."""
        return self._decoded(PluginInfo, self._hello()["info"], "anyaccel_info")

    def implements(self, hook: str) -> bool:
        """Whether the plug-in has a hook of this name."""
        return hook in self._hello()["hooks"]

    def env(self, devices: Sequence[Device], ctx: EnvContext, *, seconds: float = ANSWER_SECONDS) -> EnvEdits:
        """Edits that make a worker see exactly these devices."""
        shares = [_encode_share(share) for share in ctx.shares.values()]
        payload = {"shares": shares, "environ": dict(ctx.environ), "mask": ctx.mask}
        with self.process:
            value = self.call("env", payload, seconds, devices=devices, everything=ctx.devices)
            edits = self._decoded(EnvEdits, value, "anyaccel_env")
            self._check(contract.env_faults(edits, self.info.env_vars), "anyaccel_env")
        return edits

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Why the hardware cannot serve a term with exactly these devices; None when it can. Answers are kept."""
        if not self.implements("anyaccel_validate"):
            return None
        key = term, tuple(device.id for device in devices)
        with self.process:
            known = all(self._is_known(device) for device in devices)
        if not known or key not in self._reasons:
            reason = self.call("validate", {"term": encode(term)}, devices=devices)
            if reason is not None:
                self._check(contract.reason_faults(reason), "anyaccel_validate")
            self._reasons[key] = reason
        return self._reasons[key]

    def fractional(self, device: Device) -> Fractional:
        """Whether several holders may share the device."""
        return self._decoded(Fractional, self.call("fractional", {}, devices=[device]), "anyaccel_fractional")

    def products(self) -> tuple[Product, ...]:
        """The products that the plug-in knows."""
        value = self.call("products", {}, DEADLINE_SECONDS)
        if not isinstance(value, list):
            self._refuse("it must return a list of products", "anyaccel_products")
        return tuple(self._decoded(Product, each, "anyaccel_products") for each in value)

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """What a container needs so that exactly these devices work inside."""
        value = self.call("container", {}, devices=devices)
        edits = self._decoded(ContainerEdits, value, "anyaccel_container")
        self._check(contract.container_faults(edits), "anyaccel_container")
        return edits

    def call(
        self,
        task: str,
        payload: Mapping[str, Any],
        seconds: float = ANSWER_SECONDS,
        *,
        devices: Sequence[Device] = (),
        everything: Sequence[Device] = (),
    ) -> Any:
        """Call a function of :mod:`anyaccel.vendors.tasks` in the process; returns the hook's answer as JSON data.

        Args:
            task: Name of the function.
            payload: What it needs.
            seconds: Time that it may take.
            devices: The devices that it is about.
            everything: All devices of the vendor, where it needs them.
        """
        full = {**payload, "devices": [raw_id(each) for each in devices]}
        full["everything"] = [raw_id(each) for each in everything]
        outcome = call_vendors({self: (task, full, (*devices, *everything))}, seconds)[self]
        problem = problem_in(self.source, outcome, f"anyaccel_{task}")
        if problem is not None:
            raise PluginError(problem)
        return outcome.value["value"]

    def printed(self) -> str:
        """The end of what the plug-in has printed since its process was started."""
        return self.process.printed()

    def completed(self, payload: Mapping[str, Any], devices: Iterable[Device]) -> dict[str, Any]:
        """A payload with what the process does not know yet; called with the process entered, which starts it."""
        self.process.start()
        full = dict(payload)
        if self.process.starts != self._starts:
            self._starts = self.process.starts
            self._known.clear()
            full["load"] = {"source": encode(self.source), "path": self._path}
        new = {raw_id(each): each for each in devices if self._known.get(raw_id(each)) is not each}
        unknown = {name: device for name, device in new.items() if not self._is_known(device)}
        if unknown:
            self._reasons.clear()  # other devices may go by the same ids, such as those of another simulation
            full["introduce"] = [encode(_raw(device)) for device in unknown.values()]
        self._known |= new
        return full

    def _is_known(self, device: Device) -> bool:
        known = self._known.get(raw_id(device))
        return known is device or known == device

    def heard(self, task: str, outcome: Outcome) -> None:
        """Take notice of what came of a call."""
        if outcome.fault in {"died", "timeout"}:
            self._deaths += 1
            self._last_words = outcome
        elif isinstance(outcome.value, dict) and "info" in outcome.value:
            self._said = {name: outcome.value[name] for name in ("info", "hooks")}
        if task == "detect":
            self._reasons.clear()
            self._known.clear()
            self._deaths *= bool(outcome.fault)

    def learn(self, devices: Iterable[Device]) -> None:
        """Take notice of the devices that the process has just detected."""
        with self.process:
            if self.process.starts == self._starts:
                self._known = {raw_id(device): device for device in devices}

    def refusal(self, task: str) -> Outcome | None:
        """The outcome of a call that is not made, since the process has died too often; None when it is made."""
        if task == "detect":
            self._deaths = 0
        return self._last_words if self._deaths >= MOST_DEATHS else None

    def may_try_again(self, outcome: Outcome) -> bool:
        """Whether a call is made once more, in a new process."""
        return outcome.fault == "died" and 0 < self._deaths < MOST_DEATHS

    def _hello(self) -> dict[str, Any]:
        if not self._said:
            self.call("hello", {}, DEADLINE_SECONDS)
        return self._said

    def _decoded(self, kind: type[T], data: Any, hook: str) -> T:
        try:
            return decode(kind, data)
        except ValueError as error:
            raise PluginError(problem_of(self.source, ProblemKind.CONTRACT, f"{error}.", hook)) from error

    def _check(self, faults: Iterator[str], hook: str) -> None:
        found = list(faults)
        if found:
            self._refuse("; ".join(found), hook)

    def _refuse(self, reason: str, hook: str) -> None:
        raise PluginError(problem_of(self.source, ProblemKind.CONTRACT, f"{reason}.", hook))


def call_vendors(
    calls: Mapping[VendorProcess, tuple[str, Mapping[str, Any], Sequence[Device]]],
    seconds: float,
    *,
    limit: int = ANSWER_LIMIT,
    enough: Callable[[Mapping[GuardedProcess, Outcome]], float | None] | None = None,
) -> dict[VendorProcess, Outcome]:
    """Call a function in the processes of several vendors at once.

    Args:
        calls: By vendor, the name of the function of :mod:`anyaccel.vendors.tasks`, its payload, and devices that the
            payload names by id.
        seconds: Time that each may take.
        limit: Bytes that an answer may have.
        enough: As of :func:`anyaccel.probe.guard.call_all`.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as entered:
        for vendor in sorted(calls, key=lambda vendor: id(vendor.process)):  # in one order for all threads
            entered.enter_context(vendor.process)
        outcomes = {vendor: refusal for vendor, (task, *_) in calls.items() if (refusal := vendor.refusal(task))}
        left = seconds
        waiting = [vendor for vendor in calls if vendor not in outcomes]
        while waiting:
            owners = {vendor.process: vendor for vendor in waiting}
            payloads = {
                vendor.process: (f"{TASKS}:{calls[vendor][0]}", vendor.completed(*calls[vendor][1:]))
                for vendor in waiting
            }
            for process, outcome in call_all(payloads, left, limit=limit, enough=enough).items():
                vendor = owners[process]
                vendor.heard(calls[vendor][0], outcome)
                outcomes[vendor] = outcome
            left = seconds - (time.monotonic() - began)
            waiting = [vendor for vendor in waiting if left > 0 and vendor.may_try_again(outcomes[vendor])]
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


def raw_id(device: Device) -> str:
    """The id by which a device's own vendor knows it; the core's begins with the vendor where two use the same one."""
    return device.id.removeprefix(f"{device.vendor}/")


def qualified(device: Device) -> Device:
    """The device with ids that begin with its vendor."""
    return _renamed(device, lambda name: f"{device.vendor}/{name}")


def _raw(device: Device) -> Device:
    """The device with ids as its vendor knows them."""
    if raw_id(device) == device.id:
        return device
    return _renamed(device, lambda name: name.removeprefix(f"{device.vendor}/"))


def _renamed(device: Device, name: Callable[[str], str]) -> Device:
    links = {name(peer): strength for peer, strength in device.links.items()}
    return replace(device, id=name(device.id), parent=device.parent and name(device.parent), links=links)


def _encode_share(share: Share) -> Any:
    """A share of a device that is named by its id alone, since the process knows it."""
    return encode(replace(share, device=Device(id=raw_id(share.device), index=0, model="")))


_vendors: dict[tuple[Source, tuple[str, ...]], VendorProcess] = {}
_lock = threading.Lock()


def process_of(source: Source) -> VendorProcess:
    """The process of a plug-in, not started before the first call."""
    key = source, tuple(sys.path)
    with _lock:
        if key not in _vendors:
            _vendors[key] = VendorProcess(source)
        return _vendors[key]


def vendor_process(name: str) -> VendorProcess:
    """The plug-in of one vendor.

    Raises:
        PluginError: When it is not installed.
    """
    return _find(name, os.environ.get(ALLOW_VARIABLE), os.environ.get(DENY_VARIABLE), tuple(sys.path))


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
    enough: Callable[[Mapping[GuardedProcess, Outcome]], float | None] | None = None,
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
        enough: As of :func:`anyaccel.probe.guard.call_all`.

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
        calls[each] = task, {**shared, "devices": [raw_id(device) for device in about]}, about
    limit = SIMULATION_LIMIT if machine.simulated else ANSWER_LIMIT
    outcomes = call_vendors(calls, timeout, limit=limit, enough=enough)
    return {each.source.vendor: (each.source, outcomes[each]) for each in chosen}, problems


def close() -> None:
    """End the processes of all vendors. The next call starts them again."""
    close_all()
    _find.cache_clear()
    with _lock:
        _vendors.clear()
