"""The visibility variables: what to write for a worker, and what a given environment means.

Layers, each of which renumbers from 0 what the one before left over:

1. ROCm's runtime: ``ROCR_VISIBLE_DEVICES`` (ROCm/ROCR-Runtime ``core/runtime/amd_filter_device.cpp``);
2. HIP: ``HIP_VISIBLE_DEVICES``, else ``CUDA_VISIBLE_DEVICES``; OpenCL: ``GPU_DEVICE_ORDINAL`` in the same grammar
   (ROCm/clr ``rocclr/device/rocm/rocdevice.cpp``).

They are habits of the runtime and no isolation: who may open the device nodes is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import FaultError, Ids, Mask, Numbers, c_integer, fail, warn
from anyaccel.plugin import Device, EnvContext, EnvEdits, Finding, replace

CUDA, ROCR, OPENCL = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


def _unique_name(device: Device) -> str:
    """Name of a device as ROCm's runtime spells it: ``GPU-`` and 16 hexadecimal digits, or ``GPU-XX`` without an id."""
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
"""``-1`` hides all. The empty text shows all to HIP (ROCm/hip#3001), and hides all from the runtime below."""
RUNTIME = Mask(
    ROCR,
    Numbers(pattern=r"\+?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]{0,9})", value=c_integer),
    Ids(  # partitions that share an id cannot be told apart, and GPUs without one have no name here
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
