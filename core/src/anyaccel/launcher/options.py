"""The options of run, acquire, use, prepare, Pool and sweeps.

Type checkers read the options from ``**options: Unpack[...]``. :func:`check_options` refuses unknown options at run
time.
"""

from __future__ import annotations

from anyaccel._typing import TypedDict
from anyaccel.errors import UnknownOptionError, UsageError
from anyaccel.text import shown, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import IO, Any, Literal

    from anyaccel.durations import Duration
    from anyaccel.launcher.environment import Bind
    from anyaccel.launcher.sandbox import Enforce
    from anyaccel.ledger import OnWait
    from anyaccel.model import Inventory
    from anyaccel.probe.machine import Machine

    Stream = int | IO[Any] | None


class StartOptions(TypedDict, total=False):
    """Options of the start of a process with devices; each is an aspect of :class:`anyaccel.launcher.launch.Launch`.

    Attributes:
        unallocated: Whether vendors outside the allocation are hidden, or keep the variables of the environment.
        mask: Whether masks name devices by stable id or by index, if the vendor's runtime accepts both.
        cap: Whether PyTorch and TensorFlow are also capped at the share of memory.
        bind: Whether the process runs on the processors nearest to its devices, if the machine names them; None for
            whole devices only.
        memory: Limit of host memory for the process and its descendants, without swap: bytes, or a text such as
            ``"8GiB"``.
        enforce: Whether the kernel denies the process the device nodes of all other devices: True to insist, ``"try"``
            to go without if the kernel cannot.
    """

    unallocated: Literal["hide", "inherit"]
    mask: Literal["id", "index"]
    cap: bool
    bind: Bind
    memory: int | str | None
    enforce: Enforce


class TakeOptions(StartOptions, total=False):
    """Options of a request for devices and of the start; see :func:`anyaccel.acquire`."""

    inventory: Inventory | None
    machine: str | Machine | None
    declare: Mapping[str, int] | None
    environ: Mapping[str, str] | None
    wait: Duration | None
    priority: int
    note: str
    avoid_busy: bool
    time: Duration | None
    on_wait: OnWait | None


class AcquireOptions(TakeOptions, total=False):
    """Options of :func:`anyaccel.acquire`."""

    timeout: Duration
    confined: bool


class RunOptions(TakeOptions, total=False):
    """Options of :func:`anyaccel.run`, with the time limit and the options of :func:`subprocess.run`."""

    grace: Duration
    signal: str | None
    input: Any
    capture_output: bool
    timeout: Duration | None
    check: bool
    bufsize: int
    executable: str | bytes | os.PathLike[Any] | None
    stdin: Stream
    stdout: Stream
    stderr: Stream
    preexec_fn: Callable[[], object] | None
    close_fds: bool
    shell: bool
    cwd: str | bytes | os.PathLike[Any] | None
    universal_newlines: bool | None
    text: bool | None
    encoding: str | None
    errors: str | None
    restore_signals: bool
    start_new_session: bool
    pass_fds: Collection[int]
    user: str | int | None
    group: str | int | None
    extra_groups: Iterable[str | int] | None
    umask: int
    pipesize: int
    process_group: int | None


_VALUES: Mapping[str, tuple[object, ...]] = {
    "unallocated": ("hide", "inherit"),
    "mask": ("id", "index"),
    "enforce": (True, False, "try"),
}
_LEAST_MEMORY = 1 << 20


def check_options(function: str, given: Mapping[str, object], *known: Iterable[str] | None) -> None:
    """Check the names of a function's options, and the values of ``unallocated``, ``mask``, ``enforce`` and ``memory``.

    Args:
        function: Name of the function, for the message.
        given: The options.
        known: Names of the options of the function, such as the keys of :class:`StartOptions`; None for no names.

    Raises:
        UnknownOptionError: If the function has no such option.
        UsageError: If a value is invalid.
    """
    names = [name for each in known for name in each or ()]  # __kwdefaults__ is None without keyword arguments
    for name in given:
        if name not in names:
            raise UnknownOptionError(f"{function}() has no option {shown(name)}", hint=_suggest(name, names))
    for name, values in _VALUES.items():
        if name in given and given[name] not in values:
            raise UsageError(f"{name} must be {_join(values)} (got {shown(given[name])})")
    memory = given.get("memory")
    if memory is not None:
        parse_memory(memory)


def parse_memory(memory: object) -> int:
    """Parse a limit of host memory, and return bytes.

    Args:
        memory: Bytes as an int, or a text such as ``"8GiB"`` or ``"1.5GB"``, which is rounded up to whole bytes.

    Raises:
        UsageError: If the value has another type, such as float or bool; if the text is no amount; or if the amount is
            less than 1 MiB, with which no program starts.
    """
    try:
        found: object = size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory {error}") from None
    # bool is an int: memory=True would be one byte.
    if isinstance(found, bool) or not isinstance(found, int) or found < _LEAST_MEMORY:
        raise UsageError(f"memory must be at least 1MiB, in bytes or as a text such as '8GiB' (got {memory!r:.60})")
    return found


def _join(values: tuple[object, ...]) -> str:
    """Return values as code, in a list that ends with "or"."""
    *first, last = map(repr, values)
    return f"{', '.join(first)} or {last}"


def _suggest(name: str, names: list[str]) -> str:
    """Return a hint with the known name nearest to a wrong name; with all known names if none is near."""
    import difflib

    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(names)}"
