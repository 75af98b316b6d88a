"""Find the accelerators of a machine, hand them out, and start workers that see exactly theirs.

Nothing is imported before it is needed: ``import anyaccel`` costs next to nothing. What type checkers see stands in
``__init__.pyi``; a test keeps the two alike.
"""

import sys

from anyaccel._version import __version__

_HOMES = {
    "anyaccel.cli._notebook": ("load_ipython_extension",),
    "anyaccel.errors": (
        "AlreadyLoadedError",
        "AnyaccelError",
        "BrokenWorkerError",
        "CommandNotFoundError",
        "CommandNotRunnableError",
        "EnvConflictError",
        "MachineError",
        "NeverFitsError",
        "NotFreeError",
        "PlacementError",
        "PluginError",
        "RemoteError",
        "RequestError",
        "TaskTimeoutError",
        "UnknownNameError",
        "UsageError",
        "WorkerError",
        "WorkerStartError",
    ),
    "anyaccel.inventory.current": ("current",),
    "anyaccel.inventory.declared": ("declare",),
    "anyaccel.inventory.detect": ("detect",),
    "anyaccel.inventory.labels": ("label",),
    "anyaccel.inventory.observe": ("stats",),
    "anyaccel.inventory.watch": ("Change", "watch"),
    "anyaccel.launcher.command": ("run",),
    "anyaccel.launcher.environment": ("WorkerEnvironment", "worker_environment"),
    "anyaccel.launcher.hold": ("Hold", "acquire", "acquire_async", "leases", "why"),
    "anyaccel.launcher.launch": ("Launch", "open_scheduler", "prepare"),
    "anyaccel.launcher.use": ("Use", "use"),
    "anyaccel.model": (
        "Allocation",
        "Device",
        "Fractional",
        "Gang",
        "Grant",
        "Health",
        "Inventory",
        "Problem",
        "Request",
        "Share",
        "Stats",
        "Term",
        "VendorReport",
        "VendorState",
    ),
    "anyaccel.model.document": ("from_json", "to_json"),
    "anyaccel.scheduler": ("Demand", "Fleet", "Reason", "Scheduler", "Ticket", "Verdict", "parse_request"),
    "anyaccel.pool.actor": ("Actor",),
    "anyaccel.pool.actors": ("Actors",),
    "anyaccel.pool.call": ("BrokenPoolError",),
    "anyaccel.pool.pool": ("Pool",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 - __init__.pyi spells it out for type checkers


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _HOME_OF[name]
    __import__(module)  # importlib would have to be imported first
    value: object = getattr(sys.modules[module], name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
