"""What the compute runtime says about its GPUs: a second source beside sysfs, and never the first.

The runtime is asked through dpctl where that is installed (``pip install anyaccel-intel[dpctl]``), else through the
tool ``sycl-ls``. Both see only what masks leave and tell no PCI address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from anyaccel.kit import Card, Catalog, FaultError, Tool, try_query
from anyaccel.plugin import ProbeContext

from anyaccel_intel import level_zero, selector

LINE = re.compile(
    r"\[(?P<backend>\w+):(?P<kind>\w+)(?::(?P<old>\d+))?\](?:\[\w+:(?P<new>\d+)\])?\s+"
    r"(?P<platform>[^,]+),\s+(?P<name>.*?)\s+(?:OpenCL )?\d+(?:\.\d+)+(?: NEO| \(Build \d+\))?\s+"
    r"\[(?P<driver>[^\]]+)\]\s*"
)
QUESTION = "dpctl/level_zero_gpus"
SYCL_LS = Tool("sycl-ls", seconds=5.0)


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

    Raises:
        FaultError: When a line of sycl-ls has another form than we know.
    """
    told = try_query(ctx, QUESTION, ask_dpctl)
    if told is not None:
        return "dpctl", [str(device["name"]) for device in told]
    try:
        text = SYCL_LS.ask(ctx)
    except FaultError:  # it has crashed on new cards (intel/compute-runtime#788), which says nothing about them
        return None
    if text is None:
        return None
    gpus = ("level_zero", "gpu")
    return "sycl-ls", [name for backend, kind, name in parse_sycl_ls(text) if (backend, kind) == gpus]


def parse_sycl_ls(text: str) -> list[tuple[str, str, str]]:
    """Parse the output of ``sycl-ls``, with labels of either style.

    Returns:
        Backend, as selectors name it, type and name of each device. A GPU appears once per backend.

    Raises:
        FaultError: When a line has another form.
    """
    found = []
    for line in text.splitlines():
        if not line.startswith("["):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            reason = f"sycl-ls must print [backend:type] platform, name version [driver] (got {line[:80]!r})"
            raise FaultError(reason, "report the line, with the version of oneAPI")
        found.append((match["backend"].removeprefix("ext_oneapi_"), match["kind"], match["name"]))
    return found


def complete(ctx: ProbeContext, cards: Sequence[Card], catalog: Catalog) -> Iterator[str]:
    """Fill in names and memory that files did not tell, where the runtime's list is surely in the order of ours.

    The runtime's positions mean our devices only when nothing is masked, the counts agree, and every product that we
    know stands where it should (pytorch/pytorch#197515 is what happens otherwise). What people should know is returned.
    """
    counted = [card for card in cards if card.attributes.get("level_zero") is not False]
    lacking = any(not card.model or _lacks_memory(card) for card in counted)
    if not lacking or level_zero.masked(ctx.environ) or selector.SELECTOR in ctx.environ:
        return
    told = try_query(ctx, QUESTION, ask_dpctl)
    if told is None:
        return  # an extra that is not installed, or a runtime that is broken: see the findings
    pairs = list(zip(counted, told, strict=False))
    if len(pairs) < len(counted) or any(card.entry != catalog.by_name(str(answer["name"])) for card, answer in pairs):
        yield f"dpctl lists {len(told)} GPUs in another order than sysfs, and was not believed"
        return
    for card, answer in pairs:
        size = answer["memory_bytes"]
        if _lacks_memory(card) and isinstance(size, int) and size > 0:
            card.memory_bytes = size
        card.model = card.model or str(answer["name"])


def _lacks_memory(card: Card) -> bool:
    return card.memory_bytes is None and card.attributes.get("integrated") is not True
