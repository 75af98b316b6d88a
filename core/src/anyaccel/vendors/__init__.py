"""Plug-ins: find the installed plug-ins, rule out absent vendors, and run hooks in one process per vendor."""

from __future__ import annotations

import sys

from anyaccel._faces import face
from anyaccel.forkserver import client
from anyaccel.probe import HOST, MACHINE_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anyaccel.vendors.contract import HOOKS as HOOKS
    from anyaccel.vendors.contract import RECORDED as RECORDED
    from anyaccel.vendors.contract import RESOURCE as RESOURCE
    from anyaccel.vendors.contract import VENDOR as VENDOR
    from anyaccel.vendors.discovery import ALLOW_VARIABLE as ALLOW_VARIABLE
    from anyaccel.vendors.discovery import DENY_VARIABLE as DENY_VARIABLE
    from anyaccel.vendors.discovery import GROUP as GROUP
    from anyaccel.vendors.discovery import Source as Source
    from anyaccel.vendors.discovery import installed as installed
    from anyaccel.vendors.discovery import make_problem as make_problem
    from anyaccel.vendors.guarded import ANSWER_LIMIT as ANSWER_LIMIT
    from anyaccel.vendors.guarded import PRINTED_LIMIT as PRINTED_LIMIT
    from anyaccel.vendors.guarded import GuardedProcess as GuardedProcess
    from anyaccel.vendors.guarded import Outcome as Outcome
    from anyaccel.vendors.guarded import call_all as call_all
    from anyaccel.vendors.presence import Presence as Presence
    from anyaccel.vendors.presence import read_presences as read_presences
    from anyaccel.vendors.presence import select_makers as select_makers
    from anyaccel.vendors.presence import select_present as select_present
    from anyaccel.vendors.process import Answers as Answers
    from anyaccel.vendors.process import KnownNames as KnownNames
    from anyaccel.vendors.process import VendorProcess as VendorProcess
    from anyaccel.vendors.process import ask as ask
    from anyaccel.vendors.process import ask_hook as ask_hook
    from anyaccel.vendors.process import check_answer as check_answer
    from anyaccel.vendors.process import find_process as find_process
    from anyaccel.vendors.process import hand_over as hand_over
    from anyaccel.vendors.process import known as known
    from anyaccel.vendors.process import problem_in as problem_in
    from anyaccel.vendors.process import qualified as qualified
    from anyaccel.vendors.process import read_answer as read_answer
    from anyaccel.vendors.process import validate as validate
    from anyaccel.vendors.process import vendor_process as vendor_process
    from anyaccel.vendors.tasks import VendorPlugin as VendorPlugin
else:
    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "anyaccel.vendors.contract": "HOOKS RECORDED RESOURCE VENDOR",
            "anyaccel.vendors.discovery": "ALLOW_VARIABLE DENY_VARIABLE GROUP Source installed make_problem",
            "anyaccel.vendors.guarded": "ANSWER_LIMIT PRINTED_LIMIT GuardedProcess Outcome call_all",
            "anyaccel.vendors.presence": "Presence read_presences select_makers select_present",
            "anyaccel.vendors.process": (
                "Answers KnownNames VendorProcess ask ask_hook check_answer find_process hand_over known problem_in "
                "qualified read_answer validate vendor_process"
            ),
            "anyaccel.vendors.tasks": "VendorPlugin",
        },
    )
    __all__ += ["DEADLINE_SECONDS", "PRELOAD", "TASKS", "begin", "begin_for", "close", "find_server"]
    __all__ += ["do_meanwhile", "presence", "simulate", "tasks"]

IDLE_SECONDS = 60.0
"""A vendor's process ends after a minute without a call, and the fork server after a minute without a process."""
STUCK_SECONDS = 0.5
"""How long to wait for a killed process: a process that is stuck in the kernel ignores even SIGKILL."""
DEADLINE_SECONDS = 10.0
"""Time for a hook that touches the machine."""
TASKS = "anyaccel.vendors.tasks"
"""Name of the module that runs in a vendor's process. No other process should import it."""
PRELOAD = (TASKS, "anyaccel.kit", "anyaccel.vendors.guarded")
"""Modules that are imported once for processes of all vendors: tasks, the kit of most plug-ins, the loop of calls."""


def find_server(*preload: str) -> client.ForkServer:
    """Return the fork server with some preloaded modules; start the server if none runs.

    Raises:
        OSError: When the server cannot be started.
    """
    config = {"own": preload, "stuck": STUCK_SECONDS, "idle": IDLE_SECONDS}
    return client.find_server(preload, lambda: client.ForkServer(config, apart=True))


def begin() -> None:
    """Start the fork server of vendors' processes in the background, before a caller needs it."""
    try:
        find_server(*PRELOAD)
    except OSError:  # the caller gets the reason with its first call
        return


def begin_for(machine: str | None, environ: Mapping[str, str]) -> None:
    """Call :func:`begin` if another machine than this host is named: its vendors are asked in any case."""
    if (machine or environ.get(MACHINE_VARIABLE) or HOST) != HOST:
        begin()


def close(*, wait: bool = True) -> None:
    """End the processes of all vendors and their fork server, if there are any. The next call starts them again.

    Args:
        wait: Whether to wait until they have ended; without, a later call waits.
    """
    if process := sys.modules.get("anyaccel.vendors.process"):  # not imported: no vendor was called
        process.forget()
    client.close_all(client.ForkServer, client.END_SECONDS if wait else 0.0)


_works: list[Callable[[], object]] = []


def do_meanwhile(work: Callable[[], object]) -> None:
    """Register a function that is called while the first vendors answer, such as an import that the caller needs next.

    The call is made once the vendors are asked, so not at all where no vendor is asked. The modules for leases and
    launching take as long to import as a vendor takes to answer. An exception ends the detection.
    """
    _works.append(work)


def work_meanwhile() -> None:
    """Call the registered functions, each once; to be called while calls are on their way, by any thread."""
    while _works:
        try:
            work = _works.pop(0)
        except IndexError:  # another thread has taken it
            return
        work()
