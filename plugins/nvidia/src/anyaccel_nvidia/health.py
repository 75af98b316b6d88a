"""What NVML's errors, health facts and XIDs mean, and the way out of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anyaccel.plugin import Health, QueryError

DEFAULT, EXCLUSIVE_THREAD, PROHIBITED, EXCLUSIVE_PROCESS = range(4)
COMPUTE_MODES = {
    EXCLUSIVE_THREAD: "exclusive_thread",
    PROHIBITED: "prohibited",
    EXCLUSIVE_PROCESS: "exclusive_process",
}

LIBRARY_NOT_FOUND = 12
DRIVER_NOT_LOADED = 9

_LOST = "it has fallen off the bus (XID 79): power-cycle or reboot the machine; when that repeats, reseat or replace it"
_CGROUP = (
    "in a container, 'systemctl daemon-reload' on the host takes the device rules away: restart the container"
    " (NVIDIA/nvidia-container-toolkit#48); elsewhere see 'dmesg | grep NVRM'"
)
_DEVICE_ERRORS = {
    4: "this user may not use it: give read and write access to its /dev/nvidia node, or get it from the scheduler",
    8: "its external power cables are not attached properly: attach them",
    10: "it did not answer the driver in time: reset it with 'nvidia-smi --gpu-reset', or reboot",
    11: "the kernel could not set up its interrupts: see 'dmesg | grep NVRM', then reboot",
    14: "its infoROM is corrupted: have it serviced",
    15: _LOST,
    16: "it needs a reset: stop its processes, then 'nvidia-smi --gpu-reset', or reboot",
    999: f"the driver reports an unknown error; {_CGROUP}",
}
_DRIVER_ERRORS = {
    4: "this user may not use the driver: give read and write access to /dev/nvidiactl, or start the container with it",
    13: (
        "the library libnvidia-ml.so.1 lacks the functions that every driver has since 2018: a stub library was"
        " loaded; take its directory out of LD_LIBRARY_PATH, or update the driver"
    ),
    18: (
        "the NVIDIA library and the loaded kernel module have different versions: after a driver update reload the"
        " module ('modprobe -r nvidia_uvm nvidia && modprobe nvidia') or reboot"
    ),
    999: f"NVML could not start (Unknown Error); {_CGROUP}",
}

_RECOVERY = {
    1: "it needs a reset: stop its processes, then 'nvidia-smi --gpu-reset'",
    2: "it needs a reboot of the machine",
    4: "it needs a reset: let its processes end, then 'nvidia-smi --gpu-reset'",
    6: "it needs a reset of its bus: reboot the machine",
    7: "it needs a reboot of the machine",
}
"""By ``NVML_FI_DEV_GET_GPU_RECOVERY_ACTION``. Draining peer-to-peer traffic (3) and recovering an IMEX domain (5)
leave the GPU itself usable."""


def device_reason(error: QueryError) -> str:
    """Say why a GPU cannot be used, from the error that NVML gave when asked about it."""
    return _DEVICE_ERRORS.get(error.value or 0, f"NVML answers {error} about it: see 'dmesg | grep NVRM'")


def driver_reason(error: QueryError) -> str:
    """Say why NVML as a whole does not answer."""
    known = _DRIVER_ERRORS.get(error.value or 0)
    return known or f"NVML does not answer ({error.kind}: {error}); try 'nvidia-smi' and 'dmesg | grep NVRM'"


def judge(facts: Mapping[str, Any]) -> tuple[Health, str]:
    """Say whether a GPU that answers can be used, and why not."""
    rows = facts.get("remapped_rows")
    if facts.get("compute_mode") == PROHIBITED:
        return Health.UNHEALTHY, "its compute mode is PROHIBITED: 'nvidia-smi -c DEFAULT' as root allows work again"
    if rows and rows[3]:
        return Health.UNHEALTHY, "it has no spare memory rows left (row remapping failed): have it replaced"
    action = _RECOVERY.get(facts.get("recovery_action") or 0)
    return (Health.UNHEALTHY, action) if action else (Health.HEALTHY, "")


def remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    """What should be done about a GPU that is usable all the same, one sentence each."""
    label = f"GPU {facts['index']} ({facts.get('uuid') or facts['name']})"
    rows = facts.get("remapped_rows")
    mig = facts.get("mig")
    if (rows and rows[2] and not rows[3]) or facts.get("retired_pages_pending"):
        yield f"{label} has replaced bad memory, which takes effect at its next reset: 'nvidia-smi --gpu-reset'."
    if mig and mig[0] != mig[1]:
        yield f"{label} changes its MIG mode at its next reset: 'nvidia-smi --gpu-reset'."
    if mig and mig[0] and not facts["mig_devices"]:
        yield (
            f"{label} has MIG on and no MIG device, so it offers nothing: create some with 'nvidia-smi mig -cgi PROFILE"
            " -C', or turn MIG off with 'nvidia-smi -mig 0'."
        )


_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\S*\): (\d+)")


def _numbers(*spans: int | tuple[int, int]) -> Iterator[int]:
    for span in spans:
        yield from (span,) if isinstance(span, int) else range(span[0], span[1] + 1)


_RESTART = "restart the application"
_RESET = "reset the GPU: 'nvidia-smi --gpu-reset'"
XID_ACTIONS: Mapping[int, str] = {
    **dict.fromkeys(_numbers(8, 11, 13, 25, 31, 32, (39, 41), 60, (68, 72), (75, 77), 80, (82, 86), 88, 89), _RESTART),
    **dict.fromkeys(_numbers(94, (96, 105), (126, 135), 139), _RESTART),
    **dict.fromkeys(_numbers(46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158), _RESET),
    48: "an uncorrectable memory error: reset the GPU, and have it replaced when it repeats",
    74: "an NVLink error: reset the GPU, and check its NVLink bridge or switch when it repeats",
    79: "the GPU has fallen off the bus: power-cycle or reboot the machine",
    **dict.fromkeys(_numbers((144, 150)), "an NVLink error: reset the GPU, and check the fabric when it repeats"),
    151: "restart the machine, or the virtual machine",
    154: "do what 'nvidia-smi -q' shows as the GPU recovery action",
}
"""What NVIDIA's XID catalog advises. Codes that ask for nothing are left out."""

SERIOUS_XIDS = frozenset(XID_ACTIONS) - {code for code, action in XID_ACTIONS.items() if action == _RESTART}
"""XIDs that are the GPU's fault and not the application's."""


def xids(kernel_log: str) -> dict[str, list[int]]:
    """The codes of the XIDs in a kernel log by PCI address without function, in order, each once."""
    found: dict[str, list[int]] = {}
    for address, code in _XID.findall(kernel_log):
        codes = found.setdefault(address.lower(), [])
        if int(code) not in codes:
            codes.append(int(code))
    return found


def serious(codes: Iterable[int]) -> list[int]:
    """Those codes that are the GPU's fault."""
    return [code for code in codes if code in SERIOUS_XIDS]
