"""Meaning of NVML's errors, health facts and XIDs, with a remedy each. ``faults.toml`` has the texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from anyaccel.kit import Catalog, Fault
from anyaccel.plugin import QueryError

TABLES = Catalog(__file__, "faults.toml")
COMPUTE_MODES = {1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
PROHIBITED = 2
DRIVER_NOT_LOADED = 9
DRIVER_ERRORS = {4, DRIVER_NOT_LOADED, 12, 13, 18}
"""NVML errors about the driver as a whole, which say nothing about a single GPU."""

XID = r"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\S*\): (\d+)"


def gpu_fault(error: QueryError) -> Fault:
    """Return the fault of a GPU for which NVML raised an error."""
    unknown = Fault(f"NVML answers {error} about it", "see 'dmesg | grep NVRM'")
    return TABLES.faults("gpu").get(str(error.value), unknown)


def driver_fault(error: QueryError) -> Fault:
    """Return the fault behind an error of NVML as a whole."""
    unknown = Fault(f"NVML does not answer ({error.kind}: {error})", "try 'nvidia-smi' and 'dmesg | grep NVRM'")
    return TABLES.faults("driver").get(str(error.value), unknown)


def absence_fault(error: QueryError) -> Fault | None:
    """Return the reason why NVML is absent; None if NVML is present and failed."""
    return TABLES.faults("not_asked").get(str(error.value or error.kind))


def judge(facts: Mapping[str, Any]) -> Fault | None:
    """Return the fault of a GPU from its health facts; None if the GPU can be used."""
    rows, action = facts.get("remapped_rows"), facts.get("recovery_action")
    if facts.get("compute_mode") == PROHIBITED:
        return Fault("its compute mode is PROHIBITED", "'nvidia-smi -c DEFAULT' as root allows work again")
    # The four words: corrected rows, uncorrected rows, remapping pending, remapping failed.
    if rows and rows[3]:
        return Fault("it has no spare memory rows left (row remapping failed)", "have it replaced")
    return TABLES.faults("recovery").get(str(action)) if action else None


def remarks(facts: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield maintenance advice for a GPU that can be used."""
    label = f"GPU {facts['index']} ({facts.get('uuid') or facts['name']})"
    rows, mig = facts.get("remapped_rows"), facts.get("mig")
    if (rows and rows[2] and not rows[3]) or facts.get("retired_pages_pending"):
        reason = f"{label} has replaced bad memory, which takes effect at its next reset"
        yield Fault(reason, "'nvidia-smi --gpu-reset'")
    if mig and mig[0] != mig[1]:
        yield Fault(f"{label} changes its MIG mode at its next reset", "'nvidia-smi --gpu-reset'")
    if mig and mig[0] and not facts["mig_devices"]:
        remedy = "create some with 'nvidia-smi mig -cgi PROFILE -C', or turn MIG off with 'nvidia-smi -mig 0'"
        yield Fault(f"{label} has MIG on and no MIG device, so it offers nothing", remedy)


def gaps(why: Fault, seen: int, hidden: int, *, tegra: bool) -> Iterator[Fault]:
    """Yield notes on missing facts if only files could be read.

    The GPU of a Tegra board is in no file.
    """
    if seen:
        reason = f"NVML could not be asked ({why.reason}), so memory, health, links and MIG are unknown"
        yield Fault(reason, why.remedy)
    if hidden:
        reason = f"NVIDIA GPUs ({hidden}) are on the PCI bus without a device node here"
        yield Fault(reason, "ask for them when starting the container, or let 'nvidia-modprobe -u -c=0' make the nodes")
    if tegra and not (seen or hidden):
        reason = f"this is a Tegra board and NVML could not be asked ({why.reason}), so its GPU is not listed"
        yield Fault(reason, "update JetPack")


def xids(log: str) -> list[tuple[str, int, str]]:
    """Return the XIDs in a kernel log caused by a GPU: PCI address without function, code, advice; each once."""
    advice = {code: entry["advice"] for entry in TABLES.data["xids"] for code in entry["codes"]}
    # The driver may log an XID many times; one finding per GPU and code is enough.
    found = dict.fromkeys((address.lower(), int(code)) for address, code in re.findall(XID, log))
    return [(address, code, advice[code]) for address, code in found if code in advice]
