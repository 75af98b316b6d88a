"""C01 to C05: the plug-in can be found, imported cheaply, and says who it is."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from anyaccel import hookspecs
from anyaccel import plugin as author
from anyaccel.errors import PluginError
from anyaccel.model import PluginInfo, ProblemKind
from anyaccel.vendors import GROUP

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.subject import Subject
from anyaccel_testing.watch import Watch, foreign_modules

IMPORT_SECONDS = 60.0
MODULES = 60
"""Modules that importing a plug-in may load beyond anyaccel.plugin's own; the seven of this project load 3 to 12."""

WHAT_AN_IMPORT_LOADS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import anyaccel.plugin
from importlib import import_module
before, libraries = set(sys.modules), []
sys.addaudithook(lambda event, what: libraries.append(str(what[0])) if event == "ctypes.dlopen" and what[0] else None)
import_module(sys.argv[2].partition(":")[0])
print(json.dumps([sorted(set(sys.modules) - before), libraries]))
"""


def entry_point(subject: Subject) -> None:
    """C01: The entry point leads to the plug-in, and the plug-in's vendor has its name."""
    if not isinstance(subject.loaded, PluginError):
        return
    problem = subject.loaded.problem
    if problem.kind is ProblemKind.LOAD:
        raise CheckFailed(f"{problem.reason}; correct the entry point, or the module that it names")
    info = _info(subject) if problem.hook == "anyaccel_info" else None
    if isinstance(info, PluginInfo) and info.vendor != subject.source.vendor:
        raise CheckFailed(problem.reason)


def cheap_import(subject: Subject) -> None:
    """C02: Importing the plug-in loads no vendor library and little else."""
    _needs_module(subject)
    argv = [sys.executable, "-I", "-c", WHAT_AN_IMPORT_LOADS, json.dumps(sys.path), subject.source.target]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    if done.returncode:
        end = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise CheckFailed(f"importing {subject.source.target} in a fresh interpreter fails: {end}")
    modules, libraries = json.loads(done.stdout.strip().rpartition("\n")[2])
    demand(_import_faults(subject, modules, libraries))


def _import_faults(subject: Subject, modules: list[str], libraries: list[str]) -> Iterator[str]:
    way_out = "import it inside the function that ctx.query is given"
    for name in foreign_modules(modules, subject.source):
        yield f"importing {subject.source.target} loads {name}; {way_out}"
    for name in libraries:
        yield f"importing {subject.source.target} loads the library {name}; {way_out}"
    if len(modules) > MODULES:
        yield (
            f"importing {subject.source.target} loads {len(modules)} modules ({', '.join(modules[:5])} ...), and every"
            f" start of a scheduler pays for them: keep to {MODULES}, and import the rest inside the hooks"
        )


def hooks(subject: Subject) -> None:
    """C03: Every function that looks like a hook is one, and the required ones are there."""
    if isinstance(subject.loaded, PluginError):
        problem = subject.loaded.problem
        if problem.kind is ProblemKind.CONTRACT and not problem.hook:
            raise CheckFailed(problem.reason)
        _needs_module(subject)


def annotated(subject: Subject) -> None:
    """C04: Annotations of the hooks, where there are any, agree with the contract's."""
    demand(_annotation_faults(subject))


def _annotation_faults(subject: Subject) -> Iterator[str]:
    names = {**vars(author), "Sequence": Sequence, "Mapping": Mapping}
    for hook in _hooks(subject):
        function = getattr(_target(subject), hook)
        wanted = get_type_hints(getattr(hookspecs, hook), localns=names)
        try:
            given = get_type_hints(function, {**names, **inspect.unwrap(function).__globals__})
        except NameError:  # a name that only a type checker imports: it will judge
            continue
        for name, annotation in given.items():
            if name == "return":
                if not narrower(annotation, wanted[name]):
                    yield f"{hook} is annotated to return {_shown(annotation)}; it must be {_shown(wanted[name])}"
            elif name in wanted and not narrower(wanted[name], annotation):
                yield f"{hook} annotates {name!r} as {_shown(annotation)}; it is passed {_shown(wanted[name])}"


def narrower(given: Any, wanted: Any) -> bool:
    """Whether every value of one annotation satisfies another, as far as that can be told without a type checker."""
    if Any in (given, wanted) or wanted is object or given == wanted:
        return True
    if get_origin(given) in (UnionType, Union):
        return all(narrower(option, wanted) for option in get_args(given))
    if get_origin(wanted) in (UnionType, Union):
        return any(narrower(given, option) for option in get_args(wanted))
    kind, wanted_kind = get_origin(given) or given, get_origin(wanted) or wanted
    if not (isinstance(kind, type) and isinstance(wanted_kind, type)):
        return True
    if not issubclass(kind, wanted_kind):
        return False
    pairs = zip(_arguments(given, get_args(wanted)), get_args(wanted), strict=False)
    return all(narrower(argument, wanted_argument) for argument, wanted_argument in pairs)


def _arguments(given: Any, wanted: tuple[Any, ...]) -> Iterable[Any]:
    arguments = [argument for argument in get_args(given) if argument is not ...]
    if len(wanted) == 1 and len(arguments) > 1:  # tuple[str, int] as a Sequence[...]
        return [Union[tuple(arguments)]]  # noqa: UP007 - it is computed
    return arguments


def _shown(annotation: Any) -> str:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("anyaccel.model.", "").replace("collections.abc.", "")


def pure_info(subject: Subject) -> None:
    """C05: The plug-in says who it is, the same each time, from nothing but its own code."""
    _needs_module(subject)
    if isinstance(subject.loaded, PluginError):
        problem = subject.loaded.problem
        if problem.hook == "anyaccel_info":
            info = _info(subject) if problem.kind is ProblemKind.CONTRACT else None
            if not isinstance(info, PluginInfo) or info.vendor == subject.source.vendor:
                raise CheckFailed(f"anyaccel_info: {problem.reason}")
        raise NotApplicable("the plug-in cannot be loaded; see C01 and C03")
    watch = Watch(subject.source)
    with watch:
        answers = [_info(subject) for _ in range(2)]
    if answers[0] != answers[1]:
        raise CheckFailed(f"anyaccel_info must return the same each time (got {answers[0]} and {answers[1]})")
    demand(f"anyaccel_info must be a pure function, and it {event}; return constants" for event in watch.events)


def _target(subject: Subject) -> Any:
    return EntryPoint(name=subject.source.vendor, value=subject.source.target, group=GROUP).load()


def _hooks(subject: Subject) -> list[str]:
    plugin = subject.plugin
    return [name for name in hookspecs.HOOKS if plugin.implements(name)]


def _info(subject: Subject) -> Any:
    return _target(subject).anyaccel_info()


def _needs_module(subject: Subject) -> None:
    if isinstance(subject.loaded, PluginError) and subject.loaded.problem.kind is ProblemKind.LOAD:
        raise NotApplicable("the plug-in cannot be imported; see C01")
