"""One vendor's plug-in behind typed methods: the only module that calls hooks.

A hook gets the arguments that it names, by position.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from anyaccel import hookspecs
from anyaccel.errors import PluginError
from anyaccel.model import (
    ContainerEdits,
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    PluginInfo,
    Problem,
    ProblemKind,
    Product,
    Stats,
    Term,
    VisiblePart,
    replace,
)
from anyaccel.probe.context import ProbeContext
from anyaccel.vendors import contract
from anyaccel.vendors.discovery import Source, problem_of

PREFIX = "anyaccel_"
REQUIRED = ("anyaccel_info", "anyaccel_detect", "anyaccel_fractional", "anyaccel_tags", "anyaccel_env")

_STARS = 0x04 | 0x08
"""Flags of code that takes ``*args`` or ``**kwargs``."""

Check = Callable[[Any], Iterator[str]]


class VendorPlugin:
    """A plug-in that has been imported, registered and asked who it is.

    Every method calls one hook, compares the answer with the contract, and raises
    :class:`~anyaccel.errors.PluginError` when the hook raised or answered something else.

    Attributes:
        source: Where it comes from.
        info: What it says about itself.
    """

    def __init__(self, source: Source, plugin: object | None = None) -> None:
        """Import and register the plug-in.

        Args:
            source: Where it comes from.
            plugin: The plug-in itself when it is at hand; imported when None.

        Raises:
            PluginError: When it cannot be imported or does not keep the contract.
        """
        self.source = source
        self._hooks = self._found(self._import() if plugin is None else plugin)
        self.info: PluginInfo = self._call("anyaccel_info", lambda value: contract.info_faults(value, source.vendor))

    def implements(self, hook: str) -> bool:
        """Whether the plug-in has a hook of this name."""
        return hook in self._hooks

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find the vendor's devices. Touches the machine: never call it in a process that must survive."""
        return self._call("anyaccel_detect", _unless_none(contract.detected_faults), ctx=ctx)  # type: ignore[no-any-return]

    def fractional(self, device: Device) -> Fractional:
        """Whether several holders may share the device."""
        check: Check = lambda value: contract.fractional_faults(value, device)  # noqa: E731
        return self._call("anyaccel_fractional", check, device=device)  # type: ignore[no-any-return]

    def tags(self, device: Device) -> tuple[str, ...]:
        """Accelerator-type tags, most canonical first, none twice."""
        return tuple(dict.fromkeys(self._call("anyaccel_tags", contract.tags_faults, device=device)))

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Edits that make a worker see exactly these devices."""
        owned = self.info.env_vars
        return self._call(  # type: ignore[no-any-return]
            "anyaccel_env", lambda value: contract.env_faults(value, owned), devices=devices, ctx=ctx
        )

    def visible(
        self, environ: Mapping[str, str], devices: Sequence[Device]
    ) -> tuple[dict[str, tuple[int, ...]] | None, list[str]]:
        """What an environment leaves visible, or None for all, and the warnings that the plug-in gave on the way.

        Returns:
            By id of each visible device, in the runtime's order, its visible slots; empty where all of it is visible.

        Raises:
            PluginError: When the plug-in refuses the environment's value, or is at fault itself.
        """
        if not self.implements("anyaccel_visible"):
            return None, []
        check = _unless_none(lambda value: contract.visible_faults(value, devices))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self._call("anyaccel_visible", check, environ=environ, devices=devices)
        notes = [str(warning.message) for warning in caught]
        if found is None:
            return None, notes
        parts = (item if isinstance(item, VisiblePart) else VisiblePart(id=item, slots=()) for item in found)
        return {part.id: part.slots for part in parts}, notes

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Why the hardware cannot serve a term with exactly these devices; None when it can."""
        check = _unless_none(contract.reason_faults)
        return self.info.refusal(request, devices) or self._call(
            "anyaccel_validate", check, default=None, request=request, devices=devices
        )

    def stats(self, devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
        """Stats by device id. Touches the machine."""
        return self._call("anyaccel_stats", contract.stats_faults, default={}, devices=devices, ctx=ctx)  # type: ignore[no-any-return]

    def container(self, devices: Sequence[Device]) -> ContainerEdits:
        """What a container needs so that exactly these devices work inside."""
        nodes = tuple(dict.fromkeys(node for device in devices for node in device.nodes))
        default = ContainerEdits(nodes=nodes)
        return self._call("anyaccel_container", contract.container_faults, default=default, devices=devices)  # type: ignore[no-any-return]

    def diagnose(self, ctx: ProbeContext) -> tuple[Finding, ...]:
        """What is wrong with the vendor's devices and driver. Touches the machine."""
        check: Check = lambda value: contract.listed_faults(value, Finding)  # noqa: E731
        return tuple(self._call("anyaccel_diagnose", check, default=(), ctx=ctx))

    def products(self) -> tuple[Product, ...]:
        """The products that the plug-in knows."""
        return tuple(self._call("anyaccel_products", contract.product_faults, default=()))

    def problem(self, kind: ProblemKind, reason: str, hook: str = "", details: str = "") -> Problem:
        """Describe a fault of this plug-in."""
        return problem_of(self.source, kind, reason, hook, details)

    def _call(self, hook: str, check: Check, *, default: Any = None, **arguments: Any) -> Any:
        if not self.implements(hook):
            return default
        try:
            function, names = self._hooks[hook]
            value = function(*(arguments[name] for name in names))
        except (Exception, SystemExit) as error:
            raise PluginError(self._raised(error, hook)) from error
        found = list(check(value))
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found), hook))
        return value

    def _raised(self, error: BaseException, hook: str) -> Problem:
        """Describe what a hook raised: in its own words where it has a ``fault``, that is a reason and a remedy."""
        match getattr(error, "fault", None):
            case (str(reason), str(remedy)):
                problem = self.problem(ProblemKind.RAISED, reason, hook)
                return replace(problem, next_step=remedy) if remedy else problem
            case _:
                return self.problem(ProblemKind.RAISED, f"it raised {self._words(error, hook)}", hook)

    def _words(self, error: BaseException, hook: str = "") -> str:
        """An error, and the line of the plug-in's own package on which it was raised."""
        from traceback import walk_tb

        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        package = self.source.target.partition(":")[0].partition(".")[0]
        if isinstance(error, ValueError) and hook == "anyaccel_visible":  # it is about a variable of the user's
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

    def _found(self, plugin: object) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
        """The plug-in's hooks by name, each with the names of the arguments that it takes."""
        found = list(_registration_faults(plugin))
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found)))
        hooks = {name: getattr(plugin, name, None) for name in hookspecs.HOOKS}
        return {name: (hook, tuple(_parameters(hook))) for name, hook in hooks.items() if callable(hook)}


def _sentence(found: Sequence[str]) -> str:
    text = "; ".join(found)
    return text if text.endswith("?") else f"{text}."


def _unless_none(check: Check) -> Check:
    return lambda value: iter(()) if value is None else check(value)


def _registration_faults(plugin: object) -> Iterator[str]:
    """What is wrong with a plug-in's functions, before any of them is called."""
    if isinstance(plugin, type):
        yield f"{plugin.__name__} is a class; the entry point must name an instance of it: plugin = {plugin.__name__}()"
        return
    specs = hookspecs.HOOKS
    where = plugin.__name__ if isinstance(plugin, ModuleType) else repr(plugin)
    names = [name for name in dir(plugin) if name.startswith(PREFIX) and callable(getattr(plugin, name))]
    for name in names:
        function = getattr(plugin, name)
        if name not in specs:
            if hasattr(function, hookspecs.MARK):
                import difflib

                close = difflib.get_close_matches(name, specs, n=1)
                yield f"{name} is no hook" + (f"; did you mean {close[0]}?" if close else "")
            continue
        if not hasattr(function, hookspecs.MARK):
            yield f"{name} lacks the decorator @hookimpl (from anyaccel.plugin import hookimpl)"
        yield from _argument_faults(name, function)
    for name in REQUIRED:
        if name not in names:
            yield f"{where} has no {name}, which is required"


def _argument_faults(name: str, function: Callable[..., Any]) -> Iterator[str]:
    code = getattr(hookspecs, name).__code__
    allowed = code.co_varnames[: code.co_argcount]
    for parameter, has_default in _parameters(function).items():
        if parameter not in allowed:
            yield f"{name} takes {parameter!r}, which the hook does not pass; it passes ({', '.join(allowed)})"
        elif has_default:
            yield f"{name} gives {parameter!r} a default, so it would never be passed; remove the default"


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """The parameters of a hook, each with whether it has a default."""
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is None or code.co_kwonlyargcount or code.co_flags & _STARS or hasattr(plain, "__wrapped__"):
        import inspect  # late: it takes as long to import as a plug-in, and few hooks need it

        found = inspect.signature(function).parameters.values()
        return {each.name: each.default is not each.empty for each in found}
    names = code.co_varnames[: code.co_argcount]
    first = len(names) - len(plain.__defaults__ or ())
    own = {name: number >= first for number, name in enumerate(names)}
    return dict([*own.items()][plain is not function :])
