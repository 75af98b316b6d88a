"""Values as bytes for another process of ours: large buffers beside the pickle, classes of a script by value."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

PROTOCOL = 5
LARGE = 1 << 15
"""Bytes from which a buffer travels beside the pickle: below, a page of its own costs more than a copy."""

SCRIPT = b"__main__"


class Pickled(NamedTuple):
    """A value on its way.

    Attributes:
        data: The pickle.
        buffers: What it refers to, in order; memory of the value itself, not copies.
    """

    data: bytes
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.data) + sum(map(len, self.buffers))

    def frozen(self) -> Pickled:
        """The same, independent of what becomes of the value's memory."""
        return Pickled(self.data, [memoryview(bytes(buffer)) for buffer in self.buffers]) if self.buffers else self


def dumps(value: Any) -> Pickled:
    """Pickle a value for a worker, or a result for the caller.

    What the other side can import goes by name; what it cannot - from a script, a shell, a closure - goes by value.

    Raises:
        Exception: What the value's own code raised, or ``pickle.PicklingError`` and its like.
    """
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    data = _dumps(value, keep_inside)
    if data is None:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]

        buffers.clear()
        data = cloudpickle.dumps(value, PROTOCOL, buffer_callback=keep_inside)
    return Pickled(data, buffers)


def dumps_whole(value: Any) -> bytes:
    """The same in one piece, for what is sent more than once."""
    data = _dumps(value, None)
    if data is None:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]

        data = cloudpickle.dumps(value, PROTOCOL)
    return data


def dumps_error(error: BaseException, text: str) -> Pickled:
    """Pickle an exception and its traceback as text: the exception by itself, so that its text can be read without it.

    Args:
        error: The exception. Where it cannot travel, its text must do.
        text: Its traceback.
    """
    name = type(error).__name__
    try:
        summary = f"{name}: {error}"
    except Exception:  # noqa: BLE001 - its class decides what its text is
        summary = name
    try:
        body = _without_registry(error) or dumps_whole(error)
        loads(body)  # an exception's class decides how it is made again, and many get it wrong
    except Exception:  # noqa: BLE001
        body = b""
    return dumps((body, summary, text))


def _without_registry(error: BaseException) -> bytes | None:
    """Pickle an exception by name as its class says, or None where that would not do.

    Some libraries register a way of their own for all exceptions, which not every caller can read.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, PROTOCOL)
    pickler.dispatch_table = {}
    try:
        pickler.dump(error)
    except Exception:  # noqa: BLE001 - as in _dumps()
        return None
    data = file.getvalue()
    return None if SCRIPT in data or _by_value(data) else data


def _dumps(value: Any, keep_inside: Callable[[pickle.PickleBuffer], bool] | None) -> bytes | None:
    """Pickle by name, or None where that would not do."""
    try:
        data = pickle.dumps(value, PROTOCOL, buffer_callback=keep_inside)
    except Exception:  # noqa: BLE001 - lambdas, closures and the like raise several kinds; the other way tells the truth
        return None
    # A name in the script of this process would be looked up in the script of another.
    return None if SCRIPT in data or _by_value(data) else data


def loads(data: bytes | memoryview, buffers: list[memoryview] | None = None) -> Any:
    """Make the value again. Large arrays keep using the memory of ``buffers``: nothing is copied."""
    return pickle.loads(data, buffers=buffers or ())  # noqa: S301 - from a process that runs the same user's code


def _by_value(data: bytes) -> bool:
    """Whether the pickle names a module that the user asked cloudpickle to send by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    names = cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()
    return bool(names) and any(name.encode() in data for name in names)
