"""Every error that anyaccel raises on purpose.

    AnyaccelError
    ├── UsageError                the request or an argument is wrong                          exit 2
    │   ├── UnknownOptionError    a function has no option of this name
    │   ├── RequestError          a request does not follow the grammar
    │   ├── UnknownNameError      a request names nothing that any plug-in knows
    │   ├── MachineError          --machine names no machine, or a recording is damaged
    │   └── ConfigurationError    a configuration file says something wrong, or may not be trusted
    ├── PlacementError
    │   ├── NeverFitsError        the request can never be served on this machine              exit 3
    │   └── NotFreeError          the request cannot be served now                             exit 4
    │       └── DeadlockError     it would wait for devices that this process itself holds     exit 4
    ├── AlreadyLoadedError        a vendor's runtime is loaded in this process already         exit 1
    ├── EnvConflictError          the environment of a worker cannot be made                   exit 1
    ├── EnforcementError          a worker cannot be confined to its devices                   exit 1
    ├── CommandNotFoundError      the command to run does not exist                            exit 127
    ├── CommandNotRunnableError   the command to run cannot be executed                        exit 126
    ├── WorkerError               a task was not run to its end                                exit 1
    │   ├── BrokenWorkerError     its worker ended before it answered; carries the exit status
    │   ├── WorkerStartError      no worker can be started
    │   ├── RemoteError           it raised an exception that cannot travel; carries its text
    │   └── TaskTimeoutError      it took longer than it may
    ├── JobNotFoundError          no job goes by this number                                   exit 2
    ├── JobStateError             the directory of jobs must not be used                       exit 6
    ├── PluginError               a plug-in is at fault; carries its Problem                   exit 1
    └── LedgerError               the leases of this machine cannot be kept or counted         exit 1
        ├── DevicesBusyError      the devices were not free, or not in time                    exit 4
        ├── LimitError            the machine's configuration does not give this user so much     exit 3
        ├── LeaseCancelledError   the wait for devices was cancelled                           exit 1
        ├── LeaseNotFoundError    no lease goes by this name                                   exit 2
        ├── LeasePermissionError  the lease belongs to another user                            exit 6
        ├── StateDirectoryError   the state directory must not be used                         exit 6
        └── LedgerBusyError       another process keeps the state directory locked             exit 75

    CommandTimeoutError, QueryError   raised inside detection by ProbeContext, for plug-ins to catch

Each class knows its exit code. The text of an error names the subject, the rule, the value and the way out, and is
fit to be shown to a user as it stands.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from anyaccel.ledger.record import LeaseRecord
    from anyaccel.model import Problem
    from anyaccel.model.verdict import Verdict


class AnyaccelError(Exception):
    """Base of all errors below: ``except anyaccel.AnyaccelError`` catches what anyaccel raises on purpose.

    Attributes:
        code: Name of the error in JSON output.
        exit_code: What the command line returns.
        hint: The way out, when it is not part of the message; a traceback shows it as a note.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(hint)


class UsageError(AnyaccelError):
    """Raised when an argument is wrong."""

    code = "usage"
    exit_code = 2


class AlreadyLoadedError(AnyaccelError):
    """Raised when devices are wanted for a process in which a vendor's runtime has been loaded."""

    code = "already-loaded"


class UnknownOptionError(UsageError, TypeError):
    """Raised when a function is given an option that it does not have."""

    code = "unknown-option"


class RequestError(UsageError):
    """Raised when a request does not follow the grammar."""

    code = "request"


class UnknownNameError(UsageError):
    """Raised when a request names nothing that any installed plug-in knows."""

    code = "unknown-name"


class MachineError(UsageError):
    """Raised when a machine cannot be found or understood."""

    code = "machine"


class ConfigurationError(UsageError):
    """Raised when a configuration file cannot be read, says something wrong, or could be written by another user.

    Attributes:
        further: What else is wrong with the same file, line by line.
    """

    code = "configuration"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.further: tuple[ConfigurationError, ...] = ()


class PlacementError(AnyaccelError):
    """Base of the errors that say why a request was not served; carries the verdict."""

    def __init__(self, message: str, *, verdict: Verdict, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.verdict = verdict

    def __reduce__(self) -> tuple[object, ...]:
        return _unplaced, (type(self), *self.args), self.__dict__


def _unplaced(kind: type[PlacementError], *args: object) -> PlacementError:
    """Make an error that was pickled; what it carries follows."""
    return kind.__new__(kind, *args)


class NeverFitsError(PlacementError):
    """Raised when a request can never be served on this machine."""

    code = "never-fits"
    exit_code = 3


class NotFreeError(PlacementError):
    """Raised when a request fits the machine and the devices are taken now."""

    code = "not-free"
    exit_code = 4


class DeadlockError(NotFreeError):
    """Raised when a request would wait for devices that this process itself holds, and that only it could give back."""

    code = "deadlock"


class EnvConflictError(AnyaccelError):
    """Raised when two vendors set one variable differently, or a mask cannot be written."""

    code = "environment"


class EnforcementError(AnyaccelError):
    """Raised when a worker cannot be confined to its own devices."""

    code = "enforcement"


class CommandNotFoundError(AnyaccelError):
    """Raised when the command to run does not exist."""

    code = "command-not-found"
    exit_code = 127


class CommandNotRunnableError(AnyaccelError):
    """Raised when the command to run exists and cannot be executed."""

    code = "command-not-runnable"
    exit_code = 126


class WorkerError(AnyaccelError):
    """Base of the errors that say why a task was not run to its end."""

    code = "worker"


class BrokenWorkerError(WorkerError):
    """Raised when a worker ended before it answered.

    Attributes:
        exit_status: How it ended: its exit status, the negative number of the signal that killed it, or None when
            nobody could tell.
    """

    code = "broken-worker"

    def __init__(self, message: str, *, exit_status: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


class WorkerStartError(WorkerError):
    """Raised when no worker can be started."""

    code = "worker-start"


class RemoteError(WorkerError):
    """Raised when a task raised an exception that cannot travel from its worker; has that exception's text."""

    code = "remote"


class TaskTimeoutError(WorkerError, TimeoutError):
    """Raised when a task took longer than it may."""

    code = "timeout"


class JobNotFoundError(AnyaccelError):
    """Raised when no job goes by a number."""

    code = "job-not-found"
    exit_code = 2


class JobStateError(AnyaccelError):
    """Raised when the directory of jobs must not be used: it cannot be made, or others could change what is in it."""

    code = "job-state"
    exit_code = 6


class PluginError(AnyaccelError):
    """Raised when a plug-in is at fault; carries the :class:`~anyaccel.model.Problem`."""

    code = "plugin"

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class LedgerError(AnyaccelError):
    """Raised when the leases that the processes of this machine share cannot be kept or counted."""

    code = "ledger"


class DevicesBusyError(LedgerError):
    """Raised when devices were not free, or not in time.

    Attributes:
        holders: Who holds devices that would have served.
        ahead: How many earlier requests wait for the same devices.
    """

    code = "devices-busy"
    exit_code = 4

    def __init__(self, message: str, *, holders: tuple[LeaseRecord, ...] = (), ahead: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holders = holders
        self.ahead = ahead


class LimitError(LedgerError):
    """Raised when the machine's configuration does not give a user so much, whatever is free.

    Attributes:
        reasons: What is over which limit, a clause each.
    """

    code = "limit"
    exit_code = 3

    def __init__(self, message: str, *, reasons: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = reasons


class LeaseCancelledError(LedgerError):
    """Raised when somebody cancelled the wait for devices."""

    code = "lease-cancelled"


class LeaseNotFoundError(LedgerError):
    """Raised when no lease goes by a name."""

    code = "lease-not-found"
    exit_code = 2


class LeasePermissionError(LedgerError):
    """Raised when a lease belongs to another user."""

    code = "lease-permission"
    exit_code = 6


class StateDirectoryError(LedgerError):
    """Raised when the state directory must not be used: others could change what is in it, or it keeps no locks."""

    code = "state-directory"
    exit_code = 6


class LedgerBusyError(LedgerError):
    """Raised when another process keeps the state directory locked, which takes microseconds unless it is stopped."""

    code = "ledger-busy"
    exit_code = 75


class CommandTimeoutError(Exception):
    """Raised by ``ProbeContext.run`` when a command did not end before its deadline."""


class QueryError(Exception):
    """Raised by ``ProbeContext.query`` on a replayed machine where the recorded query had raised.

    Attributes:
        kind: Name of the exception's class as it was recorded.
        value: The exception's ``value`` attribute where it had a number there, such as a library's error code.
    """

    def __init__(self, kind: str, message: str, value: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.value = value
