"""What ``neuron-ls`` says: cores, memory, links and addresses of each chip.

The tool only reads what the driver shows. It never opens the runtime, which would take every core for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from anyaccel.plugin import CommandResult, CommandTimeoutError, ProbeContext

TOOLS = ("/opt/aws/neuron/bin/neuron-ls", "neuron-ls")
"""Where it is installed, then the PATH: under sudo, systemd and in containers the directory is not on it."""

FORMS = (["--json-output"], ["-j"], ["--output-format", "json"])
"""Every tool until SDK 2.33 takes the second form, most the first, later ones only the third (announcement of the
end of support for the JSON format). Trying the next form also repeats a call that failed because several ran at once,
which tools before SDK 2.28 cannot bear."""

TIMEOUT_SECONDS = 10.0

_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One chip as the tool lists it.

    Attributes:
        index: Index of the chip; inside a container the tool may count from 0.
        count: Number of cores, as the tool prints it.
        cores: Ids that the runtime takes, or None before SDK 2.25.
        memory_bytes: Memory of the chip.
        bdf: PCI address.
        numa_node: Nearest NUMA node, or None.
        connected: Indexes of the chips it is linked to, as the host counts them.
        lnc: Physical cores in one logical core, or None where the chip or the tool does not know it.
        instance_type: EC2 instance type, or an empty string.
        pids: Processes that use the chip.
    """

    index: int
    count: int
    cores: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    bdf: str | None = None
    numa_node: int | None = None
    connected: frozenset[int] = frozenset()
    lnc: int | None = None
    instance_type: str = ""
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The answer of the tool.

    Attributes:
        chips: The chips by index.
        faults: Why a chip that it lists cannot be understood, by index.
        problem: Why there is no answer, or none for some device, in one sentence; empty when all is well.
    """

    chips: Mapping[int, Listed] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)
    problem: str = ""


def ask(ctx: ProbeContext) -> Listing:
    """Run the tool and read its answer. What goes wrong is in the answer, since sysfs may know enough."""
    for tool in TOOLS:
        try:
            result = _run(ctx, tool)
            if result is not None:
                return parse(result.stdout)
        except (CommandTimeoutError, OSError, ValueError) as error:
            return Listing(problem=f"neuron-ls gave no list of devices: {error}")
    return Listing(problem="neuron-ls is not installed: install the package aws-neuronx-tools")


def _run(ctx: ProbeContext, tool: str) -> CommandResult | None:
    """The first answer of a tool that succeeds; None when it is not installed.

    Raises:
        ValueError: When every form of the command fails.
    """
    reasons: list[str] = []
    for form in FORMS:
        # Half of what is left: a tool that hangs must not cost what sysfs can still tell.
        result = ctx.run([tool, *form], timeout=min(TIMEOUT_SECONDS, ctx.remaining() / 2))
        if result is None:
            if reasons:
                break
            return None
        if result.returncode == 0:
            return result
        said = (result.stderr.strip() or result.stdout.strip() or "nothing").splitlines()[-1]
        reasons.append(f"it exited with status {result.returncode} and said: {said[:200]}")
    raise ValueError(reasons[0])


def parse(text: str) -> Listing:
    """Read the JSON of the tool.

    One chip that makes no sense is set aside and the others are kept.

    Raises:
        ValueError: When the text holds no list of devices.
    """
    elements = _elements(text)
    chips: dict[int, Listed] = {}
    faults: dict[int, str] = {}
    taken: dict[int, int] = {}
    problem = ""
    for element in elements:
        index = element.get("neuron_device") if isinstance(element, dict) else None
        if not _natural(index):
            problem = f"neuron-ls lists something without a device index: {json.dumps(element)[:120]}"
            continue
        if index in chips or index in faults:
            chips.pop(index, None)
            faults[index] = f"neuron-ls lists device {index} twice"
            continue
        try:
            chip = _chip(index, element)
        except ValueError as error:
            faults[index] = f"neuron-ls on device {index}: {error}"
            continue
        shared = [core for core in chip.cores or () if taken.setdefault(core, index) != index]
        if shared:
            faults[index] = f"neuron-ls lists core {shared[0]} for device {index} and for device {taken[shared[0]]}"
        else:
            chips[index] = chip
    return Listing(chips=chips, faults=faults, problem=problem)


def _elements(text: str) -> list[Any]:
    """Find the list of devices in the output.

    Tools of 2021 print a banner first (aws-neuron-sdk#359); those after SDK 2.33 print an object that holds the list
    and, beside it, what all devices have in common.
    """
    start = re.search(r"^\s*[\[{]", text, re.MULTILINE) or re.search(r"[\[{]", text)
    if start is None:
        shown = f"{text.strip()[:80]!r}" if text.strip() else "nothing"
        raise ValueError(f"it must print JSON (got {shown})")
    try:
        data = json.loads(text[start.start() :])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must print JSON (got {text.strip()[:80]!r}: {error})") from None
    if isinstance(data, dict):
        lists = [value for value in data.values() if _is_device_list(value)]
        if len(lists) != 1:
            raise ValueError(f"its JSON must hold one list of devices (got the keys {sorted(data)[:12]})")
        common = {key: value for key, value in data.items() if not isinstance(value, (list, dict))}
        data = [{**common, **element} for element in lists[0]]
    # A list or an object is all that can begin with these brackets.
    return list(data)


def _is_device_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and "neuron_device" in entry for entry in value)


def _chip(index: int, element: Mapping[str, Any]) -> Listed:
    count, cores, lnc = element.get("nc_count"), element.get("neuroncore_ids"), element.get("logical_neuroncore_config")
    if not _natural(count) or not 0 < count <= 1024:  # noqa: PLR2004 - far above any chip
        raise ValueError(f"nc_count must be the number of cores (got {count!r})")
    if cores is not None:
        if not isinstance(cores, list) or not all(map(_natural, cores)) or len(set(cores)) != len(cores):
            raise ValueError(f"neuroncore_ids must be a list of core ids (got {cores!r})")
        if len(cores) != count:
            raise ValueError(f"neuroncore_ids must name the {count} cores of nc_count (got {len(cores)})")
    if lnc is not None and (not _natural(lnc) or lnc > 2):  # noqa: PLR2004 - the two sizes that exist, or 0 for neither
        raise ValueError(f"logical_neuroncore_config must be 1 or 2 (got {lnc!r})")
    memory = element.get("memory_size")
    return Listed(
        index=index,
        count=count,
        cores=tuple(cores) if cores is not None else None,
        memory_bytes=memory if _natural(memory) and memory > 0 else None,
        bdf=pci_address(element.get("bdf")),
        numa_node=_number(element.get("numa_node")),
        connected=frozenset(filter(_natural, _list(element.get("connected_to")))),
        lnc=lnc or None,
        instance_type=str(element.get("instance_type") or ""),
        pids=tuple(
            process["pid"]
            for process in _list(element.get("neuron_processes"))
            if isinstance(process, dict) and _natural(process.get("pid"))
        ),
    )


def pci_address(text: Any) -> str | None:
    """Write a PCI address in full: ``cc:00.0`` of older tools as ``0000:cc:00.0``; None when it is none."""
    match = _PCI_ADDRESS.fullmatch(text.strip().lower()) if isinstance(text, str) else None
    return f"{match[1] or '0000'}:{match[2]}" if match else None


def _natural(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> int | None:
    """A NUMA node, which the tool writes as a string, and as -1 where there is none."""
    text = str(value).strip()
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else None


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
