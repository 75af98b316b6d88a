"""Cap frameworks that no variable caps in all their versions: when they are imported, and without touching a device.

PyTorch reads a cap from a variable since 2.10; earlier versions end at the same text. So the cap is put on when a
process imports it: it is queued for the moment at which PyTorch initializes devices, and then written into the variable
where this version takes it, which processes that are started from here inherit.

TensorFlow is capped by a call alone (tensorflow.org/guide/gpu, "Limiting GPU memory growth"), which excludes that it
grows. The call is made right before TensorFlow initializes devices: a program that sets growth before is not disturbed.

This module runs in the interpreters of commands, too: it imports nothing of ours and works from Python 3.8 on.
"""

from __future__ import annotations

import os
import re
import sys
from _thread import get_ident
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from types import ModuleType
    from typing import Any

FRACTION_VARIABLE = "ANYACCEL_MEMORY_FRACTION"
"""Part of the memory of its only device that a worker holds, between 0 and 1."""
LIMIT_VARIABLE = "ANYACCEL_MEMORY_LIMIT"
"""The same in bytes."""
GROWTH_VARIABLE = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Set by vendors for which TensorFlow has devices that it may be capped on."""
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
"""Directory whose ``sitecustomize`` puts the cap on, for the front of ``PYTHONPATH``."""

_KEY = "per_process_memory_fraction"
_VARIABLE = "PYTORCH_ALLOC_CONF"
_ITS_NAMES = re.compile(r"PYTORCH_([A-Z]+_)?ALLOC_CONF")
"""The plain name is the youngest; the others come first where they are set."""


def frameworks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the frameworks that :func:`install` will cap in an environment that names a fraction."""
    return ("PyTorch", "TensorFlow") if GROWTH_VARIABLE in environ else ("PyTorch",)


def install(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have frameworks keep to what an environment names when they initialize devices.

    Does nothing where no fraction is named.

    Args:
        environ: The environment of this process.
    """
    if _fraction(environ.get(FRACTION_VARIABLE)) is not None:
        _watch_for("torch", lambda module: _cap(module, environ))
        if GROWTH_VARIABLE in environ:
            _watch_for("tensorflow", lambda module: _cap_tensorflow(module, environ))


def _watch_for(name: str, then: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Lets the others find a module, and calls a function once it has been executed.

    Attributes:
        name: Name of the module.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then
        self._asking: set[int] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        thread = get_ident()
        if name != self.name or thread in self._asking:  # another one that asks all others asks us back
            return None
        self._asking.add(thread)
        try:
            others = (each for each in list(sys.meta_path) if each is not self and hasattr(each, "find_spec"))
            spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        finally:
            self._asking.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._executed)  # type: ignore[assignment] # all that it lacks is theirs
        return spec

    def _executed(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _Loader:
    """Stands for a loader, which may serve other modules as well, until it has executed one."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _cap_tensorflow(module: Any, environ: MutableMapping[str, str]) -> None:
    """Cap TensorFlow. Whatever its version lacks, the program goes on."""
    # Private, and there from 2.0 to 2.21: all that uses a device initializes the context first.
    kind = getattr(sys.modules.get("tensorflow.python.eager.context"), "Context", None)
    initialize = getattr(kind, "ensure_initialized", None)
    if kind is None or initialize is None:
        return _tell("TensorFlow", "its Context.ensure_initialized is missing")
    done: list[bool] = []

    def ensure_initialized(self: Any) -> Any:
        most = re.fullmatch("[0-9]{1,18}", environ.get(LIMIT_VARIABLE, ""))
        if not done and most and int(most[0]) >> 20:
            done.append(True)
            try:
                _limit_logical(module.config, int(most[0]) >> 20)
                environ.pop(GROWTH_VARIABLE, None)  # which would win
            except Exception as error:  # noqa: BLE001 - devices that know no cap, or are in use already
                _tell("TensorFlow", error)
        return initialize(self)

    kind.ensure_initialized = ensure_initialized
    return None


def _limit_logical(config: Any, most: int) -> None:
    """Give each GPU logical devices of so many MiB together: those of the program, or one."""
    for device in config.list_physical_devices("GPU"):
        chosen = [each.memory_limit for each in config.get_logical_device_configuration(device) or ()]
        if chosen and sum(chosen) <= most:
            continue
        if config.experimental.get_memory_growth(device):
            config.experimental.set_memory_growth(device, False)
        limits = [int(limit * most / sum(chosen)) for limit in chosen] or [most]
        logical = [config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]
        config.set_logical_device_configuration(device, logical)


def _cap(torch: Any, environ: MutableMapping[str, str]) -> None:
    """Cap PyTorch. Whatever its version lacks, the program goes on."""
    queued: list[object] = []

    def queue_each() -> None:
        for backend in list(vars(torch).values()):
            if {"_lazy_call", "set_" + _KEY} <= set(getattr(backend, "__dict__", ())) and backend not in queued:
                queued.append(backend)
                # Private, and there from 1.0 to 2.15: the call waits until the backend is initialized.
                backend._lazy_call(_setting(torch, backend, environ))  # noqa: SLF001

    _try(queue_each)
    theirs = getattr(torch, "_register_device_module", None)
    if theirs is None:
        return

    def register(*args: Any, **options: Any) -> None:
        theirs(*args, **options)
        _try(queue_each)

    # By this, those who make a backend beside PyTorch put it in; private as well.
    torch._register_device_module = register  # noqa: SLF001


def _try(then: Callable[[], None]) -> None:
    try:
        then()
    except Exception as error:  # noqa: BLE001 - a version, or a device, that we do not know: the program goes on
        _tell("PyTorch", error)


def _setting(torch: Any, backend: Any, environ: MutableMapping[str, str]) -> Callable[[], None]:
    def set_each() -> None:
        fraction = _fraction(environ.get(FRACTION_VARIABLE))
        if fraction is None:  # the share has been given back
            return
        texts = [text for name, text in environ.items() if _ITS_NAMES.fullmatch(name)]
        part = min([fraction, *(given for given in map(_written, texts) if given is not None)])
        for index in range(backend.device_count()):
            getattr(backend, "set_" + _KEY)(part, index)
        if _release(torch) >= (2, 10):
            _write(torch, part, environ)

    return lambda: _try(set_each)


def _write(torch: Any, part: float, environ: MutableMapping[str, str]) -> None:
    """Write the cap beside what PyTorch has read from its variable, where this build does not refuse it.

    Not before it has read that: a program may set the variable after it has imported PyTorch.
    """
    try:
        text = torch._C._accelerator_getAllocatorSettings()  # noqa: SLF001
        kept = [entry for entry in text.split(",") if entry.strip() and entry.partition(":")[0].strip() != _KEY]
        merged = ",".join([*kept, f"{_KEY}:{part:g}"])
        torch._C._accelerator_setAllocatorSettings(merged)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - what it starts would end at its first allocation
        return
    names = [name for name in environ if _ITS_NAMES.fullmatch(name) and environ[name] == text and text]
    environ.update(dict.fromkeys(names or [_VARIABLE], merged))


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


def _tell(framework: str, reason: object) -> None:
    sys.stderr.write("anyaccel: {} takes no cap on memory here: {}\n".format(framework, " ".join(str(reason).split())))
