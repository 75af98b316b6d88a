"""One vendor's plug-in behind typed methods: the only module that calls hooks.

Each vendor has a plug-in manager of its own, so that one hook call reaches one vendor, and a plug-in that fails to
register leaves nothing behind.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

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
REQUIRED = tuple(PREFIX + hook.name for hook in contract.HOOKS.values() if hook.required)


class _Manager(pluggy.PluginManager):
    """Looks for hooks among what has a hook's name: to look at every attribute took longer than to import a plug-in."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith(PREFIX) else None

    def parse_hookspec_opts(self, module_or_class: ModuleType | type, name: str) -> pluggy.HookspecOpts | None:
        return super().parse_hookspec_opts(module_or_class, name) if name.startswith(PREFIX) else None


class VendorPlugin:
    """A plug-in that has been imported, registered and asked who it is.

    It has a method for each hook, which compares the answer with the contract, and raises
    :class:`~anyaccel.errors.PluginError` when the hook raised or answered something else.

    Attributes:
        source: Where it comes from.
        info: What it says about itself.
    """

    if TYPE_CHECKING:
        detect: Callable[[ProbeContext], Detected | None]
        fractional: Callable[[Device], Fractional]
        env: Callable[[Sequence[Device], EnvContext], EnvEdits]
        stats: Callable[[Sequence[Device], ProbeContext], Mapping[str, Stats]]
        container: Callable[[Sequence[Device]], ContainerEdits]
        diagnose: Callable[[ProbeContext], Sequence[Finding]]
        products: Callable[[], Sequence[Product]]

    def __init__(self, source: Source, plugin: object | None = None) -> None:
        """Import and register the plug-in.

        Args:
            source: Where it comes from.
            plugin: The plug-in itself when it is at hand; imported when None.

        Raises:
            PluginError: When it cannot be imported or does not keep the contract.
        """
        self.source = source
        self._manager = _Manager("anyaccel")
        self._manager.add_hookspecs(hookspecs)
        self._register(self._import() if plugin is None else plugin)
        self.info: PluginInfo = self.ask("info")

    def implements(self, hook: str) -> bool:
        """Whether the plug-in has a hook of this name."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method for each hook of the contract, which takes what the hook is told."""
        if name not in contract.HOOKS:
            raise AttributeError(f"there is no hook {PREFIX}{name}")
        return partial(self.ask, name)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a hook, and compare its answer with the contract.

        Args:
            name: Its name, without ``anyaccel_``.
            arguments: What it is told, in the order of its specification.

        Raises:
            PluginError: When the hook raised, or answered what the contract does not allow.
        """
        told = dict(zip(self.arguments(name), arguments, strict=True))
        return self.check(name, self.call(name, told), told)

    def call(self, name: str, told: Mapping[str, Any]) -> Any:
        """Call a hook; what it answers is not compared with anything. Without such a hook, the default."""
        hook = PREFIX + name
        if not self.implements(hook):
            return contract.HOOKS[name].default(told)
        try:
            return getattr(self._manager.hook, hook)(**told)
        except (Exception, SystemExit) as error:
            raise PluginError(self._raised(error, hook)) from error

    def check(self, name: str, value: Any, told: Mapping[str, Any]) -> Any:
        """Compare the answer of a hook with the contract, and return it."""
        found = list(contract.HOOKS[name].faults(value, told, self))
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found), PREFIX + name))
        return value

    @staticmethod
    def arguments(name: str) -> tuple[str, ...]:
        """Names of what a hook is told, in the order of its specification."""
        code = getattr(hookspecs, PREFIX + name).__code__
        return tuple(code.co_varnames[: code.co_argcount])

    def tags(self, device: Device) -> tuple[str, ...]:
        """Accelerator-type tags, most canonical first, none twice."""
        return tuple(dict.fromkeys(self.ask("tags", device)))

    def visible(
        self, environ: Mapping[str, str], devices: Sequence[Device]
    ) -> tuple[dict[str, tuple[int, ...]] | None, list[str]]:
        """What an environment leaves visible, or None for all, and the warnings that the plug-in gave on the way.

        Returns:
            By id of each visible device, in the runtime's order, its visible slots; empty where all of it is visible.

        Raises:
            PluginError: When the plug-in refuses the environment's value, or is at fault itself.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.ask("visible", environ, devices)
        notes = [str(warning.message) for warning in caught]
        if found is None:
            return None, notes
        parts = (item if isinstance(item, VisiblePart) else VisiblePart(id=item, slots=()) for item in found)
        return {part.id: part.slots for part in parts}, notes

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Why the hardware cannot serve a term with exactly these devices; None when it can."""
        reason: str | None = self.info.refusal(request, devices) or self.ask("validate", request, devices)
        return reason

    def problem(self, kind: ProblemKind, reason: str, hook: str = "", details: str = "") -> Problem:
        """Describe a fault of this plug-in."""
        return problem_of(self.source, kind, reason, hook, details)

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

    def _register(self, plugin: object) -> None:
        found = list(_registration_faults(plugin))
        try:
            if not found:
                self._manager.register(plugin, name=self.source.vendor)
        except (pluggy.PluginValidationError, ValueError) as error:
            found = [" ".join(str(error).split())]
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found)))


def _sentence(found: Sequence[str]) -> str:
    text = "; ".join(found)
    return text if text.endswith("?") else f"{text}."


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
            if hasattr(function, "anyaccel_impl"):
                import difflib

                close = difflib.get_close_matches(name, specs, n=1)
                yield f"{name} is no hook" + (f"; did you mean {close[0]}?" if close else "")
            continue
        if not hasattr(function, "anyaccel_impl"):
            yield f"{name} lacks the decorator @hookimpl (from anyaccel.plugin import hookimpl)"
        yield from _argument_faults(name, function)
    for name in REQUIRED:
        if name not in names:
            yield f"{where} has no {name}, which is required"


def _argument_faults(name: str, function: Callable[..., Any]) -> Iterator[str]:
    code = getattr(hookspecs, name).__code__
    allowed = code.co_varnames[: code.co_argcount]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in allowed:
            yield f"{name} takes {parameter.name!r}, which the hook does not pass; it passes ({', '.join(allowed)})"
        elif parameter.default is not parameter.empty:
            yield f"{name} gives {parameter.name!r} a default, so it would never be passed; remove the default"
