"""Find the accelerators of a machine, hand them out, and start workers that see exactly theirs.

Nothing is imported before it is needed: ``import anyaccel`` costs next to nothing.
"""

from typing import TYPE_CHECKING

from anyaccel._version import __version__

if TYPE_CHECKING:
    from anyaccel.errors import (
        AnyaccelError,
        CommandNotFoundError,
        CommandNotRunnableError,
        EnvConflictError,
        MachineError,
        NeverFitsError,
        NotFreeError,
        PlacementError,
        PluginError,
        RequestError,
        UnknownNameError,
        UsageError,
    )
    from anyaccel.inventory.detect import detect
    from anyaccel.inventory.observe import stats
    from anyaccel.launcher.command import run
    from anyaccel.launcher.current import current
    from anyaccel.launcher.environment import WorkerEnvironment, worker_environment
    from anyaccel.launcher.launch import Launch, open_scheduler, prepare, survey
    from anyaccel.model import (
        Allocation,
        Device,
        Fractional,
        Grant,
        Health,
        Inventory,
        Problem,
        Request,
        Share,
        Stats,
        Term,
        VendorReport,
        VendorState,
    )
    from anyaccel.scheduler import Demand, Reason, Scheduler, Ticket, Verdict, declare, parse_request

_HOMES = {
    "anyaccel.errors": (
        "AnyaccelError",
        "CommandNotFoundError",
        "CommandNotRunnableError",
        "EnvConflictError",
        "MachineError",
        "NeverFitsError",
        "NotFreeError",
        "PlacementError",
        "PluginError",
        "RequestError",
        "UnknownNameError",
        "UsageError",
    ),
    "anyaccel.inventory.detect": ("detect",),
    "anyaccel.inventory.observe": ("stats",),
    "anyaccel.launcher.command": ("run",),
    "anyaccel.launcher.current": ("current",),
    "anyaccel.launcher.environment": ("WorkerEnvironment", "worker_environment"),
    "anyaccel.launcher.launch": ("Launch", "open_scheduler", "prepare", "survey"),
    "anyaccel.model": (
        "Allocation",
        "Device",
        "Fractional",
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
    "anyaccel.scheduler": ("Demand", "Reason", "Scheduler", "Ticket", "Verdict", "declare", "parse_request"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604, RUF022 - a test keeps it equal to what type checkers see above
    "__version__",
    *sorted(_HOME_OF),
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
