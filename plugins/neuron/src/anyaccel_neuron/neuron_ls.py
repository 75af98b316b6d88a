"""What ``neuron-ls`` says: cores, memory, links, addresses and processes of each chip.

The tool only reads what the driver shows. It never opens the runtime, which would take every core for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from anyaccel.kit import FaultError, Tool
from anyaccel.plugin import ProbeContext

# Under sudo, systemd and in containers the directory in which it is installed is not on the PATH.
TOOL = Tool("/opt/aws/neuron/bin/neuron-ls", "neuron-ls", seconds=10.0, package="the package aws-neuronx-tools")

FORMS = (["--json-output"], ["-j"], ["--output-format", "json"])
"""Every tool until SDK 2.33 takes the second form, most the first, later ones only the third (announcement of the
end of support for the JSON format). Trying the next form also repeats a call that failed because several ran at once,
which tools before SDK 2.28 cannot bear."""


class Listed(NamedTuple):
    """One chip as the tool lists it.

    Attributes:
        cores_listed: Number of cores, as the tool prints it.
        cores: Ids that the runtime takes; empty before SDK 2.25.
        memory_bytes: Memory of the chip.
        address: PCI address.
        numa_node: Nearest NUMA node, or None.
        connected: Indexes of the chips that it is linked to, as the host counts them.
        lnc: Physical cores in one logical core, or None where the chip or the tool does not know it.
        instance_type: EC2 instance type, or an empty string.
        pids: Processes that use the chip. The tool does not say which of its cores.
    """

    cores_listed: int
    cores: Sequence[int]
    memory_bytes: int | None
    address: str | None
    numa_node: int | None
    connected: Sequence[int]
    lnc: int | None
    instance_type: str
    pids: Sequence[int]


class Listing(NamedTuple):
    """The answer of the tool.

    Attributes:
        chips: The chips by their index; inside a container the tool may count from 0.
        faults: Why a chip that it lists cannot be understood, by index.
        problem: Why there is no answer, or none for some chip, in one sentence; empty when all is well.
    """

    chips: Mapping[int, Listed]
    faults: Mapping[int, str]
    problem: str


def ask(ctx: ProbeContext) -> Listing:
    """Run the tool and read its answer. What goes wrong is in the answer, since sysfs may know enough."""
    problem = ""
    try:
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
    return Listing({}, {}, problem or f"neuron-ls is not installed: install {TOOL.package}")


def parse(text: str) -> Listing:
    """Read the JSON of the tool. One chip that makes no sense is set aside and the others are kept.

    Raises:
        FaultError: When the text holds no list of devices.
    """
    chips: dict[int, Listed] = {}
    faults: dict[int, str] = {}
    holders: dict[int, int] = {}
    problem = ""
    for element in _elements(text):
        index = element.get("neuron_device") if isinstance(element, dict) else None
        if not _natural(index):
            problem = f"neuron-ls lists something without a device index: {json.dumps(element)[:120]}"
            continue
        if index in chips or index in faults:
            chips.pop(index, None)
            faults[index] = f"neuron-ls lists device {index} twice"
            continue
        try:
            chip = _chip(element)
        except ValueError as error:
            faults[index] = f"neuron-ls on device {index}: {error}"
            continue
        shared = [core for core in chip.cores if holders.setdefault(core, index) != index]
        if shared:
            faults[index] = f"neuron-ls lists core {shared[0]} for device {index} and for device {holders[shared[0]]}"
        else:
            chips[index] = chip
    return Listing(chips, faults, problem)


def _elements(text: str) -> list[Any]:
    """Find the list of devices in the output.

    Tools of 2021 print a banner first (aws-neuron-sdk#359); those after SDK 2.33 print an object that holds the list
    and, beside it, what all devices have in common.
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


def _chip(element: Mapping[str, Any]) -> Listed:
    count, cores, lnc = element.get("nc_count"), element.get("neuroncore_ids"), element.get("logical_neuroncore_config")
    memory, numa = element.get("memory_size"), str(element.get("numa_node")).strip()
    if not _natural(count) or count not in range(1, 1025):  # far above any chip
        raise ValueError(f"nc_count must be the number of cores (got {count!r})")
    if cores is not None and not (isinstance(cores, list) and len(set(_naturals(cores))) == len(cores)):
        raise ValueError(f"neuroncore_ids must be a list of core ids (got {cores!r})")
    if cores is not None and len(cores) != count:
        raise ValueError(f"neuroncore_ids must name the {count} cores of nc_count (got {len(cores)})")
    if lnc is not None and not (_natural(lnc) and lnc in (0, 1, 2)):  # 0 where the chip knows no sizes
        raise ValueError(f"logical_neuroncore_config must be 1 or 2 (got {lnc!r})")
    return Listed(
        cores_listed=count,
        cores=cores or (),
        memory_bytes=memory or None if _natural(memory) else None,
        address=pci_address(element.get("bdf")),
        numa_node=int(numa) if re.fullmatch(r"[0-9]{1,6}", numa) else None,  # text; -1 where there is none
        connected=_naturals(element.get("connected_to")),
        lnc=lnc or None,
        instance_type=str(element.get("instance_type") or ""),
        pids=_naturals([each.get("pid") for each in _list(element.get("neuron_processes")) if isinstance(each, dict)]),
    )


def pci_address(text: object) -> str | None:
    """Write a PCI address in full: ``cc:00.0`` of older tools as ``0000:cc:00.0``; None when it is none."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", str(text).strip().lower())
    return f"{match[1] or '0000'}:{match[2]}" if match else None


def _natural(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _naturals(value: object) -> list[int]:
    return list(filter(_natural, _list(value)))
