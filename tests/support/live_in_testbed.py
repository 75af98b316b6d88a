"""Detect live in the testbed of each recording: standard input is JSON, pairs of an entry point and a recording.

Standard output is a JSON object for each pair: the gaps of the testbed, and what detection finds, or why it fails.
Answers of libraries come from the recording, since a testbed has none; files, links, nodes and tools are the testbed's.
"""

import json
import os
import sys
import time
from importlib import import_module

from anyaccel.errors import AnyaccelError
from anyaccel.probe import ProbeContext, RecordedFacts
from anyaccel.probe.host import HostFacts
from anyaccel_testing import TestbedError, describe, enter_testbed, load_recording


class LiveFacts(HostFacts):
    """Facts of this machine, with the recorded answers of libraries."""

    def __init__(self, recording):
        super().__init__(recording.get("environ", {}) | {"PATH": os.environ["PATH"]})
        self._recorded = RecordedFacts(recording)

    def query(self, name, fn):
        return self._recorded.query(name, fn)


def detect(target, directory):
    """Enter the testbed of a recording, and detect there."""
    recording = load_recording(directory)
    gaps = enter_testbed(recording)
    module, _, name = target.partition(":")
    plugin = import_module(module)
    plugin = getattr(plugin, name) if name else plugin
    try:
        found = describe(plugin, ProbeContext(LiveFacts(recording), time.monotonic() + 10))
    except (AnyaccelError, OSError, ValueError) as error:
        return {"gaps": gaps, "failed": f"{type(error).__name__}: {error}"}
    return {"gaps": gaps, "found": found}


def main():
    for target, directory in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()  # a testbed cannot be left
        if child == 0:
            try:
                print(json.dumps(detect(target, directory)), flush=True)
            except TestbedError as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(77)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
