"""Tools to test plug-ins and schedulers without hardware. No other part of anyaccel imports this package.

Its modules are imported on first use: pytest loads this package in every run, also in runs that have nothing to do with
accelerators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel_testing.check import Check, CheckFailed, NotApplicable, Result, State
    from anyaccel_testing.machines import context, describe, load_recording
    from anyaccel_testing.plugin_tests import AcceleratorPluginTests
    from anyaccel_testing.suite import run_checks
    from anyaccel_testing.table import CHECKS
    from anyaccel_testing.testbed import TestbedError, enter_testbed, run_in_testbed

__all__ = [
    "CHECKS",
    "AcceleratorPluginTests",
    "Check",
    "CheckFailed",
    "NotApplicable",
    "Result",
    "State",
    "TestbedError",
    "context",
    "describe",
    "enter_testbed",
    "load_recording",
    "run_checks",
    "run_in_testbed",
]

_HOMES = {
    "check": ("Check", "CheckFailed", "NotApplicable", "Result", "State"),
    "machines": ("context", "describe", "load_recording"),
    "plugin_tests": ("AcceleratorPluginTests",),
    "suite": ("run_checks",),
    "table": ("CHECKS",),
    "testbed": ("TestbedError", "enter_testbed", "run_in_testbed"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value  # Python calls __getattr__ only for names that the module lacks, so once for each
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
