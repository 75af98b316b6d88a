"""Find the accelerators of a machine, share them, and start workers that see exactly their own.

``import anyaccel`` is fast, since each name imports its module at the first use. Type checkers read ``__init__.pyi``; a
test compares the two.
"""

from anyaccel._faces import face
from anyaccel._version import __version__

_HOMES = {
    "anyaccel.cli.commands": "load_ipython_extension",
    "anyaccel.durations": "Duration",
    "anyaccel.errors": (
        "AlreadyLoadedError AnyaccelError BrokenWorkerError CommandNotFoundError CommandNotRunnableError "
        "ConfigurationError DeadlockError DevicesBusyError EnforcementError EnvConflictError JobNotFoundError "
        "JobStateError LeaseCancelledError LeaseNotFoundError LeasePermissionError LedgerBusyError LedgerError "
        "LimitError MachineError NeverFitsError NotFreeError PlacementError PluginError RemoteError RequestError "
        "StateDirectoryError TaskTimeoutError UnknownNameError UnknownOptionError UsageError WorkerError "
        "WorkerStartError"
    ),
    "anyaccel.inventory.current": "current",
    "anyaccel.inventory.declared": "declare label",
    "anyaccel.inventory.detect": "detect",
    "anyaccel.inventory.observe": "stats",
    "anyaccel.inventory.watch": "Change watch",
    "anyaccel.launcher.behalf": "LeaseOnBehalf acquire_on_behalf find_on_behalf",
    "anyaccel.launcher.command": "run",
    "anyaccel.launcher.containers": "container",
    "anyaccel.launcher.environment": "WorkerEnvironment worker_environment",
    "anyaccel.launcher.hold": "DeviceLease acquire acquire_async",
    "anyaccel.launcher.launch": "Launch prepare",
    "anyaccel.launcher.schedulers": "open_scheduler",
    "anyaccel.launcher.use": "ProcessLease use",
    "anyaccel.launcher.verdicts": "LeaseWatch leases watch_leases why",
    "anyaccel.model": (
        "Allocation Device Fractional Gang Grant Health Inventory Problem Request Share Stats Term VendorReport "
        "VendorState"
    ),
    "anyaccel.model.document": "from_json to_json",
    "anyaccel.scheduler": "Demand Fleet Reason Scheduler Ticket Verdict parse_request",
    "anyaccel.scheduler.chosen": "choose_devices request_devices",
    "anyaccel.pool.actor": "Actor Actors Stream",
    "anyaccel.pool.call": "BrokenPoolError CallFuture GangFuture",
    "anyaccel.pool.pool": "Pool",
    "anyaccel.pool.results": "Results",
}
_names, __getattr__, __dir__ = face(__name__, _HOMES)
__all__ = ["__version__", *_names]  # noqa: PLE0604 - __init__.pyi spells it out for type checkers
