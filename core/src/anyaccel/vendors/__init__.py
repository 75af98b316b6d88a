"""Plug-ins: which are installed, which may have hardware here, and one process per vendor that runs its hooks."""

from __future__ import annotations

import sys

from anyaccel._faces import face
from anyaccel.forkserver import client
from anyaccel.probe import HOST, MACHINE_VARIABLE
from anyaccel.vendors.server import find_server as find_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyaccel.vendors.contract import HOOKS as HOOKS
    from anyaccel.vendors.contract import RECORDED as RECORDED
    from anyaccel.vendors.contract import RESOURCE as RESOURCE
    from anyaccel.vendors.contract import VENDOR as VENDOR
    from anyaccel.vendors.discovery import GROUP as GROUP
    from anyaccel.vendors.discovery import Source as Source
    from anyaccel.vendors.discovery import installed as installed
    from anyaccel.vendors.guarded import ANSWER_LIMIT as ANSWER_LIMIT
    from anyaccel.vendors.guarded import GuardedProcess as GuardedProcess
    from anyaccel.vendors.guarded import Outcome as Outcome
    from anyaccel.vendors.guarded import call_all as call_all
    from anyaccel.vendors.plugin import VendorPlugin as VendorPlugin
    from anyaccel.vendors.process import ask as ask
    from anyaccel.vendors.process import known as known
    from anyaccel.vendors.process import vendor_process as vendor_process
    from anyaccel.vendors.protocol import PRINTED_LIMIT as PRINTED_LIMIT
else:
    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "anyaccel.vendors.contract": ("HOOKS", "RECORDED", "RESOURCE", "VENDOR"),
            "anyaccel.vendors.discovery": ("GROUP", "Source", "installed"),
            "anyaccel.vendors.guarded": ("ANSWER_LIMIT", "GuardedProcess", "Outcome", "call_all"),
            "anyaccel.vendors.plugin": ("VendorPlugin",),
            "anyaccel.vendors.process": ("ask", "known", "vendor_process"),
            "anyaccel.vendors.protocol": ("PRINTED_LIMIT",),
        },
    )
    __all__ += ["DEADLINE_SECONDS", "PRELOAD", "TASKS", "begin", "begin_for", "close", "find_server"]
    __all__ += ["import_meanwhile", "presence", "simulate", "tasks"]

DEADLINE_SECONDS = 10.0
"""Time for a hook that touches the machine."""
TASKS = "anyaccel.vendors.tasks"
"""The module that runs in a vendor's process; named, since nobody else must import it."""
PRELOAD = (TASKS, "anyaccel.kit")
"""What is imported once for the processes of all vendors: that module, and what most plug-ins import."""


def begin() -> None:
    """Start what forks vendors' processes, which takes as long as what the caller may do before it asks them."""
    try:
        find_server(*PRELOAD)
    except OSError:  # a caller that asks a vendor hears why
        return


def begin_for(machine: str | None, environ: Mapping[str, str]) -> None:
    """Do so where another machine than this host is named, whose vendors are asked without a look at this one."""
    if (machine or environ.get(MACHINE_VARIABLE) or HOST) != HOST:
        begin()


def close() -> None:
    """End the processes of all vendors, where there are any. The next call starts them again."""
    if process := sys.modules.get("anyaccel.vendors.process"):
        process.close()
    client.close_all(client.ForkServer)


_wanted: list[str] = []


def import_meanwhile(module: str) -> None:
    """Have a module imported while the first vendors that are called answer: one that the caller needs after that.

    It is imported when the calls are sent, so not at all where no vendor is called. What a command needs of leases and
    launching takes as long to import as a vendor to answer.
    """
    _wanted.append(module)


def import_wanted() -> None:
    """Import what the function above was told."""
    for module in tuple(_wanted):
        __import__(module)
    _wanted.clear()
