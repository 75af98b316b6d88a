"""How much a GPU has: memory and tiles, by the files of its driver first."""

from __future__ import annotations

from anyaccel.plugin import PciFunction, ProbeContext

from anyaccel_intel.drivers import PCI
from anyaccel_intel.products import BY_ID, GIB


def memory_of(function: PciFunction, physical: str | None, ctx: ProbeContext) -> int | None:
    """Memory of a card: what its driver says, else what the product has. The size of a PCI window is no measure."""
    path = f"{PCI}/{function.address}"
    tiles = [number(ctx, each) for each in ctx.glob(f"{path}/tile*/vram0/total_bytes")]
    local = [number(ctx, each) for each in ctx.glob(f"{path}/drm/card*/lmem_total_bytes")]
    told = sum(size for size in (tiles or local) if size)
    model = BY_ID.get(function.device)
    if told:
        return told
    if physical:
        return _quota(function, physical, ctx)
    return model.memory_gib[0] * GIB if model and len(model.memory_gib) == 1 else None


def _quota(function: PciFunction, physical: str, ctx: ProbeContext) -> int | None:
    """Memory that a virtual function was given, by the files of its physical function."""
    for link in ctx.glob(f"{PCI}/{physical}/virtfn*"):
        if (ctx.readlink(link) or "").rpartition("/")[2].lower() == function.address:
            which = int(link.rpartition("virtfn")[2]) + 1
            quotas = ctx.glob(f"{PCI}/{physical}/drm/card*/prelim_iov/vf{which}/gt*/lmem_quota")
            return sum(number(ctx, quota) or 0 for quota in quotas) or None
    return None


def tiles_of(function: PciFunction, integrated: bool, ctx: ProbeContext) -> int:
    """Tiles of a card. An integrated GPU has one; its second ``gt`` is for media."""
    if integrated:
        return 1
    path = f"{PCI}/{function.address}"
    shown = ctx.glob(f"{path}/tile[0-9]*") or ctx.glob(f"{path}/drm/card*/gt/gt[0-9]*")
    model = BY_ID.get(function.device)
    return len(shown) or (model.tiles if model else 1)


def number(ctx: ProbeContext, path: str) -> int | None:
    """Read a file that must hold a number that is not negative; None when there is no such file.

    Raises:
        ValueError: When something else is in it.
    """
    text = ctx.read(path)
    if text is None:
        return None
    if not text.strip().isdigit():
        raise ValueError(f"{path} must hold a number (got {text.strip()[:40]!r})")
    return int(text)
