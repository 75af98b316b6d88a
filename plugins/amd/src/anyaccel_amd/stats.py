"""What the devices do now, from sysfs, and from ``amdsmi`` where sysfs does not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyaccel.plugin import Device, DeviceProcess, Health, ProbeContext, QueryError, Stats

from anyaccel_amd import health, kfd, smi

BAD_PAGES = "ras/gpu_vram_bad_pages"

Facts = Mapping[str, Any]


def stats(devices: Sequence[Device], ctx: ProbeContext) -> dict[str, Stats]:
    """Observe the devices: health, memory in use, utilization, temperature, power and processes.

    A card's utilization and power are not those of a partition of it, and are left out there.
    """
    seen = [device for device in devices if device.attributes.get("render_minor")]
    more = _from_library(ctx, seen)
    return {device.id: _stats(ctx, device, more) for device in seen}


def _stats(ctx: ProbeContext, device: Device, more: Mapping[str, Facts]) -> Stats:
    card = health.card_of(device)
    where = f"{health.PCI}/{card}"
    whole = device.parent is None
    of_card = more.get(card, {})
    facts = of_card if whole else {}
    busy = _number(ctx, f"{where}/gpu_busy_percent") if whole else None
    busy = facts.get("busy_percent") if busy is None else busy
    used = _number(ctx, f"{where}/mem_info_vram_used") if whole else _used_by_banks(ctx, device)
    power = _power(ctx, where) if whole else None
    temperature = _temperature(ctx, where)
    problem = _problem(ctx, device, of_card)
    return Stats(
        memory_used_bytes=facts.get("memory_used_bytes") if used is None else used,
        utilization=busy / 100 if busy is not None and 0 <= busy <= 100 else None,  # noqa: PLR2004 - percent
        temperature_celsius=facts.get("temperature_celsius") if temperature is None else temperature,
        power_watts=facts.get("power_watts") if power is None else power,
        health=Health.UNHEALTHY if problem else Health.HEALTHY,
        health_reason=problem,
        processes=_processes(ctx, device.attributes.get("kfd_gpu_id")),
    )


def _problem(ctx: ProbeContext, device: Device, facts: Facts) -> str:
    """Looked at anew each time and never remembered: a GPU may come back from a reset."""
    number, minor = device.attributes.get("kfd_node"), device.attributes["render_minor"]
    if isinstance(number, int) and health.vanished(ctx, number):
        return f"KFD node {number} is gone, as after a failed reset; see 'dmesg | grep amdgpu' and detect again"
    found = health.problem(ctx, health.card_of(device), minor if isinstance(minor, int) else None)
    return found or health.worn_out(facts)


def _from_library(ctx: ProbeContext, devices: Iterable[Device]) -> dict[str, Facts]:
    """Ask amdsmi about whole cards, only where sysfs lacks something: it may take seconds.

    Returns:
        Its answers by PCI address. Those about partitions are left out: chips differ in what they mean there.
    """
    if not any(_needs_library(ctx, device) for device in devices):
        return {}
    try:
        answer = ctx.query("amdsmi/metrics", smi.question(ctx, "metrics"))
    except QueryError:
        return {}  # 'anyaccel doctor' asks the library as well, and says what is wrong with it
    return {entry["bdf"]: entry for entry in answer if not entry["partition"]}


def _needs_library(ctx: ProbeContext, device: Device) -> bool:
    """Whether a sensor is missing, or pages are retired and only the library knows how many may be."""
    where = f"{health.PCI}/{health.card_of(device)}"
    if (_text(ctx, f"{where}/{BAD_PAGES}") or "").strip():
        return True
    return device.parent is None and _number(ctx, f"{where}/gpu_busy_percent") is None


def _used_by_banks(ctx: ProbeContext, device: Device) -> int | None:
    """Memory in use of a partition, which newer kernels write beside its memory banks."""
    number = device.attributes.get("kfd_node")
    if not isinstance(number, int):
        return None
    used = [_number(ctx, f"{path}/used_memory") for path, _ in kfd.banks(ctx, number)]
    known = [value for value in used if value is not None]
    return sum(known) if known and len(known) == len(used) else None


def _temperature(ctx: ProbeContext, where: str) -> float | None:
    """The junction's temperature, else the edge's, else the first: chips differ in which they have."""
    found: dict[str, int] = {}
    for path in ctx.glob(f"{where}/hwmon/hwmon*/temp*_input"):
        value = _number(ctx, path)
        label = (_text(ctx, path.removesuffix("input") + "label") or "").strip()
        if value is not None:
            found.setdefault(label, value)
    chosen = next((found[label] for label in ("junction", "edge") if label in found), next(iter(found.values()), None))
    return chosen / 1000 if chosen is not None else None


def _power(ctx: ProbeContext, where: str) -> float | None:
    for name in ("power1_average", "power1_input"):
        for path in ctx.glob(f"{where}/hwmon/hwmon*/{name}"):
            value = _number(ctx, path)
            if value is not None:
                return value / 1_000_000
    return None


def _processes(ctx: ProbeContext, gpu_id: object) -> tuple[DeviceProcess, ...] | None:
    """Processes with memory or a queue on the device. KFD lists a process on every GPU that it has merely opened."""
    if not ctx.is_dir(kfd.PROCESSES) or not isinstance(gpu_id, int):
        return None
    found = []
    for path in ctx.glob(f"{kfd.PROCESSES}/[0-9]*"):
        memory = _number(ctx, f"{path}/vram_{gpu_id}")
        queues = (_number(ctx, file) for file in ctx.glob(f"{path}/queues/*/gpuid"))
        if memory or gpu_id in queues:
            found.append(DeviceProcess(pid=int(path.rpartition("/")[2]), memory_bytes=memory))
    return tuple(found)


def _number(ctx: ProbeContext, path: str) -> int | None:
    try:
        return ctx.read_int(path)
    except OSError:
        return None


def _text(ctx: ProbeContext, path: str) -> str | None:
    try:
        return ctx.read(path)
    except OSError:
        return None
