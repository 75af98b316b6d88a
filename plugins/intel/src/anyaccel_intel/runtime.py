"""The compute runtime's list of GPUs: a second source beside sysfs, never the first.

Asked through dpctl if installed (``pip install anyaccel-intel[dpctl]``), else through the tool ``sycl-ls``. Both list
only the devices left by masks, without PCI addresses.
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
    """Ask dpctl for the Level Zero GPUs. Only for ``ctx.query``: it loads the whole runtime."""
    import dpctl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return [
        {"name": device.name, "memory_bytes": device.global_mem_size, "driver_version": device.driver_version}
        for device in dpctl.get_devices(backend="level_zero", device_type="gpu")
    ]


def list_gpus(ctx: ProbeContext) -> tuple[str, list[str]] | None:
    """List the Level Zero GPUs visible to the runtime in this environment.

    Returns:
        The source, and the names in the runtime's order; None without a source.

    Raises:
        FaultError: A line of sycl-ls has an unknown form.
    """
    told = try_query(ctx, QUESTION, ask_dpctl)
    if told is not None:
        return "dpctl", [str(device["name"]) for device in told]
    try:
        text = SYCL_LS.ask(ctx)
    except FaultError:  # sycl-ls has crashed on new cards that work (intel/compute-runtime#788)
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
        FaultError: A line has another form.
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
    """Fill in missing names and memory, if the runtime's list is surely in the order of ours.

    The runtime's positions mean our devices only without masks, with equal counts, and with each known product in its
    place (pytorch/pytorch#197515 shows the effect otherwise). Notes are returned.
    """
    counted = [card for card in cards if card.attributes.get("level_zero") is not False]
    lacking = any(not card.model or _lacks_memory(card) for card in counted)
    if not lacking or level_zero.masked(ctx.environ) or selector.SELECTOR in ctx.environ:
        return
    told = try_query(ctx, QUESTION, ask_dpctl)
    if told is None:
        return  # not installed, or broken: see the findings
    # More answers than cards is fine; fewer are caught below.
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
