"""Plug-ins of vendors that list the same devices, or use the same names, as their authors would write them."""

from collections.abc import Sequence

SOURCE = """
from anyaccel.plugin import Detected, Device, EnvEdits, Fractional, PluginInfo, Product, hookimpl


@hookimpl
def anyaccel_info():
    return PluginInfo(
        vendor={vendor!r}, resource={resource!r}, kind="card", env_vars=({mask!r},), control_nodes={control_nodes!r}
    )


@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=({devices}))


@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED


@hookimpl
def anyaccel_tags(device):
    return {tags!r}


@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={{{mask!r}: ",".join(device.id for device in devices)}})


@hookimpl
def anyaccel_products():
    return [Product(name=name, model=name, aliases=tuple(aliases)) for name, *aliases in {products!r}]
"""


def plugin(
    vendor: str,
    *devices: str,
    resource: str = "",
    tags: Sequence[str] = (),
    products: Sequence[Sequence[str]] = (),
    control_nodes: Sequence[str] = (),
) -> str:
    """Write a plug-in.

    Args:
        vendor: Key of the vendor.
        devices: The fields of each device beside index and model, such as ``id="a", pci_bus_id="0000:c1:00.0"``.
        resource: Resource name; the key in capitals when empty.
        tags: Tags of every device.
        products: Name and aliases of each product.
        control_nodes: Nodes that all devices use.
    """
    return SOURCE.format(
        vendor=vendor,
        resource=resource or vendor.upper(),
        mask=f"{vendor.upper()}_VISIBLE",
        devices="".join(f"Device(index={index}, model='Card', {fields}), " for index, fields in enumerate(devices)),
        tags=tuple(tags),
        products=[tuple(each) for each in products],
        control_nodes=tuple(control_nodes),
    )
