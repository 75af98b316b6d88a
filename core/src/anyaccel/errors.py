"""The errors that anyaccel raises on purpose.

    AnyaccelError
    ├── UsageError                the request or an argument is wrong                          exit 2
    │   ├── UnknownOptionError    a function has no option of this name
    │   ├── RequestError          a request does not follow the grammar
    │   ├── UnknownNameError      a request uses a name that no plug-in knows
    │   ├── MachineError          --machine names no machine, or a recording is damaged
    │   └── ConfigurationError    a configuration file is wrong, or writable by another user
    ├── PlacementError
    │   ├── NeverFitsError        the request can never be served on this machine              exit 3
    │   └── NotFreeError          the request cannot be served now                             exit 4
    │       └── DeadlockError     it would wait for devices of this process                    exit 4
    ├── AlreadyLoadedError        a vendor's runtime is loaded in this process already         exit 1
    ├── EnvConflictError          the environment of a worker cannot be made                   exit 1
    ├── EnforcementError          a worker cannot be confined to its devices                   exit 1
    ├── CommandNotFoundError      the command to run does not exist                            exit 127
    ├── CommandNotRunnableError   the command to run cannot be executed                        exit 126
    ├── WorkerError               a task did not complete                                      exit 1
    │   ├── BrokenWorkerError     its worker ended before its answer; carries the exit status
    │   ├── WorkerStartError      no worker can be started
    │   ├── RemoteError           it raised an exception that cannot be pickled; carries its text
    │   └── TaskTimeoutError      it exceeded its time limit
    ├── JobNotFoundError          no job has this number                                       exit 2
    ├── JobStateError             the directory of jobs is unsafe                              exit 6
    ├── PluginError               a plug-in is at fault; carries its Problem                   exit 1
    └── LedgerError               the leases of this machine cannot be kept or counted         exit 1
        ├── DevicesBusyError      the devices were not free, or not in time                    exit 4
        ├── LimitError            the request exceeds the user's limits                        exit 3
        ├── LeaseCancelledError   the wait for devices was cancelled                           exit 1
        ├── LeaseNotFoundError    no lease has this name                                       exit 2
        ├── LeasePermissionError  the lease belongs to another user                            exit 6
        ├── StateDirectoryError   the state directory is unsafe                                exit 6
        └── LedgerBusyError       another process keeps the state directory locked             exit 75

    CommandTimeoutError, QueryError   raised inside detection by ProbeContext, for plug-ins to catch

Each class has an exit code. The message names the subject, the rule, the value and the way out, and is fit for users.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from anyaccel.model import Problem, Verdict


class AnyaccelError(Exception):
    """Base of the errors below, for ``except anyaccel.AnyaccelError``.

    Attributes:
        code: Name of the error in JSON output.
        exit_code: Exit status of the command line.
        hint: The way out, when not part of the message; a traceback shows the hint as a note.
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
    """Raised when a process asks for devices after it has loaded a vendor's runtime."""

    code = "already-loaded"


class UnknownOptionError(UsageError, TypeError):
    """Raised when a function is called with an unknown option."""

    code = "unknown-option"


class RequestError(UsageError):
    """Raised when a request does not follow the grammar."""

    code = "request"


class UnknownNameError(UsageError):
    """Raised when a request uses a name that no installed plug-in knows."""

    code = "unknown-name"


class MachineError(UsageError):
    """Raised when a machine cannot be found or understood."""

    code = "machine"


class ConfigurationError(UsageError):
    """Raised when a configuration file is unreadable, wrong, or writable by another user.

    Attributes:
        further: Further faults of the same file.
    """

    code = "configuration"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.further: tuple[ConfigurationError, ...] = ()


class PlacementError(AnyaccelError):
    """Base of the errors for a request that was not served; carries the verdict."""

    def __init__(self, message: str, *, verdict: Verdict, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.verdict = verdict

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__  # __init__ would ask for the verdict


class NeverFitsError(PlacementError):
    """Raised when a request can never be served on this machine."""

    code = "never-fits"
    exit_code = 3


class NotFreeError(PlacementError):
    """Raised when a request fits the machine, and the devices are in use."""

    code = "not-free"
    exit_code = 4


class DeadlockError(NotFreeError):
    """Raised when a request would wait for devices that only this process could release."""

    code = "deadlock"


class EnvConflictError(AnyaccelError):
    """Raised when two vendors set a variable differently, or a mask cannot be written."""

    code = "environment"


class EnforcementError(AnyaccelError):
    """Raised when a worker cannot be confined to its devices."""

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
    """Base of the errors for a task that did not complete."""

    code = "worker"


class BrokenWorkerError(WorkerError):
    """Raised when a worker ended before its answer.

    Attributes:
        exit_status: Exit status of the worker, the negative number of the signal that killed it, or None when unknown.
    """

    code = "broken-worker"

    def __init__(self, message: str, *, exit_status: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


class WorkerStartError(WorkerError):
    """Raised when no worker can be started."""

    code = "worker-start"


class RemoteError(WorkerError):
    """Raised when a task's exception cannot be pickled; has its text, and the reason as hint."""

    code = "remote"


class TaskTimeoutError(WorkerError, TimeoutError):
    """Raised when a task exceeds its time limit."""

    code = "timeout"


class JobNotFoundError(AnyaccelError):
    """Raised when no job has the given number."""

    code = "job-not-found"
    exit_code = 2


class JobStateError(AnyaccelError):
    """Raised when the directory of jobs cannot be made, or is writable by other users."""

    code = "job-state"
    exit_code = 6


class PluginError(AnyaccelError):
    """Raised when a plug-in is at fault; carries the :class:`~anyaccel.model.Problem`."""

    code = "plugin"

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class LedgerError(AnyaccelError):
    """Raised when the leases of the machine cannot be kept or counted."""

    code = "ledger"


class DevicesBusyError(LedgerError):
    """Raised when devices were in use, or did not become free in time.

    Attributes:
        holders: Ids of the active leases of suitable devices.
        ahead: Number of earlier requests that block this one.
    """

    code = "devices-busy"
    exit_code = 4

    def __init__(self, message: str, *, holders: tuple[str, ...] = (), ahead: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holders = holders
        self.ahead = ahead


class LimitError(LedgerError):
    """Raised when a request exceeds the user's limits in the machine's configuration.

    Attributes:
        reasons: A clause for each exceeded limit.
    """

    code = "limit"
    exit_code = 3

    def __init__(self, message: str, *, reasons: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = reasons


class LeaseCancelledError(LedgerError):
    """Raised when the wait for devices was cancelled."""

    code = "lease-cancelled"


class LeaseNotFoundError(LedgerError):
    """Raised when no lease has the given name."""

    code = "lease-not-found"
    exit_code = 2


class LeasePermissionError(LedgerError):
    """Raised when a lease belongs to another user."""

    code = "lease-permission"
    exit_code = 6


class StateDirectoryError(LedgerError):
    """Raised when the state directory is unsafe: writable by other users, or without locks."""

    code = "state-directory"
    exit_code = 6


class LedgerBusyError(LedgerError):
    """Raised when another process keeps the state directory locked for long, usually because it is stopped."""

    code = "ledger-busy"
    exit_code = 75


class CommandTimeoutError(Exception):
    """Raised by ``ProbeContext.run`` when a command exceeds its deadline."""


class QueryError(Exception):
    """Raised by ``ProbeContext.query`` when a query raises, now or when it was recorded.

    Attributes:
        kind: Name of the exception's class.
        value: The exception's ``value`` attribute if it is a number, such as a library's error code.
    """

    def __init__(self, kind: str, message: str, value: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.value = value
