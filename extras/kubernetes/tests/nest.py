"""Forks agents on demand: for each line of standard input, the arguments of one, its process id is printed."""

import json
import os
import signal
import sys

import anyaccel.cli
import anyaccel_kubernetes.deviceplugin
import anyaccel_kubernetes.dra  # noqa: F401 - imported before the fork: an agent starts in a tenth of the time

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(2, 1)
        os._exit(anyaccel.cli.main(json.loads(line)))
    print(child, flush=True)
