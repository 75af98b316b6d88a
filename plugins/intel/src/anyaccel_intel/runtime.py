"""What the compute runtime says about its GPUs: a second witness beside sysfs, and never the first.

The runtime is asked through dpctl where that is installed (``pip install anyaccel-intel[dpctl]``), else through the
tool ``sycl-ls``. Both see only what masks leave and tell no PCI address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyaccel.plugin import CommandTimeoutError, Device, ProbeContext, QueryError

from anyaccel_intel import affinity
from anyaccel_intel.products import BY_NAME, model_of

LINE = re.compile(
    r"\[(?P<backend>\w+):(?P<kind>\w+)(?::(?P<old>\d+))?\](?:\[\w+:(?P<new>\d+)\])?\s+"
    r"(?P<platform>[^,]+),\s+(?P<name>.*?)\s+(?:OpenCL )?\d+(?:\.\d+)+(?: NEO| \(Build \d+\))?\s+"
    r"\[(?P<driver>[^\]]+)\]\s*"
)
SYCL_LS_SECONDS = 5.0


def ask_dpctl() -> list[dict[str, Any]]:
    """Ask dpctl for the Level Zero GPUs. Call it through ``ctx.query`` alone: it loads the whole runtime."""
    import dpctl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return [
        {"name": device.name, "memory_bytes": device.global_mem_size, "driver_version": device.driver_version}
        for device in dpctl.get_devices(backend="level_zero", device_type="gpu")
    ]


def seen(ctx: ProbeContext) -> tuple[str, list[str]] | None:
    """Name the Level Zero GPUs that the runtime shows in this environment.

    Returns:
        Who was asked, and the names in the runtime's order; None when nobody could be asked.
    """
    try:
        return "dpctl", [str(device["name"]) for device in ctx.query("dpctl/level_zero_gpus", ask_dpctl)]
    except QueryError:
        pass
    try:
        result = ctx.run(["sycl-ls"], timeout=SYCL_LS_SECONDS)
    except (CommandTimeoutError, OSError):
        return None
    if result is None or result.returncode != 0:  # it has crashed on new cards, which says nothing about them
        return None
    return "sycl-ls", [name for backend, kind, name in parse_sycl_ls(result.stdout) if (backend, kind) == LEVEL_ZERO]


LEVEL_ZERO = ("level_zero", "gpu")


def parse_sycl_ls(text: str) -> list[tuple[str, str, str]]:
    """Parse the output of ``sycl-ls``, with labels of either style.

    Returns:
        Backend, as selectors name it, type and name of each device. A GPU appears once per backend.

    Raises:
        ValueError: When a line has another form.
    """
    found = []
    for line in text.splitlines():
        if not line.startswith("["):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"sycl-ls must print [backend:type] platform, name version [driver] (got {line[:80]!r})")
        found.append((match["backend"].removeprefix("ext_oneapi_"), match["kind"], match["name"]))
    return found


def completed(devices: Sequence[Device], ctx: ProbeContext) -> tuple[list[Device], list[str]]:
    """Fill in names and memory that files did not tell, where the runtime's list is surely in the order of ours.

    The runtime's positions mean our devices only when nothing is masked, the counts agree, and every product that we
    know stands where it should (pytorch/pytorch#197515 is what happens otherwise).

    Returns:
        The devices, and what people should know.
    """
    counted = [device for device in devices if device.attributes.get("level_zero") is not False]
    lacking = [device for device in counted if model_of(device) is None or _lacks_memory(device)]
    masked = not affinity.unset(ctx.environ.get(affinity.MASK)) or "ONEAPI_DEVICE_SELECTOR" in ctx.environ
    if not lacking or masked:
        return list(devices), []
    try:
        answers = ctx.query("dpctl/level_zero_gpus", ask_dpctl)
    except QueryError:
        return list(devices), []  # an extra that is not installed, or a runtime that is broken: see diagnose
    listed = [str(answer["name"]) for answer in answers]
    expected = [model.name if (model := model_of(device)) else None for device in counted]
    if len(listed) < len(expected) or any(
        (ours or BY_NAME.get(theirs)) and ours != theirs for ours, theirs in zip(expected, listed, strict=False)
    ):
        return list(devices), [f"dpctl lists {len(listed)} GPUs in another order than sysfs, and was not believed"]
    told = {device.id: answer for device, answer in zip(counted, answers, strict=False)}
    return [_told(device, told[device.id]) if device in lacking else device for device in devices], []


def _told(device: Device, answer: dict[str, Any]) -> Device:
    size = answer["memory_bytes"]
    own = size if _lacks_memory(device) and isinstance(size, int) and size > 0 else device.memory_bytes
    return replace(device, model=device.model if model_of(device) else str(answer["name"]), memory_bytes=own)


def _lacks_memory(device: Device) -> bool:
    return device.memory_bytes is None and device.attributes.get("integrated") is not True
