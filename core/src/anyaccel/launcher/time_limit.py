"""Time limits of what runs with devices: when it ends, which signal it gets before that, and what people read of both.

What ends it is the monitor, the supervisor, the sweep or the call that waits for it; all of them keep to these values.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable
from functools import partial

from anyaccel.errors import UsageError
from anyaccel.linux import process
from anyaccel.linux.mark import Mark
from anyaccel.linux.teardown import GRACE_SECONDS, Confirm, find_carriers
from anyaccel.model import Value
from anyaccel.text import duration, elapsed, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.ledger import Lease

STATUS = 124
"""Exit status of a command of ours that waited for what its time limit has ended; that of timeout(1)."""
_NEVER_CAUGHT = (signal.SIGKILL, signal.SIGSTOP)
_MINUTE = 60.0
_LOOKS = 10
"""How often the carriers of a mark are looked for where processes start faster than one look takes."""


class EarlySignal(Value):
    """A signal that comes some time before a time limit, so that programs can save what they have.

    Attributes:
        number: The signal.
        seconds: How long before the limit.
    """

    number: int
    seconds: float

    @classmethod
    def parse(cls, text: object) -> EarlySignal:
        """Read ``NAME@DURATION``, such as ``USR1@60s``; a signal may also be given with SIG in front, or by its number.

        Raises:
            ValueError: When it is none, or when no program can catch the signal.
        """
        name, _, before = text.partition("@") if isinstance(text, str) else ("", "", "")
        try:
            number = _signal(name.upper())
            seconds = duration(before)
        except ValueError:
            raise ValueError(
                f"must be a signal and how long before the time limit it is sent, such as USR1@60s (got {shown(text)})"
            ) from None
        if number in _NEVER_CAUGHT:
            raise ValueError(f"must be a signal that a program can catch, such as USR1@60s (got {shown(text)})")
        return cls(number=number, seconds=seconds)

    @property
    def name(self) -> str:
        """Its name, such as ``SIGUSR1``."""
        return signal.Signals(self.number).name

    def send(self, mark: Mark) -> int:
        """Send it to each process of this user that carries a mark and catches the signal.

        The default action of most signals ends a process: a shell or a data loader that does not catch it lives on.

        Returns:
            How many processes got it.
        """
        sent: set[int] = set()

        def tell(pid: int, confirm: Confirm) -> None:
            if pid in sent or process.user(pid) != os.getuid() or not process.catches(pid, self.number):
                return
            if process.send(pid, self.number, partial(confirm, pid)):
                sent.add(pid)

        find = find_carriers([mark])
        with contextlib.suppress(OSError):  # no descriptor is left to look: the limit ends what runs all the same
            for _ in range(_LOOKS):
                if find(tell):
                    break
        return len(sent)

    def __str__(self) -> str:
        return f"{self.name.removeprefix('SIG')}@{format_limit(self.seconds)}"


def _signal(name: str) -> int:
    if name.isascii() and name.isdecimal():
        return signal.Signals(int(name))
    try:
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError as error:
        raise ValueError(name) from error


class TimeLimit(Value):
    """When something that runs is ended.

    Attributes:
        seconds: How long it may run.
        until: When that is over, in seconds since the boot.
        grace: Seconds between SIGTERM and SIGKILL.
        early: The signal before the end; None for none.
    """

    seconds: float
    until: float
    grace: float = GRACE_SECONDS
    early: EarlySignal | None = None

    @classmethod
    def begin(cls, seconds: float, grace: float = GRACE_SECONDS, early: EarlySignal | None = None) -> TimeLimit:
        """The limit of what starts now."""
        return cls(seconds=seconds, until=process.boot_seconds() + seconds, grace=grace, early=early)

    @classmethod
    def for_lease(
        cls, lease: Lease | None, seconds: float | None, grace: float, early: EarlySignal | None = None
    ) -> TimeLimit | None:
        """The limit of what runs with a lease; None where there is none.

        Args:
            lease: The lease; None where nothing is held.
            seconds: What was asked for; None where the machine's configuration may give one.
            grace: Seconds between SIGTERM and SIGKILL.
            early: The signal before the end; None for none.
        """
        if lease is None or lease.until is None:
            return None
        whole = round(lease.until - process.boot_seconds()) if seconds is None else seconds
        return cls(seconds=whole, until=lease.until, grace=grace, early=early)

    @property
    def early_at(self) -> float | None:
        """When the signal before the end is sent, in seconds since the boot; None for never."""
        return None if self.early is None else self.until - self.early.seconds

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return process.boot_seconds() >= self.until

    @property
    def message(self) -> str:
        """What people read when it has ended something."""
        return describe_timeout(self.seconds)

    def send_early(self, mark: Mark) -> str:
        """Send the signal before the end to what carries a mark, and return what people read of that."""
        if self.early is None:
            return ""
        count = self.early.send(mark)
        to = f"{count} process{'es' * (count != 1)}" if count else "no process, since none catches it"
        before = f"{format_limit(self.early.seconds)} before the time limit of {format_limit(self.seconds)}"
        return f"{before}: {self.early.name} sent to {to}"


class Countdown:
    """The time until a limit is over, in which its early signal is sent when that is due.

    Args:
        limit: The limit; None for none.
        mark: The mark whose carriers get the early signal.
        tell: Told what people read of the early signal.

    Attributes:
        early_at: When the early signal is sent, in seconds since the boot; None for never, or no more.
    """

    def __init__(self, limit: TimeLimit | None, mark: Mark, tell: Callable[[str], object]) -> None:
        self.early_at = None if limit is None else limit.early_at
        self._limit = limit
        self._mark = mark
        self._tell = tell

    def step(self) -> float:
        """Send the early signal if it is due, and return the seconds until the next step: 0 once the time is over."""
        if self._limit is None:
            return math.inf
        if self.early_at is not None and process.boot_seconds() >= self.early_at:
            self.early_at = None
            self._tell(self._limit.send_early(self._mark))
        moment = self._limit.until if self.early_at is None else self.early_at
        return max(0.0, moment - process.boot_seconds())


def describe_timeout(seconds: float) -> str:
    """What people read when a time limit has ended something."""
    return f"time limit of {format_limit(seconds)} reached: ended"


def check_early(text: str | None, seconds: float | None) -> EarlySignal | None:
    """Read the signal before a time limit, and check that it comes after the beginning.

    Args:
        text: The signal and the time, as :meth:`EarlySignal.parse` takes them; None for none.
        seconds: The time limit; None where there is none.

    Raises:
        UsageError: When it is none, or does not fit the limit.
    """
    if text is None:
        return None
    try:
        early = EarlySignal.parse(text)
    except ValueError as error:
        raise UsageError(f"signal {error}") from error
    if seconds is None:
        raise UsageError(
            f"signal {early} is sent before a time limit, and there is none", hint="give a time limit as well: time"
        )
    if early.seconds >= seconds:
        raise UsageError(
            f"signal {early} is to be sent {format_limit(early.seconds)} before the time limit, which is"
            f" {format_limit(seconds)}: nothing runs by then",
            hint="give a shorter time before the limit, or a longer limit",
        )
    return early


def format_limit(seconds: float) -> str:
    """Write a time limit for people, parts of a second as well."""
    return f"{seconds:g}s" if seconds < _MINUTE else elapsed(seconds)


def say(text: str, descriptor: int = 2) -> None:
    """Tell people something in a line; does nothing where that cannot be written."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"anyaccel: {text}\n".encode(errors="replace"))


def append_line(text: str, path: str) -> None:
    """Add a line of its own to a log."""
    with contextlib.suppress(OSError):
        log = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(log).st_size
            if size and os.pread(log, 1, size - 1) != b"\n":
                os.write(log, b"\n")
            say(text, log)
        finally:
            os.close(log)
