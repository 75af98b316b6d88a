"""Time limits: the end, the early signal, and the messages about both.

The monitor, the supervisor of a job, a sweep or the waiting call enforces a time limit; all of them use this module.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections.abc import Callable

from anyaccel.errors import UsageError
from anyaccel.linux import GRACE_SECONDS, Mark, find_carriers, process, signal
from anyaccel.model import Value
from anyaccel.text import duration, shown, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.ledger import Lease

STATUS = 124
"""Exit status after a time limit; that of timeout(1)."""
_PRINT_SECONDS = 1
_NEVER_CAUGHT = (signal.SIGKILL, signal.SIGSTOP)


class EarlySignal(Value):
    """A signal before a time limit, for programs to save a checkpoint.

    Attributes:
        number: The signal.
        seconds: Seconds between the signal and the limit.
    """

    number: int
    seconds: float

    @classmethod
    def parse(cls, text: object) -> EarlySignal:
        """Parse ``NAME@DURATION``, such as ``USR1@60s``; the name, in any case, may begin with SIG, or be a number.

        Raises:
            ValueError: If the value is no such text, or no program can catch the signal.
        """
        from signal import Signals

        name, _, before = text.partition("@") if isinstance(text, str) else ("", "", "")
        try:
            number = Signals(int(name)) if name.isdecimal() else Signals["SIG" + name.upper().removeprefix("SIG")]
            seconds = duration(before)
        except KeyError:
            raise ValueError(f"must begin with a signal's name, such as USR1 in USR1@60s (got {shown(text)})") from None
        except ValueError:
            raise ValueError(
                f"must be a signal and how long before the time limit it is sent, such as USR1@60s (got {shown(text)})"
            ) from None
        if number in _NEVER_CAUGHT:
            raise ValueError(f"must be a signal that a program can catch, such as USR1@60s (got {shown(text)})")
        return cls(number=number, seconds=seconds)

    @property
    def name(self) -> str:
        """Name of the signal, such as ``SIGUSR1``."""
        from signal import Signals

        return Signals(self.number).name

    def send(self, mark: Mark) -> int:
        """Send the signal, once, to each other process of this user with a mark and a handler for the signal.

        A shell or a data loader without a handler gets no signal: the default action would end the process. Errors are
        ignored.

        Returns:
            The number of processes that got the signal.
        """
        sent: list[int] = []

        def tell(pid: int, start: int) -> None:
            if process.user(pid) != os.getuid() or not process.catches(pid, self.number):
                return
            if process.send(pid, start, self.number):
                sent.append(pid)

        with contextlib.suppress(OSError):  # no descriptor is free for the search: the limit still ends the processes
            find_carriers([mark])(tell)
        return len(sent)

    def __str__(self) -> str:
        return f"{self.name.removeprefix('SIG')}@{span(self.seconds)}"


class TimeLimit(Value):
    """The time limit of a command.

    Attributes:
        seconds: The limit.
        until: The end, in seconds since the boot.
        grace: Seconds between SIGTERM and SIGKILL.
        early: The signal before the end; None for none.
    """

    seconds: float
    until: float
    grace: float = GRACE_SECONDS
    early: EarlySignal | None = None

    @classmethod
    def begin(cls, seconds: float, grace: float = GRACE_SECONDS, early: EarlySignal | None = None) -> TimeLimit:
        """Make the limit of a command from now on."""
        return cls(seconds=seconds, until=process.boot_seconds() + seconds, grace=grace, early=early)

    @classmethod
    def for_lease(
        cls, lease: Lease | None, seconds: float | None, grace: float, early: EarlySignal | None = None
    ) -> TimeLimit | None:
        """Make the limit of a command with a lease; None without a lease, or if the lease has no end.

        Args:
            lease: The lease; None if nothing is leased.
            seconds: The limit of the request; None if the machine's configuration gave the lease its end: then the
                limit is the rest of the time, in whole seconds. The end is that of the lease in both cases.
            grace: Seconds between SIGTERM and SIGKILL.
            early: The signal before the end; None for none.
        """
        if lease is None or lease.until is None:
            return None
        # The lease knows its end only: the configuration's limit is what is left, in whole seconds.
        whole = round(lease.until - process.boot_seconds()) if seconds is None else seconds
        return cls(seconds=whole, until=lease.until, grace=grace, early=early)

    @property
    def over(self) -> bool:
        """Whether the end has come, by the clock since the boot, which goes on while the machine sleeps."""
        return process.boot_seconds() >= self.until

    def send_early(self, mark: Mark) -> str:
        """Send the early signal to the carriers of a mark that handle it, and return a message about the number.

        If the limit has no early signal, nothing is sent, and the message is empty. See :meth:`EarlySignal.send`.
        """
        if self.early is None:
            return ""
        count = self.early.send(mark)
        to = f"{count} process{'es' * (count != 1)}" if count else "no process, since none catches it"
        before = f"{span(self.early.seconds)} before the time limit of {span(self.seconds)}"
        return f"{before}: {self.early.name} sent to {to}"


class Countdown:
    """Counts down to a time limit, and sends the early signal.

    Args:
        limit: The limit; None for none.
        mark: The mark whose carriers get the early signal.
        tell: Called with the message about the early signal.

    Attributes:
        early_at: Time of the early signal, in seconds since the boot; None for never, or after the signal.
    """

    def __init__(self, limit: TimeLimit | None, mark: Mark, tell: Callable[[str], object]) -> None:
        self.early_at = limit.until - limit.early.seconds if limit and limit.early else None
        self._limit = limit
        self._mark = mark
        self._tell = tell

    def step(self) -> float:
        """Send a due early signal, once, and pass the message on.

        Returns:
            Seconds until the early signal, or the limit if no signal is left; 0 once the limit is reached, infinite
            without a limit.
        """
        if self._limit is None:
            return math.inf
        if self.early_at is not None and process.boot_seconds() >= self.early_at:
            self.early_at = None
            self._tell(self._limit.send_early(self._mark))
        moment = self._limit.until if self.early_at is None else self.early_at
        return max(0.0, moment - process.boot_seconds())


def describe_timeout(seconds: float) -> str:
    """Return the message for a command ended by a time limit of so many seconds, without a prefix."""
    return f"time limit of {span(seconds)} reached: ended"


def check_early(text: str | None, seconds: float | None) -> EarlySignal | None:
    """Parse the signal before a time limit, and check its time against the limit.

    Args:
        text: The signal and the time, for :meth:`EarlySignal.parse`; None for none.
        seconds: The time limit; None for none.

    Returns:
        The signal; None without a text.

    Raises:
        UsageError: If the text is invalid, if there is no limit, or if its time is not less than the limit.
    """
    if text is None:
        return None
    try:
        early = EarlySignal.parse(text)
    except ValueError as error:
        raise UsageError(f"signal {error}") from error
    if seconds is None:
        raise UsageError(
            f"signal {early} is sent before a time limit, and there is none",
            hint="give a time limit as well: --time, in Python time=",
        )
    if early.seconds >= seconds:
        raise UsageError(
            f"signal {early} needs a time limit over {span(early.seconds)} (got {span(seconds)})",
            hint="give a longer limit, or a shorter time after the @",
        )
    return early


def print_line(text: str, descriptor: int = 2) -> None:
    """Write a line with the prefix ``anyaccel:`` to a descriptor, by default standard error; errors are ignored.

    A descriptor that takes nothing for a second, such as a stopped terminal, gets no line.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        if poll.poll(_PRINT_SECONDS * 1000):
            os.write(descriptor, f"anyaccel: {text}\n".encode(errors="replace"))
