"""Print the plug-in's answers about a machine below a root directory, with real libraries.

Usage: probe.py ROOT [fork]
"""

import json
import os
import sys
import time

from anyaccel.model.value import encode
from anyaccel.probe.context import ProbeContext, ask
from anyaccel.probe.host import HostFacts
from anyaccel.probe.recording import Recorder
from anyaccel_nvidia import plugin


class Overlay(HostFacts):
    """Files of another root, libraries of this process."""

    def query(self, name, fn):
        return ask(fn)


def probe(root: str) -> dict[str, object]:
    environ = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR",) if name in os.environ}
    recorder = Recorder(Overlay(environ, root))
    ctx = ProbeContext(recorder, time.monotonic() + 30)
    answer: dict[str, object] = {}
    try:
        detected = plugin.anyaccel_detect(ctx)
    except (RuntimeError, ValueError) as error:
        answer["error"] = str(error)
    else:
        answer["detected"] = encode(detected)
        if detected is not None:
            answer["stats"] = encode(plugin.anyaccel_stats(detected.devices, ctx))
    answer["pynvml"] = "pynvml" in sys.modules
    answer["findings"] = encode(plugin.anyaccel_diagnose(ctx))
    answer["recording"] = recorder.recording()
    return answer


def ask_in_two_processes() -> dict[str, object]:
    from anyaccel_nvidia import nvml

    nvml.system()
    nvml.device(0)
    child = os.fork()
    if not child:
        nvml.system()
        os._exit(0)
    os.waitpid(child, 0)
    return {"pids": [os.getpid(), child]}


print(json.dumps(ask_in_two_processes() if "fork" in sys.argv else probe(sys.argv[1])))
