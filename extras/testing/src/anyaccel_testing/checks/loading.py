"""C01 to C05: the plug-in can be found, is cheap to import, and identifies the vendor."""

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
from anyaccel_testing.watch import Watch, list_foreign_modules

IMPORT_SECONDS = 60.0
MODULES = 60
"""Limit of modules that a plug-in's import loads beyond anyaccel.plugin's own; this project's plug-ins load 3 to 12."""

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


def check_entry_point(subject: Subject) -> None:
    """C01: The entry point leads to the plug-in and has the name of the plug-in's vendor."""
    if not isinstance(subject.loaded, PluginError):
        return
    problem = subject.loaded.problem
    if problem.kind is ProblemKind.LOAD:
        raise CheckFailed(f"{problem.reason}; correct the entry point, or the module that it names")
    info = _call_info(subject) if problem.hook == "anyaccel_info" else None
    if isinstance(info, PluginInfo) and info.vendor != subject.source.vendor:
        raise CheckFailed(problem.reason)


def check_import(subject: Subject) -> None:
    """C02: Importing the plug-in loads no vendor library and little else."""
    _require_module(subject)
    # A fresh interpreter: this process was forked from one that has imported more than a scheduler has.
    argv = [sys.executable, "-I", "-c", WHAT_AN_IMPORT_LOADS, json.dumps(sys.path), subject.source.target]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    if done.returncode:
        end = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise CheckFailed(f"importing {subject.source.target} in a fresh interpreter fails: {end}")
    # The last line: the plug-in may print while it is imported.
    modules, libraries = json.loads(done.stdout.strip().rpartition("\n")[2])
    demand(_find_import_faults(subject, modules, libraries))


def _find_import_faults(subject: Subject, modules: list[str], libraries: list[str]) -> Iterator[str]:
    way_out = "import it inside the function that ctx.query is given"
    for name in list_foreign_modules(modules, subject.source):
        yield f"importing {subject.source.target} loads {name}; {way_out}"
    for name in libraries:
        yield f"importing {subject.source.target} loads the library {name}; {way_out}"
    if len(modules) > MODULES:
        yield (
            f"importing {subject.source.target} loads {len(modules)} modules ({', '.join(modules[:5])} ...), and every"
            f" start of a scheduler pays for them: keep to {MODULES}, and import the rest inside the hooks"
        )


def check_hooks(subject: Subject) -> None:
    """C03: Every function with a hook's name or a similar name is a hook, and no required hook is missing."""
    if isinstance(subject.loaded, PluginError):
        problem = subject.loaded.problem
        if problem.kind is ProblemKind.CONTRACT and not problem.hook:
            raise CheckFailed(problem.reason)
        _require_module(subject)


def check_annotations(subject: Subject) -> None:
    """C04: Annotations of the hooks, where there are any, agree with the contract's."""
    demand(_find_annotation_faults(subject))


def _find_annotation_faults(subject: Subject) -> Iterator[str]:
    names = {**vars(author), "Sequence": Sequence, "Mapping": Mapping}
    for hook in _list_hooks(subject):
        function = getattr(load_target(subject), hook)
        wanted = get_type_hints(getattr(hookspecs, hook), localns=names)
        try:
            given = get_type_hints(function, {**names, **inspect.unwrap(function).__globals__})
        except NameError:  # a name imported under TYPE_CHECKING: left to the type checker
            continue
        for name, annotation in given.items():
            if name == "return":
                if not is_narrower(annotation, wanted[name]):
                    yield f"{hook} is annotated to return {_format(annotation)}; it must be {_format(wanted[name])}"
            elif name in wanted and not is_narrower(wanted[name], annotation):  # arguments are contravariant
                yield f"{hook} annotates {name!r} as {_format(annotation)}; it is passed {_format(wanted[name])}"


def is_narrower(given: Any, wanted: Any) -> bool:
    """Return False if some value of annotation `given` violates `wanted`; True when only a type checker can say."""
    # An unparametrized or unknown form counts as right: a wrong complaint would cost more than a missed one.
    if Any in (given, wanted) or wanted is object or given == wanted:
        return True
    if get_origin(given) in (UnionType, Union):
        return all(is_narrower(option, wanted) for option in get_args(given))
    if get_origin(wanted) in (UnionType, Union):
        return any(is_narrower(given, option) for option in get_args(wanted))
    kind, wanted_kind = get_origin(given) or given, get_origin(wanted) or wanted
    if not (isinstance(kind, type) and isinstance(wanted_kind, type)):
        return True
    if not issubclass(kind, wanted_kind):
        return False
    pairs = zip(_get_arguments(given, get_args(wanted)), get_args(wanted), strict=False)
    return all(is_narrower(argument, wanted_argument) for argument, wanted_argument in pairs)


def _get_arguments(given: Any, wanted: tuple[Any, ...]) -> Iterable[Any]:
    arguments = [argument for argument in get_args(given) if argument is not ...]
    if len(wanted) == 1 and len(arguments) > 1:  # tuple[str, int] as a Sequence[...]
        return [Union[tuple(arguments)]]  # noqa: UP007 - it is computed
    return arguments


def _format(annotation: Any) -> str:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("anyaccel.model.", "").replace("collections.abc.", "")


def check_info(subject: Subject) -> None:
    """C05: Info returns the same identity each time, from the plug-in's code alone."""
    _require_module(subject)
    if isinstance(subject.loaded, PluginError):
        problem = subject.loaded.problem
        if problem.hook == "anyaccel_info":
            info = _call_info(subject) if problem.kind is ProblemKind.CONTRACT else None
            if not isinstance(info, PluginInfo) or info.vendor == subject.source.vendor:
                raise CheckFailed(f"anyaccel_info: {problem.reason}")
        raise NotApplicable("the plug-in cannot be loaded; see C01 and C03")
    watch = Watch(subject.source)
    with watch:
        answers = [_call_info(subject) for _ in range(2)]
    if answers[0] != answers[1]:
        raise CheckFailed(f"anyaccel_info must return the same each time (got {answers[0]} and {answers[1]})")
    demand(f"anyaccel_info must be a pure function, and it {event}; return constants" for event in watch.events)


def load_target(subject: Subject) -> Any:
    """Return the module or object of the entry point."""
    return EntryPoint(name=subject.source.vendor, value=subject.source.target, group=GROUP).load()


def _list_hooks(subject: Subject) -> list[str]:
    plugin = subject.plugin
    return [name for name in hookspecs.HOOKS if plugin.implements(name)]


def _call_info(subject: Subject) -> Any:
    return load_target(subject).anyaccel_info()


def _require_module(subject: Subject) -> None:
    if isinstance(subject.loaded, PluginError) and subject.loaded.problem.kind is ProblemKind.LOAD:
        raise NotApplicable("the plug-in cannot be imported; see C01")
