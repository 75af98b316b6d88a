"""The visibility variables: what to write for a worker, and what a given environment means.

Layers, each of which renumbers from 0 what the one before left over:

1. ROCm's runtime: ``ROCR_VISIBLE_DEVICES`` (ROCm/ROCR-Runtime ``core/runtime/amd_filter_device.cpp``);
2. HIP: ``HIP_VISIBLE_DEVICES``, else ``CUDA_VISIBLE_DEVICES``; OpenCL: ``GPU_DEVICE_ORDINAL`` in the same grammar
   (ROCm/clr ``rocclr/device/rocm/rocdevice.cpp``).

They are habits of the runtime and no isolation: who may open the device nodes is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from anyaccel.plugin import Device, EnvContext, EnvEdits

HIP, CUDA, ROCR, OPENCL = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
VARIABLES = (HIP, CUDA, ROCR, OPENCL)
MASK = "ANYACCEL_AMD_MASK"
"""Set by people: ``hip`` (the default), or ``rocr`` for programs below HIP, such as OpenMP offloading."""
NONE = "-1"
"""Hides all. The empty text shows all to HIP (ROCm/hip#3001), and hides all from the runtime below."""


def numbered(devices: Sequence[Device]) -> list[Device]:
    """The devices that ROCm's runtime numbers, in its order."""
    return sorted((d for d in devices if d.attributes.get("numbered", True)), key=lambda device: device.index)


def edits(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Make a worker see exactly these devices, in this order.

    Indexes, never ids: the partitions of a card may share one id, HIP knows ids only since 6.2, and vLLM reads
    integers only. One layer filters and the others are removed or repeat it, since two absolute masks leave nothing.

    Raises:
        ValueError: When a device has no number, or the way to mask is none that we know.
    """
    unnumbered = [device.id for device in devices if not device.attributes.get("numbered", True)]
    if unnumbered:
        raise ValueError(
            f"a device must be numbered by ROCm's runtime to be put into {HIP} (got {', '.join(unnumbered)});"
            " see its health in 'anyaccel status'"
        )
    way = ctx.environ.get(MASK, "hip")
    if way not in ("hip", "rocr"):
        raise ValueError(f"{MASK} must be 'hip' or 'rocr' (got {way!r}); unset it for 'hip'")
    absolute = ",".join(str(device.index) for device in devices)
    rivals = _rivals(devices, ctx)
    if not devices:
        return EnvEdits(set={HIP: NONE, ROCR: "", OPENCL: NONE}, unset=rivals)
    if way == "rocr":
        relative = ",".join(str(number) for number in range(len(devices)))
        # Ray refuses to start where ROCR is set and HIP is not (ray-project/ray#53737).
        return EnvEdits(set={ROCR: absolute, HIP: relative, OPENCL: relative}, unset=rivals)
    return EnvEdits(set={HIP: absolute, OPENCL: absolute}, unset=rivals | {ROCR})


def _rivals(devices: Sequence[Device], ctx: EnvContext) -> frozenset[str]:
    """Take away the variable of another vendor, unless that vendor has a card here: then it is its owner's.

    HIP ignores it beside its own variable. vLLM refuses to start when the two differ, and fills it in where it is not
    set. It is never set here, since two vendors that set one variable differently cannot be given to one worker.
    """
    beside = any(device.attributes.get("beside_cuda") for device in [*ctx.devices, *devices])
    return frozenset() if beside or CUDA not in ctx.environ else frozenset({CUDA})


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Which devices a HIP program sees in an environment, in its order; None when nothing is hidden.

    Raises:
        ValueError: When the value ends every ROCm program at once.
    """
    rocr = environ.get(ROCR)
    ordinals = environ.get(HIP) or environ.get(CUDA)
    if rocr is None and not ordinals:
        return None
    left = numbered(devices)
    if rocr is not None:
        left = _by_runtime(rocr, left)
    if ordinals:
        left = _by_ordinals(ordinals, left)
    return [device.id for device in left]


def unique_name(device: Device) -> str:
    """Name of a device as ROCm's runtime spells it: ``GPU-`` and 16 hexadecimal digits, or ``GPU-XX`` without an id."""
    return f"GPU-{device.attributes.get('unique_id', 'XX')}"


def _by_runtime(value: str, devices: Sequence[Device]) -> list[Device]:
    """Apply ``ROCR_VISIBLE_DEVICES``: the first entry that is wrong, or there already, ends the list."""
    entries = value.split(",")
    if entries[-1] == "":
        entries.pop()  # a comma at the end adds no entry; an empty value has none
    chosen: list[Device] = []
    for entry in entries[: len(devices)]:  # the runtime does not look at more entries than there are devices
        token = entry.strip().upper()
        if not token:
            raise ValueError(
                f"{ROCR} must not hold an empty entry (got {value!r}): the ROCm runtime ends the process on it;"
                " write numbers separated by single commas"
            )
        device = _by_name(token, devices) if token.startswith("G") else _by_number(token, devices)
        if device is None or device in chosen:
            break
        chosen.append(device)
    return chosen


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
    found = [d for d in devices if "unique_id" in d.attributes and unique_name(d).upper().startswith(token)]
    return found[0] if len(found) == 1 else None


def _by_ordinals(value: str, devices: Sequence[Device]) -> list[Device]:
    """Apply HIP's grammar: exact decimals, a repeated entry is skipped, the first wrong one ends the list."""
    entries = value.split(",")
    if entries[-1] == "":
        entries.pop()
    chosen: list[Device] = []
    for entry in entries:
        device = next((d for d in devices if entry in unique_name(d)), None) if "GPU-" in entry else None
        if re.fullmatch(r"0|[1-9][0-9]{0,9}", entry) and int(entry) < len(devices):
            device = devices[int(entry)]
        if device is None:
            break
        if device not in chosen:
            chosen.append(device)
    return chosen
