"""The visibility variables: written for a worker, and read from an environment.

Layers, each of which renumbers the remaining devices from 0:

1. ROCm's runtime: ``ROCR_VISIBLE_DEVICES`` (ROCm/ROCR-Runtime ``core/runtime/amd_filter_device.cpp``); 2. HIP:
``HIP_VISIBLE_DEVICES``, else ``CUDA_VISIBLE_DEVICES``; OpenCL: ``GPU_DEVICE_ORDINAL`` in the same grammar (ROCm/clr
``rocclr/device/rocm/rocdevice.cpp``).

They are conventions of the runtime, not isolation: permission to open the device nodes is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import FaultError, Ids, Mask, Numbers, c_integer, fail, warn
from anyaccel.plugin import Device, EnvContext, EnvEdits, Finding, replace

CUDA, ROCR, OPENCL = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


def _unique_name(device: Device) -> str:
    """Return the name of a device in ROCm's runtime: ``GPU-`` and 16 hexadecimal digits; ``GPU-XX`` without an id."""
    return f"GPU-{device.attributes.get('unique_id', 'XX')}"


HIP = Mask(
    "HIP_VISIBLE_DEVICES",
    Numbers(pattern="0|[1-9][0-9]{0,9}"),
    Ids(_unique_name, pattern=".*GPU-.*", part=True),
    nothing="-1",
    malformed="stop",
    unknown="stop",
    blanks=False,
)
"""``-1`` hides every GPU. An empty value hides none from HIP (ROCm/hip#3001), and every GPU from the runtime below."""
RUNTIME = Mask(
    ROCR,
    Numbers(pattern=r"\+?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]{0,9})", value=c_integer),
    Ids(  # partitions may share an id, and GPUs without an id have no name here
        lambda device: _unique_name(device) if "unique_id" in device.attributes else "",
        pattern="G.*",
        shortest=len("GPU-x"),
        case=False,
    ),
    malformed="stop",
    blank="error",
    unknown="stop",
    repeated="stop",
    entries="numbers or ids between single commas, since the ROCm runtime ends the process on an empty entry",
    remedy=f"write numbers separated by single commas, or unset {ROCR}",
)
WAY = "ANYACCEL_AMD_MASK"
"""Set by users: ``hip`` (the default), or ``rocr`` for programs below HIP, such as OpenMP offloading."""


def edits(absolute: str, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Make a worker see exactly these devices, in this order.

    Indexes, never ids: the partitions of a card may share an id, HIP accepts ids only since 6.2, and vLLM reads
    integers only. One layer filters and the other layers are unset or repeat it, since two absolute masks leave
    nothing. ``absolute`` is the value of :data:`HIP` for the devices.
    """
    way = ctx.environ.get(WAY, "hip")
    if way not in ("hip", "rocr"):
        raise FaultError(f"{WAY} must be 'hip' or 'rocr' (got {way!r})", "unset it for 'hip'")
    rivals = _rivals(devices, ctx)
    if not devices:
        return EnvEdits(set={HIP.variable: absolute, ROCR: "", OPENCL: absolute}, unset=rivals)
    if way == "rocr":
        # HIP counts what the runtime below has left over, from 0.
        relative = ",".join(str(number) for number in range(len(devices)))
        # Ray refuses to start where ROCR is set and HIP is not (ray-project/ray#53737).
        return EnvEdits(set={ROCR: absolute, HIP.variable: relative, OPENCL: relative}, unset=rivals)
    return EnvEdits(set={HIP.variable: absolute, OPENCL: absolute}, unset=rivals | {ROCR})


def _rivals(devices: Sequence[Device], ctx: EnvContext) -> frozenset[str]:
    """Return CUDA's variable to unset, unless NVIDIA has a card on this machine and owns the variable.

    HIP ignores it beside its own variable. vLLM refuses to start if the two differ, and sets it if unset. It is never
    set here, since two vendors with different values for a variable cannot share a worker.
    """
    # "ctx.devices" may lack AMD's devices on a worker without any.
    beside = any(device.attributes.get("beside_cuda") for device in [*ctx.devices, *devices])
    return frozenset() if beside or CUDA not in ctx.environ else frozenset({CUDA})


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Return the devices visible to a HIP program, in its order; None if nothing is hidden.

    Raises:
        FaultError: The value ends every ROCm program at once.
    """
    rocr, ordinals = environ.get(ROCR), environ.get(HIP.variable) or environ.get(CUDA)
    if rocr is None and not ordinals:
        return None
    # The layers number what is left, so each mask is read against fresh indexes.
    left = _renumbered(sorted(devices, key=lambda device: device.index))
    if rocr is not None:
        # A comma at the end adds no entry, and the runtime looks at no more entries than there are devices.
        entries = rocr.removesuffix(",").split(",")[: len(left)]
        if rocr and left and not entries[0].strip():
            raise RUNTIME.refusal(rocr)
        left = _renumbered(RUNTIME.read({ROCR: ",".join(entries)}, left) or ())
    if ordinals:
        left = HIP.read({HIP.variable: ordinals}, left) or []
    return [device.id for device in left]


def _renumbered(devices: Iterable[Device]) -> list[Device]:
    return [device if device.index == index else replace(device, index=index) for index, device in enumerate(devices)]


def conflicts(environ: Mapping[str, str], devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield findings on variables that contradict each other or do not work as expected."""
    rocr, hip, cuda = environ.get(ROCR), environ.get(HIP.variable), environ.get(CUDA)
    beside_cuda = any(device.attributes.get("beside_cuda") for device in devices)
    try:
        seen = visible(environ, devices)
    except FaultError:
        return  # the core reports a mask that is refused
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
