"""Which sets of chips a process may hold, and the variables that make libtpu see exactly those.

The bounds are those that Ray (``_private/accelerators/tpu.py``), JAX (``test_multiprocess.py``) and vLLM's
tpu-inference use. Both names of a pair of variables are set to the same value: libtpu reads both, and a stale value
under the other name would survive otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from anyaccel.plugin import Device, EnvContext, EnvEdits

from anyaccel_tpu.products import by_key

MASKS = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
PATHS = "TPU_VISIBLE_DEVICE_PATHS"
CHIP_BOUNDS = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
PROCESS_BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
_ALONE = {"CLOUD_TPU_TASK_ID": "0", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
_PORTS = ("TPU_PROCESS_PORT", "TPU_PROCESS_ADDRESSES", "TPU_RUNTIME_METRICS_PORTS")
SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
# GKE's second spelling of the bounds, and what ties a host to other slices: a process with a part of a host is in none.
_RIVALS = (
    "CHIPS_PER_HOST_BOUNDS",
    "HOST_BOUNDS",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_PORT",
    "MEGASCALE_SLICE_ID",
)
_SLICE = (*CHIP_BOUNDS, *PROCESS_BOUNDS, *_ALONE, *_PORTS, SKIP_METADATA)
ENV_VARS = (*MASKS, PATHS, *_SLICE, *_RIVALS)

PROCESS_PORT = 8471
"""First port of libtpu's processes, as Google's recipes have it; 8482 is JAX's and must stay free."""
METRICS_PORT = 8431
"""First port on which libtpu serves its metrics."""

_COUNTS = (1, 2, 4, 8)
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "1,4,1"}


def host_chips(devices: Sequence[Device]) -> int:
    """Chips of the host on which these are: all of them are linked to each other, so each one names the rest."""
    return max(len({device.id, *device.links}) for device in devices)


def refusal(devices: Sequence[Device]) -> str | None:
    """Say why no process can hold exactly these chips, or None when one can.

    The rules come from Ray (1, 2, 4 or 8 chips), JAX (pairs of a host of 4) and vLLM's tpu-inference (halves of 8).
    """
    count, total = len(devices), host_chips(devices) if devices else 0
    if count and count not in _COUNTS:
        return f"a process takes 1, 2, 4 or 8 chips of a TPU host, never {count}: they must form a rectangle"
    return None if count == total else _partly(devices, total)


def _partly(devices: Sequence[Device], total: int) -> str | None:
    """Say why no process can hold these chips of a host with more."""
    count, indexes = len(devices), sorted(device.index for device in devices)
    generation = by_key(devices[0].attributes.get("generation"))
    if generation is not None and not generation.counts:
        return f"the bounds of {generation.model} are not published: take all {total} chips of the host"
    if count > 1 and (count, total) not in ((2, 4), (4, 8)):
        legal = {2: "1 or 2 chips", 4: "1, 2 or 4 chips", 8: "1, 4 or 8 chips"}.get(total, "1 chip")
        return f"a process takes {legal} of a TPU host with {total}, not {count}"
    start = indexes[0]
    if start % count or indexes != list(range(start, start + count)):
        sets = " or ".join(_csv(range(first, first + count)) for first in range(0, total, count))
        return f"{count} chips of a TPU host with {total} must be {sets} (got {_csv(indexes)})"
    return None


def edits(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Make libtpu see exactly these chips.

    Chips are named in ascending order whatever the order of ``devices``: the runtime numbers them by their place in
    the grid.

    Raises:
        ValueError: When no process can hold exactly these chips.
    """
    if not devices:
        return _nothing()
    reason = refusal(devices)
    if reason:
        raise ValueError(reason)
    if {device.id for device in devices} >= {device.id for device in ctx.devices}:
        return _everything(len(devices), ctx.environ)
    return _part(sorted(device.index for device in devices), devices[0], len(devices))


def _part(indexes: Sequence[int], device: Device, count: int) -> EnvEdits:
    """A process of its own with some chips of the host, apart from every slice."""
    port = PROCESS_PORT + indexes[0]
    variables = {
        **dict.fromkeys(MASKS, _csv(indexes)),
        **dict.fromkeys(CHIP_BOUNDS, _BOUNDS[count]),
        **dict.fromkeys(PROCESS_BOUNDS, "1,1,1"),
        **_ALONE,
        "TPU_PROCESS_PORT": str(port),
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_RUNTIME_METRICS_PORTS": str(METRICS_PORT + indexes[0]),
    }
    hosts = device.attributes.get("slice_hosts", 1)
    if isinstance(hosts, int) and hosts > 1:
        # The metadata server would tell libtpu about the other hosts, and it would wait for them (pytorch/xla#7714).
        variables[SKIP_METADATA] = "1"
    return EnvEdits(set=variables, unset=frozenset({PATHS, *_RIVALS}))


def _everything(count: int, environ: Mapping[str, str]) -> EnvEdits:
    """The whole host: nothing may restrict it, and what GKE says about the slice must stay.

    Bounds of fewer chips than the host has are left-overs of a process with a part of it (Ray reuses workers); then
    all that came with them goes too.
    """
    restricted = any(_fewer(environ.get(name, ""), count) for name in CHIP_BOUNDS)
    stale = (name for name in _SLICE if restricted or name not in environ)
    return EnvEdits(unset=frozenset({*MASKS, PATHS, *stale}))


def _nothing() -> EnvEdits:
    return EnvEdits(set=dict.fromkeys(MASKS, ""), unset=frozenset({PATHS}))


def _fewer(bounds: str, count: int) -> bool:
    parts = bounds.split(",")
    return all(part.strip().isdecimal() for part in parts) and prod(int(part) for part in parts) < count


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Say which chips an environment leaves visible.

    Paths of nodes win over numbers, the newer name over the older one, and an empty value is as good as none where the
    other name has one. Numbers are the host's own; a number without a chip shows nothing; the order of a mask does not
    count.

    Returns:
        Ids in the order of the chips' indexes; None when no variable restricts them.

    Raises:
        ValueError: When a mask holds something else than numbers.
    """
    in_order = sorted(devices, key=lambda device: device.index)
    paths = {path.strip() for path in environ.get(PATHS, "").split(",") if path.strip()}
    if paths:
        return [device.id for device in in_order if paths & set(device.nodes)]
    name = next((name for name in MASKS if environ.get(name, "").strip()), None)
    if name is None:
        return [] if any(name in environ for name in MASKS) else None
    parts = [part.strip() for part in environ[name].split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"{name} must be chip numbers separated by commas, such as 0,1 (got {environ[name]!r})")
    wanted = {int(part) for part in parts}
    return [device.id for device in in_order if device.index in wanted]


def _csv(indexes: Sequence[int]) -> str:
    return ",".join(map(str, indexes))
