"""Cap the memory of frameworks at import, without touching a device.

PyTorch reads a cap from a variable since 2.10; earlier versions fail at the same text. So the cap is queued at the
import of PyTorch, for the moment at which PyTorch initializes devices. A Python child process queues its own.

TensorFlow is capped by a call alone (tensorflow.org/guide/gpu, "Limiting GPU memory growth"), which excludes memory
growth. The call comes right before TensorFlow initializes devices, so that a program may set growth before.

This module also runs in the interpreters of commands: it imports no module of this package, and works with Python 3.8.
"""

from __future__ import annotations

import os
import re
import sys
from _thread import get_ident
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

FRACTION_VARIABLE = "ANYACCEL_MEMORY_FRACTION"
"""The worker's share of the memory of its only device, between 0 and 1."""
LIMIT_VARIABLE = "ANYACCEL_MEMORY_LIMIT"
"""The share in bytes."""
GROWTH_VARIABLE = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Set by plug-ins of vendors whose devices TensorFlow can cap."""
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
"""Directory with the ``sitecustomize`` that applies the cap, for the front of ``PYTHONPATH``."""

_KEY = "per_process_memory_fraction"
_VARIABLE_NAMES = r"PYTORCH_([A-Z]+_)?ALLOC_CONF"
"""The variable of PyTorch's settings has had several names."""


def frameworks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the frameworks capped by :func:`install` in an environment with a fraction.

    TensorFlow is capped only with :data:`GROWTH_VARIABLE` in the environment.
    """
    return ("PyTorch", "TensorFlow") if GROWTH_VARIABLE in environ else ("PyTorch",)


def install() -> None:
    """Have frameworks capped at the fraction in the environment of this process, now or at their import.

    Does nothing without a valid fraction. TensorFlow is capped only with :data:`GROWTH_VARIABLE`. A second call has no
    effect before the import of a framework, and patches an imported framework again.
    """
    if _parse_fraction(os.environ.get(FRACTION_VARIABLE)) is not None:
        _watch_for("torch", _cap)
        if GROWTH_VARIABLE in os.environ:
            _watch_for("tensorflow", _cap_tensorflow)


def _watch_for(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now if the module is imported already, else after its import.

    Does nothing if a function waits for the module already. Exceptions of the function pass, also out of the import.
    """
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finder for a single module: delegates to the next finders, and calls a function after the import.

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
        """Return the spec of the other finders, with a loader to call the function after the import.

        Return None for other modules, if no other finder knows the module, and while this thread is asking the others.
        A loader without ``exec_module`` stays as found, so that the function is never called.
        """
        thread = get_ident()
        if name != self.name or thread in self._asking:  # another finder of this kind asks this one, too
            return None
        self._asking.add(thread)
        try:
            others = (each for each in list(sys.meta_path) if each is not self and hasattr(each, "find_spec"))
            spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        finally:
            self._asking.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            # A wrapper, since some loaders have no __dict__ for a method; __getattr__ has the rest.
            spec.loader = _Loader(spec.loader, self._executed)  # type: ignore[assignment]
        return spec

    def _executed(self, module: ModuleType) -> None:
        """Remove this finder, and call the function with the module; does nothing if removed before."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _Loader:
    """Stands in for a loader, possibly of several modules, until a module is executed."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Put the real loader back into the module, execute the module, and call the function if that succeeds."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _cap_tensorflow(module: Any) -> None:
    """Patch TensorFlow, so that the first use of a device caps all GPUs at the bytes in :data:`LIMIT_VARIABLE`.

    A limit that is missing or under 1 MiB at that time caps nothing. There is one attempt, and after a success the
    growth variable is removed from the environment. An unknown version or a refusal is reported on
    standard error, and the program goes on.
    """
    # Private, in versions 2.0 to 2.21: any use of a device initializes the context first.
    kind = getattr(sys.modules.get("tensorflow.python.eager.context"), "Context", None)
    initialize = getattr(kind, "ensure_initialized", None)
    if kind is None or initialize is None:
        return _report("TensorFlow", "its Context.ensure_initialized is missing")
    done: list[bool] = []

    def ensure_initialized(self: Any) -> Any:
        most = re.fullmatch("[0-9]{1,18}", os.environ.get(LIMIT_VARIABLE, ""))
        if not done and most and int(most[0]) >> 20:
            done.append(True)
            try:
                _limit_logical(module.config, int(most[0]) >> 20)
                os.environ.pop(GROWTH_VARIABLE, None)  # it would override the cap
            except Exception as error:  # noqa: BLE001 - devices without caps, or already initialized
                _report("TensorFlow", error)
        return initialize(self)

    kind.ensure_initialized = ensure_initialized
    return None


def _limit_logical(config: Any, most: int) -> None:
    """Limit the logical devices of each GPU to ``most`` MiB in total; scale down the program's own, rounded down.

    A GPU without logical devices of the program gets one. A GPU whose own limits fit stays unchanged. Memory growth is
    switched off on a GPU that gets new limits. Errors of TensorFlow pass through.
    """
    for device in config.list_physical_devices("GPU"):
        chosen = [each.memory_limit for each in config.get_logical_device_configuration(device) or ()]
        if chosen and sum(chosen) <= most:
            continue
        if config.experimental.get_memory_growth(device):
            config.experimental.set_memory_growth(device, False)
        limits = [int(limit * most / sum(chosen)) for limit in chosen] or [most]
        logical = [config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]
        config.set_logical_device_configuration(device, logical)


def _cap(torch: Any) -> None:
    """Queue the cap in each backend of PyTorch, until its initialization; also in later registered backends.

    A backend that is initialized already is capped at once. For later backends, PyTorch's function for the registration
    is replaced. Backends without the needed functions are left out. Other errors are reported on standard error, and
    the program goes on.
    """
    queued: list[object] = []

    def queue_each() -> None:
        for backend in list(vars(torch).values()):
            if {"_lazy_call", "set_" + _KEY} <= set(getattr(backend, "__dict__", ())) and backend not in queued:
                queued.append(backend)
                # Private, in versions 1.0 to 2.15: the call waits for the initialization of the backend.
                backend._lazy_call(_make_setter(backend))  # noqa: SLF001

    _try(queue_each)
    theirs = getattr(torch, "_register_device_module", None)
    if theirs is None:
        return

    def register(*args: Any, **options: Any) -> None:
        theirs(*args, **options)
        _try(queue_each)

    # Private as well: packages with a backend outside PyTorch register it by this function.
    torch._register_device_module = register  # noqa: SLF001


def _try(then: Callable[[], None]) -> None:
    """Call a function; report an Exception on standard error instead of raising. Errors of the report pass."""
    try:
        then()
    except Exception as error:  # noqa: BLE001 - an unknown version or device: the program goes on
        _report("PyTorch", error)


def _make_setter(backend: Any) -> Callable[[], None]:
    """Return a function that caps each device of a backend; errors are reported on standard error.

    The cap is the least of the fraction and of the fractions in PyTorch's variables, at the time of the call. Without a
    fraction, nothing is capped.
    """

    def set_each() -> None:
        fraction = _parse_fraction(os.environ.get(FRACTION_VARIABLE))
        if fraction is None:  # the share was released in between
            return
        texts = [text for name, text in os.environ.items() if re.fullmatch(_VARIABLE_NAMES, name)]
        part = min([fraction, *(given for given in map(_parse_setting, texts) if given is not None)])
        for index in range(backend.device_count()):
            getattr(backend, "set_" + _KEY)(part, index)

    return lambda: _try(set_each)


def _parse_setting(text: str) -> float | None:
    """Return the fraction in a value of the variable; None without a fraction between 0 and 1, both excluded."""
    match = re.search(r"(?:^|,)\s*" + _KEY + r"\s*:\s*([0-9.]+)", text)
    return _parse_fraction(match.group(1) if match else None)


def _parse_fraction(text: str | None) -> float | None:
    """Return the number in a text; None unless between 0 and 1, both excluded."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0 < value < 1 else None


def _report(framework: str, reason: object) -> None:
    """Write on standard error, in one line, that a framework is not capped, and the reason; ignore errors of that."""
    line = "anyaccel: {} takes no cap on memory here: {}\n".format(framework, " ".join(str(reason).split()))
    try:  # noqa: SIM105 - an import of contextlib for this is no better
        sys.stderr.write(line)
    except (OSError, ValueError, AttributeError):  # no reader, closed, or None
        pass
