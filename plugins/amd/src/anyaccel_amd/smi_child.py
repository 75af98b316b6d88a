"""Ask ``amdsmi`` a question and print the answer as JSON. A script, for a process that may crash.

Written against the interface of amdsmi 7.0.2. A value not supported by a chip is None. Standard output carries the
answer alone: the library prints to it, from Python and from C.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

MISSING = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
"""The largest integers mean no value, and so does the text N/A."""
MIB = 1 << 20
AGAIN = ("AmdSmiRetryException", "AmdSmiTimeoutException")


def names(smi: Any, handle: Any) -> dict[str, Any]:
    """Query the market name of a chip."""
    name = _field(smi.amdsmi_get_gpu_asic_info, "market_name", handle)
    return {"market_name": name if isinstance(name, str) and name not in ("", "N/A") else None}


def metrics(smi: Any, handle: Any) -> dict[str, Any]:
    """Query counters and sensors. Each is a call of its own, so an unsupported value costs no other."""
    used = _number(_field(smi.amdsmi_get_gpu_vram_usage, "vram_used", handle))
    bad_pages = _call(smi.amdsmi_get_gpu_bad_page_info, handle)
    sensors, now = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
    degrees = (_call(smi.amdsmi_get_temp_metric, handle, kind, now) for kind in (sensors.JUNCTION, sensors.EDGE))
    power = _call(smi.amdsmi_get_power_info, handle) or {}
    return {
        "partition": _number(_field(smi.amdsmi_get_gpu_kfd_info, "current_partition_id", handle)),
        "memory_used_bytes": used * MIB if used is not None else None,
        "busy_percent": _number(_field(smi.amdsmi_get_gpu_activity, "gfx_activity", handle)),
        "temperature_celsius": _number(*degrees),
        "power_watts": _number(*map(power.get, ("current_socket_power", "average_socket_power"))),
        "bad_pages": len(bad_pages) if isinstance(bad_pages, list) else None,
        "bad_page_threshold": _number(_call(smi.amdsmi_get_gpu_bad_page_threshold, handle)),
    }


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, once more if the library is busy; None if the call fails."""
    for _ in range(2):
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - a missing value must not cost the others
            if type(error).__name__ not in AGAIN and "STATUS_BUSY" not in str(error):
                break
    return None


def _field(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    found = _call(function, *arguments)
    return found.get(name) if isinstance(found, dict) else None


def _number(*values: Any) -> int | None:
    """Return the first number among the values."""
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v not in MISSING), None)


def ask(question: str) -> dict[str, Any]:
    """Import the library, ask, and shut it down; return exceptions as data.

    The wheel without ROCm raises KeyError on import, a wheel of another ROCm version AttributeError.
    """
    try:
        amdsmi: Any = importlib.import_module("amdsmi")
        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
        try:
            query = {"names": names, "metrics": metrics}[question]
            return {
                "value": [
                    {"bdf": str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower(), **query(amdsmi, handle)}
                    for handle in amdsmi.amdsmi_get_processor_handles()
                ]
            }
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception as error:  # noqa: BLE001 - described to the caller
        code = getattr(error, "err_code", None)
        return {"error": {"kind": type(error).__name__, "message": str(error), "value": code}}


if __name__ == "__main__":
    # From here on, prints of the library go to standard error.
    answer = os.dup(1)
    os.dup2(2, 1)
    reply = ask(sys.argv[1])
    with open(answer, "w") as file:
        json.dump(reply, file)
    # The library's destructors may hang or crash after the answer.
    os._exit(0)
