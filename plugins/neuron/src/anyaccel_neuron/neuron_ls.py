"""The tool ``neuron-ls``: cores, memory, links, addresses and processes of each chip.

The tool only reads the driver's files. It never opens the runtime, which would take every core for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from anyaccel.kit import FaultError, Tool
from anyaccel.plugin import PciFunction, ProbeContext

# Under sudo, systemd and in containers the directory in which it is installed is not on the PATH.
TOOL = Tool("/opt/aws/neuron/bin/neuron-ls", "neuron-ls", seconds=10.0, package="the package aws-neuronx-tools")

FORMS = (["--json-output"], ["-j"], ["--output-format", "json"])
"""Every tool until SDK 2.33 takes the second form, most the first, later ones only the third (announcement of the
end of support for the JSON format). Trying the next form also repeats a call that failed because several ran at once,
which tools before SDK 2.28 cannot bear."""


NO_CORE = 65535  # beyond any machine


class Listed(NamedTuple):
    """A chip in the tool's list; without arguments, a chip missing there."""

    nc_count: int = 0  # number of cores, as printed; 0 if unknown
    cores: Sequence[int] = ()  # the runtime's ids; empty before SDK 2.25
    memory_bytes: int | None = None
    function: PciFunction | None = None  # address and nearest NUMA node, as far as the tool tells
    connected: Sequence[int] = ()  # indexes of linked chips, by the host's numbers
    lnc: int | None = None  # physical cores in a logical core; None if unknown to chip or tool
    instance_type: str | None = None
    pids: Sequence[int] = ()  # processes on any of its cores
    fault: str = ""  # why the entry cannot be understood


def ask(ctx: ProbeContext) -> tuple[Mapping[int, Listed], str]:
    """Run the tool and parse its answer.

    Returns:
        The chips by index, which inside a container may count from 0, and the reason for a missing answer, in whole or
        for a chip; empty without a problem. sysfs may suffice then.
    """
    problem = ""
    try:
        # A tool that knows another form fails at once.
        for form in FORMS:
            result = TOOL.run(ctx, *form)
            if result is None:
                break
            if result.returncode == 0:
                return parse(result.stdout)
            said = (result.stderr.strip() or result.stdout.strip() or "nothing").splitlines()[-1][:200]
            problem = problem or f"it exited with status {result.returncode} and said: {said}"
    except FaultError as error:
        problem = str(error)
    problem = problem and f"neuron-ls gave no list of devices: {problem}"
    return {}, problem or f"neuron-ls is not installed: install {TOOL.package}"


def parse(text: str) -> tuple[Mapping[int, Listed], str]:
    """Parse the JSON of the tool. A malformed chip is set aside and the others are kept.

    Raises:
        FaultError: The text holds no list of devices.
    """
    chips: dict[int, Listed] = {}
    holders: dict[int, int] = {}
    problem = ""
    for element in _elements(text):
        index = element.get("neuron_device") if isinstance(element, dict) else None
        if not natural(index):
            problem = f"neuron-ls lists something without a device index: {json.dumps(element)[:120]}"
            continue
        chip = _chip(index, element)
        # Two chips with the same core: one of the two entries is wrong, and which one is unknown.
        shared = next((core for core in chip.cores if holders.setdefault(core, index) != index), None)
        if index in chips:
            chip = Listed(fault=f"neuron-ls lists device {index} twice")
        elif shared is not None:
            chip = Listed(fault=f"neuron-ls lists core {shared} for device {index} and for device {holders[shared]}")
        chips[index] = chip
    return chips, problem


def _elements(text: str) -> list[Any]:
    """Find the list of devices in the output.

    Tools of 2021 print a banner first (aws-neuron-sdk#359); tools after SDK 2.33 print an object with the list and the
    facts shared by every device.
    """
    start = re.search(r"^\s*[\[{]", text, re.MULTILINE) or re.search(r"[\[{]", text)
    try:
        data = json.loads(text[start.start() :] if start else "")
    except (ValueError, RecursionError):
        raise FaultError(f"it must print JSON (got {text.strip()[:80]!r})", "run it by hand") from None
    if isinstance(data, list):
        return data
    lists = [
        value
        for value in data.values()
        if isinstance(value, list) and all(isinstance(each, dict) and "neuron_device" in each for each in value)
    ]
    if len(lists) != 1:
        raise FaultError(f"its JSON must hold one list of devices (got the keys {sorted(data)[:12]})", "run it by hand")
    common = {key: value for key, value in data.items() if not isinstance(value, list | dict)}
    return [{**common, **each} for each in lists[0]]


def _chip(index: int, element: Mapping[str, Any]) -> Listed:
    count, cores, lnc = element.get("nc_count"), element.get("neuroncore_ids"), element.get("logical_neuroncore_config")
    ids, fault = [core for core in _naturals(cores) if core < NO_CORE], ""
    if not natural(count) or count not in range(1, 1025):  # far above any chip
        fault = f"nc_count must be the number of cores (got {count!r})"
    elif cores is not None and (ids != cores or len(set(ids)) < len(ids)):
        fault = f"neuroncore_ids must be a list of core ids (got {cores!r})"
    elif cores is not None and len(ids) != count:
        fault = f"neuroncore_ids must name the {count} cores of nc_count (got {len(ids)})"
    elif lnc is not None and not (natural(lnc) and lnc in (0, 1, 2)):  # 0 where the chip knows no sizes
        fault = f"logical_neuroncore_config must be 1 or 2 (got {lnc!r})"
    if fault:
        return Listed(fault=f"neuron-ls on device {index}: {fault}")
    memory = element.get("memory_size")
    return Listed(
        nc_count=count or 0,
        cores=ids,
        memory_bytes=memory or None if natural(memory) else None,
        function=_function(str(element.get("bdf")), str(element.get("numa_node"))),
        connected=_naturals(element.get("connected_to")),
        lnc=lnc or None,
        instance_type=str(element.get("instance_type") or "") or None,
        pids=_naturals([each.get("pid") for each in _list(element.get("neuron_processes")) if isinstance(each, dict)]),
    )


def _function(address: str, numa_node: str) -> PciFunction | None:
    """Build a PCI function. Older tools print ``cc:00.0`` for ``0000:cc:00.0``; NUMA node -1 means none."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.strip().lower())
    numa = int(numa_node) if re.fullmatch(r"\s*[0-9]{1,6}\s*", numa_node) else None
    full = f"{match[1] or '0000'}:{match[2]}" if match else ""
    return PciFunction(address=full, vendor=0x1D0F, device=0, class_code=0, numa_node=numa) if full else None


def natural(value: object) -> TypeGuard[int]:
    """Return True for a non-negative integer in the range of an inventory."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _naturals(value: object) -> list[int]:
    return list(filter(natural, _list(value)))
