"""A vendor's plug-in in a process of its own; no other process runs the hooks.

The first call starts the process. Later calls name devices by id. The process ends with this process, or after a minute
without a call. A process that dies is restarted once. If it dies again, the vendor counts as failed until the next
detection.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from anyaccel.errors import PluginError
from anyaccel.linux import renew_in_child
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
    decode,
    encode,
    read,
    replace,
)
from anyaccel.probe import Machine
from anyaccel.vendors import DEADLINE_SECONDS, PRELOAD, TASKS, contract
from anyaccel.vendors.discovery import Source, installed, make_problem
from anyaccel.vendors.guarded import ANSWER_LIMIT, NO_ANSWER, GuardedProcess, Outcome, call_all

SIMULATION_LIMIT = 256 << 20
"""Most bytes of an answer about a simulated machine."""
MOST_DEATHS = 2
MOST_EDITS = 256
"""Most sets of devices whose edits are kept; each comes with a copy of the environment."""
MOST_REASONS = 4096
"""Most answers of ``anyaccel_validate`` that are kept, each for a term and a set of devices."""

MOST_PATHS = 4
"""Most module paths whose vendors' processes are kept: a cell of a notebook may extend the path at each run."""

Answers = dict[str, tuple[Source, Outcome]]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class VendorProcess(GuardedProcess):
    """A plug-in in its own process.

    Any thread may call a hook. A hook raises :class:`~anyaccel.errors.PluginError` when the call fails, takes too long
    or breaks the contract.

    Args:
        source: Origin of the plug-in.

    Attributes:
        source: Origin of the plug-in.
        deaths: By task, the failed outcomes since the last answer.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(*PRELOAD)
        self.source = source
        self.deaths: dict[str, list[Outcome]] = {}
        path: list[object] = [*sys.path]
        self._path = [entry for entry in path if isinstance(entry, str)]  # pathlib objects on sys.path have no effect
        self._known: dict[str, Device] = {}
        self._said: dict[str, Any] = {}
        self._info: tuple[Any, PluginInfo] | None = None
        self._edits: dict[tuple[str, ...], tuple[tuple[Any, ...], EnvEdits]] = {}
        self._reasons: dict[tuple[Term, tuple[str, ...]], tuple[tuple[Device, ...], str | None]] = {}

    @property
    def info(self) -> PluginInfo:
        """The identity of the plug-in."""
        said = self._hello()["info"]
        if self._info is None or self._info[0] != said:
            self._info = said, check_answer(self.source, "info", said)
        return self._info[1]

    def implements(self, hook: str) -> bool:
        """Return whether the plug-in has a hook, given with ``anyaccel_``."""
        return hook in self._hello()["hooks"]

    def env(self, devices: Sequence[Device], ctx: EnvContext, *, seconds: float | None = None) -> EnvEdits:
        """Return the edits that make a worker see exactly the given devices.

        The last answer for the same devices is kept until the next detection, since a pool asks about the same ones for
        each worker, and the hook is pure.
        """
        shares = [_encode_share(share) for share in ctx.shares.values()]
        payload = {"shares": shares, "environ": dict(ctx.environ), "mask": ctx.mask}
        key, question = tuple([device.id for device in devices]), (tuple(devices), ctx.devices, payload)
        kept = self._edits.get(key)
        if kept is None or kept[0] != question:
            edits: EnvEdits = self.ask("env", devices, seconds=seconds, everything=ctx.devices, **payload)
            if len(self._edits) >= MOST_EDITS:
                self._edits.clear()
            kept = self._edits[key] = question, edits
        return kept[1]

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Return the reason why the hardware cannot serve a term with exactly these devices; None when it can.

        ``PluginInfo.counts`` is checked first, and answers are kept until the next detection, since placement asks
        about the same sets again and again.
        """
        refused = self.info.refusal(term, devices)
        if refused or not self.implements("anyaccel_validate"):
            return refused
        key = term, tuple(device.id for device in devices)
        kept = self._reasons.get(key)
        if kept is None or kept[0] != tuple(devices):
            if len(self._reasons) >= MOST_REASONS:  # a scheduler may get requests of ever new shares
                self._reasons.clear()
            kept = self._reasons[key] = tuple(devices), self.ask("validate", devices, request=encode(term))
        return kept[1]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the edits by which exactly these devices work in a container."""
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
        """Ask a hook, and compare the answer with the contract.

        Args:
            name: Name of the hook, without ``anyaccel_``.
            devices: The devices of the call.
            seconds: Deadline; the deadline of the contract when None.
            everything: All devices of the vendor, for ``anyaccel_env``.
            told: Further arguments, as JSON data.
        """
        seconds = seconds or contract.HOOKS[name].seconds or DEADLINE_SECONDS
        outcome = call_all({self: (name, told, devices, everything)}, seconds)[self]
        return read_answer(self.source, name, outcome, devices)

    def prepare(self, call: Any) -> tuple[str, Any] | Outcome:
        """Return the function and payload of a call, with the devices that the process does not know yet.

        Args:
            call: Name of the function of :mod:`anyaccel.vendors.tasks`, its payload, its devices, and all devices of
                the vendor. A call of a process that has died too often is not made.
        """
        task, payload, devices, everything = call
        deaths = self.deaths.get(task, [])
        if len(deaths) >= MOST_DEATHS:  # each further call would cost a process and its time limit
            return deaths[-1]
        full = {**payload, "devices": [each.raw_id for each in devices]}
        full["everything"] = [each.raw_id for each in everything]
        made = super().prepare((f"{TASKS}:{task}", full))
        if isinstance(made, Outcome):
            return made
        if not self.running.pid:
            self._known.clear()
            full["load"] = {"source": encode(self.source), "path": self._path}
        # Identity first: most calls are about devices of the last call, and a comparison takes longer.
        new = {each.raw_id: each for each in (*devices, *everything) if self._known.get(each.raw_id) is not each}
        unknown = {name: device for name, device in new.items() if self._known.get(name) != device}
        if unknown:
            full["introduce"] = [encode(unqualified(device)) for device in unknown.values()]
        self._known |= new
        return made

    def note_outcome(self, call: Any, outcome: Outcome) -> bool:
        """Store the outcome of a call; return whether to repeat the call in a new process."""
        task, *_ = call
        if isinstance(outcome.value, dict) and outcome.value.keys() >= {"info", "hooks"}:
            self._said = {name: outcome.value[name] for name in ("info", "hooks")}
        if task == "detect":  # a new detection may change what devices are and can do
            self._edits.clear()
            self._reasons.clear()
            self._known.clear()
        if outcome.fault not in {"died", "timeout"}:
            self.deaths.pop(task, None)
            return False
        self.deaths.setdefault(task, []).append(outcome)
        # A process may die of a transient fault of the driver; a hang would only take as long again.
        return outcome.fault == "died" and len(self.deaths[task]) < MOST_DEATHS

    def _hello(self) -> dict[str, Any]:
        if not self._said:
            outcome = call_all({self: ("info", {"machine": None}, (), ())}, DEADLINE_SECONDS)[self]
            if problem := problem_in(self.source, outcome, "anyaccel_info"):
                raise PluginError(problem)
        if not self._said:
            raise PluginError(describe_breach(self.source, NO_ANSWER, "anyaccel_info"))
        return self._said


def check_answer(
    source: Source, name: str, data: Any, info: PluginInfo | None = None, devices: Sequence[Device] = ()
) -> Any:
    """Build the answer of a hook from JSON data, and compare the answer with the contract.

    Args:
        source: The plug-in.
        name: Name of the hook, without ``anyaccel_``.
        data: The answer that the vendor's process sent; it may be anything.
        info: The answer of ``anyaccel_info``, for all other hooks.
        devices: The devices of the call.

    Raises:
        PluginError: When the contract does not allow the answer.
    """
    hook = contract.HOOKS[name]
    value, unfit = read(hook.answer, data, hook.name)
    given = {"vendor": source.vendor, "info": info, "devices": devices, "device": next(iter(devices), None)}
    # The faults of what was read say more about its types than those of the reading.
    if found := hook.type_faults(value) if unfit else hook.broken_rules(value, given):
        raise PluginError(describe_breach(source, "; ".join(found), f"anyaccel_{name}"))
    return value


def describe_breach(source: Source, reason: str, hook: str) -> Problem:
    """Describe a breach of the contract."""
    return make_problem(source, ProblemKind.CONTRACT, f"{reason}.", hook)


def problem_in(source: Source, outcome: Outcome, hook: str) -> Problem | None:
    """Return the problem in an outcome: a fault of the plug-in, or the end of its process; None without a problem."""
    if outcome.fault:
        return make_problem(source, ProblemKind(outcome.fault), f"{outcome.reason}.", hook, outcome.details)
    if not isinstance(outcome.value, dict):
        return describe_breach(source, NO_ANSWER, hook)
    if "problem" in outcome.value:
        try:
            return decode(Problem, outcome.value["problem"])
        except ValueError as error:
            return describe_breach(source, str(error), hook)
    return None


def read_answer(
    source: Source, name: str, outcome: Outcome, devices: Sequence[Device] = (), info: PluginInfo | None = None
) -> Any:
    """Return the answer of a hook from the outcome of a call; see :func:`check_answer`.

    Raises:
        PluginError: When the call failed, or the contract does not allow the answer.
    """
    if (problem := problem_in(source, outcome, f"anyaccel_{name}")) is not None:
        raise PluginError(problem)
    return check_answer(source, name, outcome.value.get("value"), info or find_process(source).info, devices)


def qualified(device: Device) -> Device:
    """Return a device with ids that begin with the vendor."""
    return _renamed(device, lambda name: f"{device.vendor}/{name}")


def unqualified(device: Device) -> Device:
    """Return a device with the ids that the vendor uses."""
    if device.raw_id == device.id:
        return device
    return _renamed(device, lambda name: name.removeprefix(f"{device.vendor}/"))


def _renamed(device: Device, name: Callable[[str], str]) -> Device:
    links = {name(peer): strength for peer, strength in device.links.items()}
    return replace(device, id=name(device.id), parent=device.parent and name(device.parent), links=links)


def _encode_share(share: Share) -> Any:
    """Encode a share without the fields of the device, which the vendor's process knows by id."""
    return encode(replace(share, device=Device(id=share.device.raw_id, index=0, model="")))


_vendors: dict[tuple[Source, tuple[str, ...]], VendorProcess] = {}
_asked: dict[tuple[str, tuple[str, ...]], VendorProcess] = {}
_lock = renew_in_child(allocate_lock())


def find_process(source: Source) -> VendorProcess:
    """Return the process of a plug-in, which the first call starts."""
    key = source, tuple(sys.path)  # a notebook may extend its path, and so find another module
    with _lock:
        if key not in _vendors:
            _forget_path(key[1])
            _vendors[key] = VendorProcess(source)
        return _vendors[key]


def _forget_path(new: tuple[str, ...]) -> None:
    """Forget the processes of the earliest module path, if a new path is one too many; each ends after its call."""
    paths = dict.fromkeys(path for _, path in _vendors)
    if new not in paths and len(paths) >= MOST_PATHS:
        oldest = next(iter(paths))
        for source in [source for source, path in _vendors if path == oldest]:
            del _vendors[source, oldest]
        for name in [name for name, path in tuple(_asked) if path == oldest]:
            _asked.pop((name, oldest), None)


def vendor_process(name: str) -> VendorProcess:
    """Return the process that detected the devices of a vendor last, or would do so.

    Raises:
        PluginError: When no such plug-in is installed.
    """
    key = name, tuple(sys.path)
    found = _asked.get(key)
    if found is None:
        sources, problems = installed()
        source = next((each for each in sources if each.vendor == name), None)
        if source is None:
            nothing = Source(vendor=name, target="")
            missing = make_problem(nothing, ProblemKind.LOAD, "no plug-in of that name is installed.")
            raise PluginError(next((each for each in problems if each.vendor == name), missing))
        found = _asked[key] = find_process(source)
    return found


def ask(
    task: str,
    machine: Machine,
    *,
    timeout: float = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
    vendors: Iterable[str] | None = None,
    sources: Sequence[Source] | None = None,
    devices: Mapping[str, Sequence[Device]] | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Answers, list[Problem]]:
    """Run a function of :mod:`anyaccel.vendors.tasks` for every installed plug-in.

    Args:
        task: Name of the function.
        machine: The machine.
        timeout: Seconds that each vendor may take.
        environ: The environment for detection; the environment of this process when None.
        vendors: Vendors to ask; all when None.
        sources: The plug-ins to choose from; the installed plug-ins when None.
        devices: The devices of the call, by vendor.
        more: Further arguments of the function, by vendor.

    Returns:
        Outcomes by vendor, and the problems that kept a plug-in from being asked.

    Raises:
        UsageError: When ``ANYACCEL_PLUGINS`` names a vendor without a plug-in.
    """
    environ = dict(os.environ if environ is None else environ)
    problems: list[Problem] = []
    if sources is None:
        sources, problems = installed(environ)
    wanted = None if vendors is None else set(vendors)
    chosen = [find_process(source) for source in sources if wanted is None or source.vendor in wanted]
    shared = {"machine": encode(machine), "environ": environ, "adopt": True, "seconds": timeout}
    calls = {}
    for each in chosen:
        told = {**shared, **(more or {}).get(each.source.vendor, {})}
        calls[each] = task, told, (devices or {}).get(each.source.vendor, ()), ()
    limit = SIMULATION_LIMIT if machine.simulated else ANSWER_LIMIT
    if task == "detect":
        _asked.update({(each.source.vendor, tuple(sys.path)): each for each in chosen})
        for each in chosen:
            each.deaths.clear()
    outcomes = call_all(calls, timeout, limit=limit)
    return {each.source.vendor: (each.source, outcomes[each]) for each in chosen}, problems


def ask_hook(
    name: str, machine: Machine, *, devices: Mapping[str, Sequence[Device]] | None = None, **options: Any
) -> tuple[dict[Source, Any], list[Problem]]:
    """Ask a hook of the installed plug-ins, all at once; return the answers by plug-in, and the problems of the others.

    Args:
        name: Name of the hook, without ``anyaccel_``.
        machine: The machine.
        devices: The devices of the call, by vendor.
        options: Further arguments of :func:`ask`.
    """
    devices = devices or {}
    outcomes, problems = ask(name, machine, devices=devices, **options)
    answers = {}
    for source, outcome in outcomes.values():
        try:
            answers[source] = read_answer(source, name, outcome, devices.get(source.vendor, ()))
        except PluginError as error:
            problems.append(error.problem)
    return answers, problems


def hand_over(devices: Sequence[Device], environ: Mapping[str, str], *, given: bool) -> list[Problem]:
    """Call ``anyaccel_handover`` for the vendors of devices of this host, all at once; return the problems.

    Each vendor gets a process of its own, which ends with the call: a hook that takes long delays neither another
    handover nor another hook.

    Args:
        devices: The devices; their vendors must be installed.
        environ: The environment of the call.
        given: Whether to change the devices for a holder, or to put them into their idle state.
    """
    seconds = contract.HOOKS["handover"].seconds or DEADLINE_SECONDS
    told = {"machine": encode(Machine()), "environ": dict(environ), "adopt": True, "seconds": seconds, "given": given}
    calls: dict[VendorProcess, tuple[str, Any, Sequence[Device], Sequence[Device]]] = {}
    for vendor in dict.fromkeys(device.vendor for device in devices):
        own = [device for device in devices if device.vendor == vendor]
        calls[VendorProcess(vendor_process(vendor).source)] = "handover", told, own, ()
    problems = []
    try:
        for process, outcome in call_all(calls, seconds).items():
            try:
                read_answer(process.source, "handover", outcome, calls[process][2], process.info)
            except PluginError as error:
                problems.append(error.problem)
    finally:
        for process in calls:
            process.close()
    return problems


class KnownVendor(Value):
    """The facts that a plug-in knows without a machine.

    Attributes:
        info: Identity of the plug-in.
        products: Products of the vendor.
    """

    info: PluginInfo
    products: tuple[Product, ...]


def known() -> tuple[list[KnownVendor], list[Problem]]:
    """Return identity and products of the installed plug-ins, and the problems of plug-ins that fail."""
    answers, problems = ask_hook("products", Machine())
    return [KnownVendor(info=find_process(source).info, products=answers[source]) for source in answers], problems


def validate(term: Term, devices: Sequence[Device]) -> str | None:
    """Ask the vendor's plug-in whether the hardware can serve a term with exactly the given devices.

    First the identity of the plug-in is checked: the permitted numbers of devices, and whether a device can be divided.
    Without a hook, this decides alone. Answers of the hook are kept until the next detection; after an error, the hook
    is asked again, unless its process has died or exceeded its time twice in a row: then the last error is raised until
    the next detection. Declared devices, which no plug-in knows, can serve every term.

    Args:
        term: The term.
        devices: The devices, at least one, all of one vendor.

    Returns:
        The reason why not; None if it can.

    Raises:
        PluginError: If the plug-in is not installed, does not answer, or breaks the contract.
    """
    if devices[0].declared:  # by the user: no plug-in knows them
        return None
    return vendor_process(devices[0].vendor).validate(term, devices)


class KnownNames:
    """Names of vendors, resources and products of the installed plug-ins, aliases included.

    Each iteration asks the plug-ins; a plug-in that fails is passed over.
    """

    def __iter__(self) -> Iterator[str]:
        for each in known()[0]:
            yield from (each.info.vendor, each.info.resource)
            for product in each.products:
                yield from (product.name, *product.aliases)


def forget() -> None:
    """Leave the processes of all vendors, which end by themselves. The next call starts new ones."""
    with _lock:
        ended = list(_vendors.values())
        _vendors.clear()
        _asked.clear()
    for process in ended:
        with process:
            process.release()
