"""Cap a framework that no variable caps in all its versions: when it is imported, and without touching a device.

PyTorch reads a cap from a variable since 2.10; earlier versions end at the same text. So the cap is put on when a
process imports it: it is queued for the moment at which PyTorch initializes devices, and written into the variable
where this version takes it, which processes that are started from here inherit.

This module runs in the interpreters of commands, too: it imports nothing of ours and works from Python 3.8 on.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence
    from types import ModuleType
    from typing import Any

FRACTION_VARIABLE = "ANYACCEL_MEMORY_FRACTION"
"""Part of the memory of its only device that a worker holds, between 0 and 1."""
FRAMEWORK = "PyTorch"
MODULE = "torch"
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
"""Directory whose ``sitecustomize`` puts the cap on, for the front of ``PYTHONPATH``."""

_KEY = "per_process_memory_fraction"
_VARIABLE = "PYTORCH_ALLOC_CONF"
_ITS_NAMES = re.compile(r"PYTORCH_([A-Z]+_)?ALLOC_CONF")
"""The plain name is the youngest; the others come first where they are set."""


def install(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have PyTorch keep to the fraction that an environment names, from its import on; at once where it is imported.

    Does nothing where no fraction is named.

    Args:
        environ: The environment of this process.
    """
    fraction = _fraction(environ.get(FRACTION_VARIABLE))
    if fraction is None:
        return
    if MODULE in sys.modules:
        _cap(sys.modules[MODULE], fraction, environ)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(lambda module: _cap(module, fraction, environ)))


class _Finder:
    """Lets the others find a module, and calls a function once it has been executed."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        others = (each for each in list(sys.meta_path) if each is not self and hasattr(each, "find_spec"))
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then(module)

        loader.exec_module = exec_module  # of this one import; the loader stays what it is


def _cap(module: ModuleType, fraction: float, environ: MutableMapping[str, str]) -> None:
    """Cap PyTorch. Whatever its version lacks, the program goes on."""
    if _release(module) >= (2, 10):
        _write(module, fraction, environ)
    for backend in list(vars(module).values()):
        if {"_lazy_call", "set_" + _KEY} <= set(getattr(backend, "__dict__", ())):
            try:
                # Private, and there from 1.0 to 2.15: the call waits until the backend is initialized.
                backend._lazy_call(_setting(backend, fraction, environ))  # noqa: SLF001
            except Exception as error:  # noqa: BLE001 - a version that we do not know
                _tell(error)


def _setting(backend: Any, fraction: float, environ: MutableMapping[str, str]) -> Callable[[], None]:
    def set_each() -> None:
        part = min([fraction, *(given for given in map(_written, _texts(environ)) if given is not None)])
        try:
            for index in range(backend.device_count()):
                getattr(backend, "set_" + _KEY)(part, index)
        except Exception as error:  # noqa: BLE001 - devices that know no cap; what is raised here would end the program
            _tell(error)

    return set_each


def _write(module: Any, fraction: float, environ: MutableMapping[str, str]) -> None:
    """Write the cap into the variable, beside what the user has set, where this build does not refuse it."""
    check = getattr(getattr(module, "_C", None), "_accelerator_setAllocatorSettings", None)
    names = [name for name in environ if _ITS_NAMES.fullmatch(name)] or [_VARIABLE]
    for name in names:
        text = environ.get(name, "")
        part = min(fraction, _written(text) or fraction)
        kept = [entry for entry in text.split(",") if entry.strip() and entry.partition(":")[0].strip() != _KEY]
        merged = ",".join([*kept, f"{_KEY}:{part:g}"])
        try:
            if check is not None:
                check(merged)
        except Exception as error:  # noqa: BLE001 - it would end the program at its first allocation
            _tell(error)
        else:
            environ[name] = merged


def _texts(environ: MutableMapping[str, str]) -> list[str]:
    return [text for name, text in environ.items() if _ITS_NAMES.fullmatch(name)]


def _written(text: str) -> float | None:
    """The fraction in the value of the variable; None where it has none that counts."""
    match = re.search(r"(?:^|,)\s*" + _KEY + r"\s*:\s*([0-9.]+)", text)
    return _fraction(match.group(1) if match else None)


def _fraction(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0 < value < 1 else None


def _release(module: ModuleType) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)", str(getattr(module, "__version__", "")))
    return tuple(int(number) for number in numbers.groups()) if numbers else ()


def _tell(error: Exception) -> None:
    sys.stderr.write("anyaccel: {} takes no cap on memory here: {}\n".format(FRAMEWORK, " ".join(str(error).split())))
