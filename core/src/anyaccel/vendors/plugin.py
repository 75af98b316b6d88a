"""One vendor's plug-in behind methods, one per hook. No other module calls hooks.

Each vendor has a plug-in manager of its own: a hook call reaches a single vendor, and a plug-in that fails to register
leaves nothing behind.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pluggy

from anyaccel import hookspecs
from anyaccel.errors import PluginError
from anyaccel.model import (
    Device,
    PluginInfo,
    Problem,
    ProblemKind,
    Term,
    VisiblePart,
    replace,
)
from anyaccel.text import suggest
from anyaccel.vendors import contract
from anyaccel.vendors.discovery import Source, make_problem

PREFIX = "anyaccel_"
REQUIRED = tuple(PREFIX + hook.name for hook in contract.HOOKS.values() if hook.required)


class _Manager(pluggy.PluginManager):
    """Skips attributes without the prefix of hooks: to inspect each took longer than to import a plug-in."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith(PREFIX) else None

    def parse_hookspec_opts(self, module_or_class: ModuleType | type, name: str) -> pluggy.HookspecOpts | None:
        return super().parse_hookspec_opts(module_or_class, name) if name.startswith(PREFIX) else None


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

    def ask(self, name: str, *arguments: Any, rules: bool = False) -> Any:
        """Call a hook, and compare the answer with the contract.

        Args:
            name: Name of the hook, without ``anyaccel_``.
            arguments: Arguments in the order of the specification.
            rules: Whether to compare the answer with all rules, also where the plug-in was loaded without.

        Raises:
            PluginError: When the hook raises or breaks the contract.
        """
        given = dict(zip(self.arguments(name), arguments, strict=True))
        hook = contract.HOOKS[name]
        value = self._call(hook, given)
        if self._rules or rules or not hook.fits(value):
            found = list(hook.faults(value, self._facts(name) | given))
            if found:
                raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found), PREFIX + name))
        return value

    def _facts(self, name: str) -> dict[str, Any]:
        """Return the facts that checks need beside the arguments of a hook."""
        return {"vendor": self.source.vendor, "info": None if name == "info" else self.info}

    def _call(self, hook: contract.Hook, given: Mapping[str, Any]) -> Any:
        """Call a hook; without the hook, return the default of the contract."""
        name = PREFIX + hook.name
        if not self.implements(name):
            return hook.default(given)
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
        except (pluggy.PluginValidationError, ValueError) as error:
            found = [" ".join(str(error).split())]
        if found:
            raise PluginError(self.problem(ProblemKind.CONTRACT, _sentence(found)))


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
