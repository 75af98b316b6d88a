"""The tasks of a vendor's process: load the plug-in, detect devices, call hooks. No other module calls hooks.

Every function takes and returns JSON data. A payload may hold ``load``, the origin of the plug-in, in the first call of
a process; ``introduce``, devices that later calls name by id; ``devices``, the ids of the devices of the call;
``machine``, ``environ`` and ``seconds`` for a hook that touches the machine. An answer holds ``value``, or ``problem``
with the facts up to then. The caller compares answers with the contract.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import pluggy

from anyaccel import hookspecs
from anyaccel import plugin as author  # noqa: F401 - what every plug-in imports
from anyaccel.errors import PluginError
from anyaccel.model import (
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    PluginInfo,
    Problem,
    ProblemKind,
    Product,
    Share,
    Term,
    VisiblePart,
    decode,
    encode,
    hints,
    replace,
)
from anyaccel.probe import Machine, ProbeContext
from anyaccel.text import suggest
from anyaccel.vendors import contract
from anyaccel.vendors.discovery import Source, make_problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.probe import Simulated
    from anyaccel.vendors.simulate import Cards

Payload = Mapping[str, Any]

PREFIX = "anyaccel_"
REQUIRED = tuple(PREFIX + hook.name for hook in contract.HOOKS.values() if hook.required)


class _Manager(pluggy.PluginManager):
    """The manager of one plug-in: a call reaches a single vendor, and a failed registration leaves nothing behind.

    It skips attributes without the prefix of hooks: to inspect each took longer than to import a plug-in.
    """

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith(PREFIX) else None

    def parse_hookspec_opts(self, module_or_class: ModuleType | type, name: str) -> pluggy.HookspecOpts | None:
        return super().parse_hookspec_opts(module_or_class, name) if name.startswith(PREFIX) else None


# This runs in the fork server, so that the processes of all vendors inherit the builders and checks of these classes.
for kind in (Source, Machine, PluginInfo, Detected, Device, EnvEdits, Product, Term, Share):
    hints(kind)


class VendorPlugin:
    """A plug-in that has been imported, registered and asked for its identity.

    A method of each hook compares the answer with the contract, and raises :class:`~anyaccel.errors.PluginError` when
    the hook raises or breaks the contract.

    Attributes:
        source: Origin of the plug-in.
        info: Identity of the plug-in.
    """

    def __init__(self, source: Source, plugin: object | None = None, *, rules: bool = True) -> None:
        """Import and register the plug-in.

        Args:
            source: Origin of the plug-in.
            plugin: The plug-in; imported when None.
            rules: Whether to compare answers with all rules of the contract. A vendor's process compares types alone,
                which JSON would not show; the calling process compares the rules.

        Raises:
            PluginError: When the import fails, or the plug-in breaks the contract.
        """
        self.source = source
        self._rules = rules
        self._manager = _Manager("anyaccel")
        self._manager.add_hookspecs(hookspecs)
        self._register(self._import() if plugin is None else plugin)
        self.info: PluginInfo = self.ask("info")

    def implements(self, hook: str) -> bool:
        """Return whether the plug-in has a hook, given with ``anyaccel_``."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the method of a hook."""
        if name not in contract.HOOKS:
            raise AttributeError(f"there is no hook {PREFIX}{name}")
        return partial(self.ask, name)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a hook, and compare the answer with the contract.

        Args:
            name: Name of the hook, without ``anyaccel_``.
            arguments: Arguments in the order of the specification.

        Raises:
            PluginError: When the hook raises or breaks the contract.
        """
        given = dict(zip(self.arguments(name), arguments, strict=True))
        value = self._call(name, given)
        self._compare(name, value, given, rules=self._rules)
        return value

    def find_cards(self, wanted: Sequence[Simulated]) -> tuple[list[Cards], list[str]]:
        """Return the simulated products that are this vendor's, and the names of all of its products.

        Products that are not simulated are not compared with the contract, which takes a millisecond for a catalog.

        Raises:
            PluginError: When the hook raises, or a simulated product breaks the contract.
        """
        from anyaccel.vendors.simulate import find_cards

        products = self._call("products", {})
        try:
            found = [cards for item in wanted if (cards := find_cards(item.product, item.count, products))]
            parts = {name for cards in found for name in cards.product.parts}
            made_of = [cards.product for cards in found] + [product for product in products if product.name in parts]
            self._compare("products", made_of or products, {}, rules=True)
            return found, _names(products)
        except Exception:  # a fault is described by its place in the whole list
            self._compare("products", products, {}, rules=True)
            raise

    def _compare(self, name: str, value: Any, given: Mapping[str, Any], *, rules: bool) -> None:
        """Compare the answer of a hook with the types of the contract, and with the rules if asked."""
        hook = contract.HOOKS[name]
        found = hook.type_faults(value)
        if not found and rules:  # rules rely on the type
            facts = {"vendor": self.source.vendor, "info": None if name == "info" else self.info}
            found = hook.broken_rules(value, {**facts, **given})
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found), PREFIX + name))

    def _call(self, hook: str, given: Mapping[str, Any]) -> Any:
        """Call a hook; without the hook, return the default of the contract."""
        name = PREFIX + hook
        if not self.implements(name):
            return contract.HOOKS[hook].default(given)
        me = os.getpid()
        try:
            return getattr(self._manager.hook, name)(**given)
        except (Exception, SystemExit) as error:
            raise PluginError(self._raised(error, name)) from error
        finally:
            # A hook that forks may return in the copy, too: with each further call, the processes would double.
            if os.getpid() != me:
                os._exit(0)

    @staticmethod
    def arguments(name: str) -> tuple[str, ...]:
        """Return the names of a hook's arguments, in the order of the specification."""
        code = getattr(hookspecs, PREFIX + name).__code__
        return tuple(code.co_varnames[: code.co_argcount])

    def tags(self, device: Device) -> tuple[str, ...]:
        """Return the accelerator-type tags of a device, most canonical first, without repetition."""
        return tuple(dict.fromkeys(self.ask("tags", device)))

    def visible(
        self, environ: Mapping[str, str], devices: Sequence[Device]
    ) -> tuple[Sequence[str | VisiblePart] | None, list[str]]:
        """Return the answer of ``anyaccel_visible``, and the warnings of the call.

        Raises:
            PluginError: When the plug-in refuses the environment's value, or is at fault itself.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.ask("visible", environ, devices)
        return found, [str(warning.message) for warning in caught]

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Return the reason why the hardware cannot serve a term with exactly these devices; None when it can."""
        reason: str | None = self.info.refusal(request, devices) or self.ask("validate", request, devices)
        return reason

    def problem(self, kind: ProblemKind, reason: str, hook: str = "") -> Problem:
        """Describe a fault of the plug-in."""
        return make_problem(self.source, kind, reason, hook)

    def _raised(self, error: BaseException, hook: str) -> Problem:
        """Describe an exception of a hook; an exception with a ``fault`` (reason, remedy) speaks for itself."""
        match getattr(error, "fault", None):
            case (str(reason), str(remedy)):
                problem = self.problem(ProblemKind.RAISED, reason, hook)
                return replace(problem, next_step=remedy) if remedy else problem
            case _:
                return self.problem(ProblemKind.RAISED, f"it raised {self._words(error, hook)}", hook)

    def _words(self, error: BaseException, hook: str = "") -> str:
        """Return an exception as text, with the line in the plug-in's own package that raised."""
        from traceback import walk_tb

        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - an exception of a plug-in may fail to describe itself
            text = "its text cannot be read"
        words = f"{type(error).__name__}: {text}" if text else type(error).__name__
        package = self.source.target.partition(":")[0].partition(".")[0]
        if isinstance(error, ValueError) and hook == "anyaccel_visible":  # the fault is in a variable of the user
            return words
        own = [
            f"{words} ({os.path.basename(frame.f_code.co_filename)}, line {line})"
            for frame, line in walk_tb(error.__traceback__)
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package
        ]
        return own[-1] if own else words

    def _import(self) -> object:
        module_name, _, attribute = self.source.target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for name in filter(None, attribute.split(".")):
                found = getattr(found, name)
        except (Exception, SystemExit) as error:
            reason = f"importing {self.source.target!r} raised {self._words(error)}"
            raise PluginError(self.problem(ProblemKind.LOAD, reason)) from error
        return found

    def _register(self, plugin: object) -> None:
        found = list(_registration_faults(plugin))
        try:
            if not found:
                self._manager.register(plugin, name=self.source.vendor)
                found = list(self._default_faults())
        except (pluggy.PluginValidationError, ValueError) as error:
            found = list(_argument_faults(plugin)) or [" ".join(str(error).split())]
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found)))

    def _default_faults(self) -> Iterator[str]:
        """Yield the arguments that pluggy never passes."""
        for name in hookspecs.HOOKS:
            for impl in getattr(self._manager.hook, name).get_hookimpls():
                for argument in impl.kwargnames:
                    yield f"{name} gives {argument!r} a default, so it would never be passed; remove the default"


_last: list[VendorPlugin | PluginError] = []
"""The plug-in that was loaded last."""
_devices: dict[str, Device] = {}
"""The devices that calls name by id."""


def detect(payload: Payload) -> dict[str, Any]:
    """Find the devices: ``{"info", "hooks", "detected", "visible", "hidden", "products", "seconds"}``."""
    return _guard(payload, lambda plugin: _detect(plugin, payload))


def __getattr__(name: str) -> Callable[[Payload], dict[str, Any]]:
    """Return the task of a hook of the contract: ``{"value"}``, which the caller compares with the contract.

    Where the payload has ``machine`` or ``load``, the answer holds ``info`` and ``hooks`` as well.
    """
    if name not in contract.HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda payload: _guard(payload, lambda plugin: _ask(plugin, name, payload))


def record(payload: Payload) -> dict[str, Any]:
    """Record which facts the hooks read: ``{"info", "recording"}``, and the answer of :func:`detect`."""
    return _guard(payload, lambda plugin: _record(plugin, payload))


def _guard(payload: Payload, answer: Callable[[VendorPlugin], dict[str, Any]]) -> dict[str, Any]:
    """Return an answer, or the plug-in's fault as ``{"problem": ...}`` with the facts up to then."""
    known: dict[str, Any] = {}
    try:
        plugin = _load(payload)
        if "load" in payload or "machine" in payload:  # a caller of a pure hook has got both before
            known["info"] = encode(plugin.info)
            known["hooks"] = [name for name in hookspecs.HOOKS if plugin.implements(name)]
        for data in payload.get("introduce", ()):
            device = decode(Device, data)
            _devices[device.id] = device
        return {**known, **answer(plugin)}
    except PluginError as error:
        return {**known, **_problem(error)}


def _ask(plugin: VendorPlugin, name: str, payload: Payload) -> dict[str, Any]:
    devices = [_devices[each] for each in payload.get("devices", ())]
    told: dict[str, Callable[[], Any]] = {
        "devices": lambda: devices,
        "device": lambda: devices[0],
        "request": lambda: decode(Term, payload["request"]),
        "given": lambda: payload["given"],
        "ctx": lambda: _env_context(payload) if "shares" in payload else _context(payload),
    }
    return {"value": encode(plugin.ask(name, *(told[each]() for each in plugin.arguments(name))))}


def _env_context(payload: Payload) -> EnvContext:
    shares = [decode(Share, share) for share in payload["shares"]]
    return EnvContext(
        devices=tuple(_devices[each] for each in payload["everything"]),
        shares={each.device.id: replace(each, device=_devices[each.device.id]) for each in shares},
        environ=payload["environ"],
        mask=payload["mask"],
    )


def _problem(error: PluginError) -> dict[str, Any]:
    import traceback

    cause = error.__cause__
    details = "".join(traceback.format_exception(cause)) if cause else ""
    return {"problem": encode(replace(error.problem, details=details))}


@cache
def _import(source: Source) -> VendorPlugin | PluginError:
    """Return a plug-in, or the error of its import: a second import would find half-initialised modules."""
    try:
        return VendorPlugin(source, rules=False)
    except PluginError as error:
        return error


def _load(payload: Payload) -> VendorPlugin:
    """Return the plug-in; the first call imports it.

    Raises:
        PluginError: When the plug-in cannot be loaded.
    """
    if payload.get("adopt") and dict(os.environ) != payload["environ"]:
        os.environ.clear()  # libraries read the variables of the caller
        os.environ.update(payload["environ"])
    if "load" in payload:
        sys.path[:] = payload["load"]["path"]  # the fork server may be older than changes of the path
        _last[:] = [_import(decode(Source, payload["load"]["source"]))]
    if isinstance(_last[0], PluginError):
        raise _last[0]
    return _last[0]


def _detect(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    start = time.monotonic()
    machine = decode(Machine, payload["machine"])
    answer: dict[str, Any] = {}
    if machine.simulated or payload.get("simulate"):
        from anyaccel.vendors.simulate import simulate

        wanted, answer["products"] = plugin.find_cards(machine.products)
        detected = simulate(plugin.info.vendor, wanted) if wanted else None
        environ = payload["environ"]
    else:
        if payload.get("names"):  # presence.json does not list the products
            with contextlib.suppress(PluginError):  # 'anyaccel plugins' and 'anyaccel check' report the fault
                answer["products"] = _names(plugin.products())
        facts = machine.facts(payload["environ"])
        # On a recording, masks of the caller count like on the recorded machine.
        environ = {**facts.environ, **_own_variables(plugin, payload["environ"])}
        try:
            detected = plugin.detect(ProbeContext(facts, start + payload["seconds"]))
        except PluginError as error:
            answer |= _problem(error)
            with contextlib.suppress(PluginError):  # then the launcher warns that the devices are not hidden
                answer["hidden"] = encode(_hidden(plugin, (), payload["environ"]))
            return answer
    if detected is not None:
        try:
            detected, answer["visible"] = _describe(plugin, detected, environ)
            answer["hidden"] = encode(_hidden(plugin, detected.devices, payload["environ"]))
        except PluginError as error:
            return answer | {"detected": encode(detected)} | _problem(error)
        _devices.clear()  # those of an earlier detection; the caller introduces what it asks about
    return {**answer, "detected": encode(detected), "seconds": time.monotonic() - start}


def _hidden(plugin: VendorPlugin, devices: tuple[Device, ...], environ: Mapping[str, str]) -> EnvEdits:
    """Return the edits by which a worker sees none of the vendor's devices."""
    edits: EnvEdits = plugin.env((), EnvContext(devices=devices, environ=environ))
    return edits


def _describe(plugin: VendorPlugin, detected: Detected, environ: Mapping[str, str]) -> tuple[Detected, dict[str, Any]]:
    """Ask the pure hooks about the devices of a detection.

    Returns:
        The devices with their vendor, tags and sharing, and the answer of ``anyaccel_visible``, or the problem with it.
    """
    devices = tuple(
        replace(plugin.info.describe(device), tags=plugin.tags(device), fractional=plugin.fractional(device))
        for device in sorted(detected.devices, key=lambda device: device.index)
    )
    detected = replace(detected, devices=devices)
    try:
        visible, notes = plugin.visible(environ, devices)
    except PluginError as error:
        return detected, _problem(error)
    return replace(detected, notes=(*detected.notes, *notes)), {"value": encode(visible)}


def _record(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    """Call the hooks that touch the machine. A fault of a hook shows again in the replay."""
    from anyaccel.probe import Recorder  # late: detection needs none

    facts = decode(Machine, payload["machine"]).facts(payload["environ"])
    recorder = Recorder(facts)
    recorder.environ.asked.update(_own_variables(plugin, facts.environ))

    def ctx() -> ProbeContext:
        return ProbeContext(recorder, time.monotonic() + payload["seconds"] / len(contract.RECORDED))

    detected = None
    answer: dict[str, Any] = {}
    try:
        detected = plugin.detect(ctx())
        if detected is not None:
            detected, answer["visible"] = _describe(plugin, detected, recorder.environ)
    except PluginError as error:
        answer = _problem(error)
    for name in contract.RECORDED:
        given = {"ctx": ctx(), **({} if detected is None else {"devices": detected.devices})}
        wanted = plugin.arguments(name)
        if name != "detect" and given.keys() >= set(wanted):
            with contextlib.suppress(PluginError):
                plugin.ask(name, *(given[each] for each in wanted))
    return {**answer, "recording": recorder.recording(), "detected": encode(detected)}


def _context(payload: Payload) -> ProbeContext:
    facts = decode(Machine, payload["machine"]).facts(payload["environ"])
    return ProbeContext(facts, time.monotonic() + payload["seconds"])


def _own_variables(plugin: VendorPlugin, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the vendor's variables of an environment, which narrow a recorded machine as well."""
    return {name: environ[name] for name in plugin.info.env_vars if name in environ}


def _names(products: Sequence[Product]) -> list[str]:
    names = [(product, name) for product in products for name in (product.name, *product.aliases)]
    divided = [f"{name}/{part}" for product, name in names for part in product.parts]
    return [name for _, name in names] + divided


def _sentence(found: Sequence[str]) -> str:
    text = "; ".join(found)
    return text if text.endswith("?") else f"{text}."


def _registration_faults(plugin: object) -> Iterator[str]:
    """Yield the faults of a plug-in's functions before the first call."""
    if isinstance(plugin, type):
        yield f"{plugin.__name__} is a class; the entry point must name an instance of it: plugin = {plugin.__name__}()"
        return
    specs = hookspecs.HOOKS
    where = plugin.__name__ if isinstance(plugin, ModuleType) else repr(plugin)
    names = [name for name in dir(plugin) if name.startswith(PREFIX) and callable(getattr(plugin, name))]
    for name in names:
        function = getattr(plugin, name)
        if name not in specs:
            if hasattr(function, "anyaccel_impl"):
                yield f"{name} is no hook; {suggest(name, specs, 'anyaccel.hookspecs lists them', most=1)}"
            continue
        if not hasattr(function, "anyaccel_impl"):
            yield f"{name} lacks the decorator @hookimpl (from anyaccel.plugin import hookimpl)"
    for name in REQUIRED:
        if name not in names:
            yield f"{where} has no {name}, which is required"


def _argument_faults(plugin: object) -> Iterator[str]:
    """Yield the arguments that hooks do not pass, for a plug-in that was refused."""
    for name in hookspecs.HOOKS:
        allowed = VendorPlugin.arguments(name.removeprefix(PREFIX))
        function = getattr(plugin, name, None)
        for argument in inspect.signature(function).parameters if callable(function) else ():
            if argument not in allowed:
                yield f"{name} takes {argument!r}, which the hook does not pass; it passes ({', '.join(allowed)})"
