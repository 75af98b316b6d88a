"""The visibility variables: what to write for a worker, and what a given environment means.

Layers, each of which renumbers from 0 what the one before left over:

1. ROCm's runtime: ``ROCR_VISIBLE_DEVICES`` (ROCm/ROCR-Runtime ``core/runtime/amd_filter_device.cpp``);
2. HIP: ``HIP_VISIBLE_DEVICES``, else ``CUDA_VISIBLE_DEVICES``; OpenCL: ``GPU_DEVICE_ORDINAL`` in the same grammar
   (ROCm/clr ``rocclr/device/rocm/rocdevice.cpp``).

They are habits of the runtime and no isolation: who may open the device nodes is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from anyaccel.kit import FaultError, Mask, fail, warn
from anyaccel.plugin import Device, EnvContext, EnvEdits, Finding

CUDA, ROCR, OPENCL = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
HIP = Mask("HIP_VISIBLE_DEVICES", nothing="-1")
"""``-1`` hides all. The empty text shows all to HIP (ROCm/hip#3001), and hides all from the runtime below."""
WAY = "ANYACCEL_AMD_MASK"
"""Set by people: ``hip`` (the default), or ``rocr`` for programs below HIP, such as OpenMP offloading."""


def edits(absolute: str, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Make a worker see exactly these devices, in this order.

    Indexes, never ids: the partitions of a card may share one id, HIP knows ids only since 6.2, and vLLM reads
    integers only. One layer filters and the others are removed or repeat it, since two absolute masks leave nothing.
    ``absolute`` is the value of :data:`HIP` for the devices.
    """
    way = ctx.environ.get(WAY, "hip")
    if way not in ("hip", "rocr"):
        raise FaultError(f"{WAY} must be 'hip' or 'rocr' (got {way!r})", "unset it for 'hip'")
    rivals = _rivals(devices, ctx)
    if not devices:
        return EnvEdits(set={HIP.variable: absolute, ROCR: "", OPENCL: absolute}, unset=rivals)
    if way == "rocr":
        relative = ",".join(str(number) for number in range(len(devices)))
        # Ray refuses to start where ROCR is set and HIP is not (ray-project/ray#53737).
        return EnvEdits(set={ROCR: absolute, HIP.variable: relative, OPENCL: relative}, unset=rivals)
    return EnvEdits(set={HIP.variable: absolute, OPENCL: absolute}, unset=rivals | {ROCR})


def _rivals(devices: Sequence[Device], ctx: EnvContext) -> frozenset[str]:
    """Take away the variable of another vendor, unless that vendor has a card here: then it is its owner's.

    HIP ignores it beside its own variable. vLLM refuses to start when the two differ, and fills it in where it is not
    set. It is never set here, since two vendors that set one variable differently cannot be given to one worker.
    """
    beside = any(device.attributes.get("beside_cuda") for device in [*ctx.devices, *devices])
    return frozenset() if beside or CUDA not in ctx.environ else frozenset({CUDA})


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Which of the devices that ROCm's runtime numbers a HIP program sees, in its order; None when nothing is hidden.

    Raises:
        FaultError: When the value ends every ROCm program at once.
    """
    rocr, ordinals = environ.get(ROCR), environ.get(HIP.variable) or environ.get(CUDA)
    if rocr is None and not ordinals:
        return None
    left = sorted(devices, key=lambda device: device.index)
    if rocr is not None:
        left = list(_by_runtime(rocr, left))
    if ordinals:  # a repeated entry is skipped, the first wrong one ends the list
        left = list(_by_ordinals(ordinals, left))
    return list(dict.fromkeys(device.id for device in left))


def _by_runtime(value: str, devices: Sequence[Device]) -> Iterator[Device]:
    """Apply ``ROCR_VISIBLE_DEVICES``: the first entry that is wrong, or there already, ends the list."""
    seen = set[str]()
    entries = value.removesuffix(",").split(",") if value else []  # a comma at the end adds no entry
    for entry in entries[: len(devices)]:  # the runtime does not look at more entries than there are devices
        token = entry.strip().upper()
        if not token:
            raise FaultError(
                f"{ROCR} must not hold an empty entry (got {value!r}): the ROCm runtime ends the process on it",
                f"write numbers separated by single commas, or unset {ROCR}",
            )
        device = _by_name(token, devices) if token.startswith("G") else _by_number(token, devices)
        if device is None or device.id in seen:
            return
        seen.add(device.id)
        yield device


def _by_number(token: str, devices: Sequence[Device]) -> Device | None:
    """A number as C's ``strtol`` reads it with base 0: hexadecimal behind 0X, octal behind 0."""
    match = re.fullmatch(r"\+?(0X[0-9A-F]+|0[0-7]*|[1-9][0-9]{0,9})", token)
    if match is None:
        return None
    base = 16 if match[1].startswith("0X") else 8 if match[1].startswith("0") else 10
    number = int(match[1], base)
    return devices[number] if number < len(devices) else None


def _by_name(token: str, devices: Sequence[Device]) -> Device | None:
    """A unique prefix of 5 to 20 characters, in any case. Partitions that share an id cannot be told apart."""
    if not len("GPU-x") <= len(token) <= len("GPU-0123456789abcdef"):
        return None
    found = [d for d in devices if "unique_id" in d.attributes and _unique_name(d).upper().startswith(token)]
    return found[0] if len(found) == 1 else None


def _by_ordinals(value: str, devices: Sequence[Device]) -> Iterator[Device]:
    """Apply HIP's grammar: exact decimals, or a part of a name, of which the first that has it counts."""
    for entry in value.split(","):
        if "GPU-" in entry:
            device = next((device for device in devices if entry in _unique_name(device)), None)
        else:
            exact = re.fullmatch(r"0|[1-9][0-9]{0,9}", entry) is not None and int(entry) < len(devices)
            device = devices[int(entry)] if exact else None
        if device is None:
            return
        yield device


def _unique_name(device: Device) -> str:
    """Name of a device as ROCm's runtime spells it: ``GPU-`` and 16 hexadecimal digits, or ``GPU-XX`` without an id."""
    return f"GPU-{device.attributes.get('unique_id', 'XX')}"


def quarrels(environ: Mapping[str, str], devices: Sequence[Device]) -> Iterator[Finding]:
    """Say which variables do not do what people think, or make programs fail, with devices that have numbers."""
    rocr, hip, cuda = environ.get(ROCR), environ.get(HIP.variable), environ.get(CUDA)
    beside_cuda = any(device.attributes.get("beside_cuda") for device in devices)
    try:
        seen = visible(environ, devices)
    except FaultError:
        return  # a value that is refused is told wherever masks are read
    if rocr is not None and hip is None:
        reason = f"{ROCR} is set and {HIP.variable} is not: Ray refuses to start so (ray-project/ray#53737)"
        yield warn(reason, f"unset {ROCR} and set {HIP.variable} to the same numbers")
    if rocr and hip and hip != HIP.nothing and devices and not seen:
        reason = f"{ROCR}={rocr} and {HIP.variable}={hip} together hide every GPU: HIP counts what ROCR left over"
        yield fail(reason, f"unset {ROCR}")
    if hip == "":
        reason = f"{HIP.variable} is empty, which hides nothing (ROCm/hip#3001)"
        yield warn(reason, f"set {HIP.variable}={HIP.nothing} to hide all GPUs, or unset it")
    if cuda and not hip and beside_cuda:
        reason = f"{CUDA}={cuda} also filters the AMD GPUs, since {HIP.variable} is not set (ollama/ollama#15752)"
        yield warn(reason, f"set {HIP.variable} to the AMD GPUs that are meant")
    if cuda and hip and hip != cuda and not beside_cuda:
        reason = f"{HIP.variable}={hip} and {CUDA}={cuda} differ: HIP uses the first, and vLLM refuses to start"
        yield warn(reason, f"unset {CUDA}")
