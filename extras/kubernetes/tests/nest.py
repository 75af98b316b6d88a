"""Forks agents on demand: for each line of standard input, the process id of an agent is printed.

A line has the arguments of the agent, and the step at which it kills itself: the number of a change or look in the file
system since a claim came; 0 for never.
"""

import json
import os
import signal
import sys

import anyaccel.cli
import anyaccel_kubernetes.deviceplugin
import anyaccel_kubernetes.dra  # noqa: F401 - imported before the fork: an agent starts in a tenth of the time
from anyaccel_kubernetes.claims import Claims

STEPS = {"open", "os.rename", "os.remove", "os.listdir", "os.utime", "os.chmod", "os.mkdir", "fcntl.flock"}


def die_at(step):
    """Have this process killed at a step of the next claim."""
    taken = 0

    def count(event, _):
        nonlocal taken
        if taken and event in STEPS:
            taken += 1
            if taken > step:
                os.kill(os.getpid(), signal.SIGKILL)

    def armed(function):
        def run(*arguments):
            nonlocal taken
            taken = 1
            try:
                return function(*arguments)
            finally:
                taken = 0

        return run

    Claims.prepare, Claims.unprepare = armed(Claims.prepare), armed(Claims.unprepare)
    sys.addaudithook(count)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(2, 1)
        arguments, step = json.loads(line)
        if step:
            die_at(step)
        os._exit(anyaccel.cli.main(arguments))
    print(child, flush=True)
