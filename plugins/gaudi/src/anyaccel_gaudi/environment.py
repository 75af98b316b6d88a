"""The variables by which a process finds its devices, written and read the way Intel's PyTorch bridge reads them.

What the bridge does (HabanaAI/gaudi-pytorch-bridge, ``synapse_helpers/device.cpp``, ``torch/hpu/_utils.py`` and
``distributed/hccl``):

- A process that has ``HLS_MODULE_ID`` acquires that module. If it cannot, it fails when ``HABANA_VISIBLE_MODULES`` is
  set, and takes any free device when it is not.
- A process without ``HLS_MODULE_ID`` takes the first free device of the machine, whatever ``HABANA_VISIBLE_MODULES``
  says, unless it is one of several ranks: then it takes the entry of the list at its local rank.

So the list alone does not confine a job of one process, and a device of one's own needs both variables.
``HABANA_VISIBLE_DEVICES`` is read by the container runtime alone and means node numbers: no process ever looks at it
(HabanaAI/Model-References#25).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from anyaccel.plugin import ContainerEdits, Device, EnvEdits, Mount

from anyaccel_gaudi.modules import module_id

VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
MODULE_ID = "HLS_MODULE_ID"
CONTAINER_DEVICES = "HABANA_VISIBLE_DEVICES"

NO_MODULE = 999
"""Module id of no device. The runtime has no value for "none" and takes an empty list for all or for an error; naming
a module that does not exist makes it fail to acquire, and the list keeps it from falling back to a free device."""

_ENTRY = re.compile(r"\s*([+-]?\d+)\s*")


def mask(devices: Sequence[Device]) -> EnvEdits:
    """Make a worker see exactly these devices; position in the list is the local rank.

    Raises:
        ValueError: When a device cannot be named, or is named twice.
    """
    modules = [module_id(device) for device in devices]
    if None in modules:
        nameless = devices[modules.index(None)].id
        raise ValueError(f"{VISIBLE_MODULES} takes module ids, and that of {nameless} is unknown; leave the device out")
    if len(set(modules)) != len(modules):
        raise ValueError(f"{VISIBLE_MODULES} must name each module once (got {modules}); pass each device once")
    if not modules:
        return EnvEdits(set={VISIBLE_MODULES: str(NO_MODULE), MODULE_ID: str(NO_MODULE)})
    if len(modules) == 1:
        return EnvEdits(set={VISIBLE_MODULES: str(modules[0]), MODULE_ID: str(modules[0])})
    # Every rank of the job must get another module, so a module inherited from outside would put all on one device.
    return EnvEdits(set={VISIBLE_MODULES: ",".join(map(str, modules))}, unset=frozenset({MODULE_ID}))


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Say which devices an environment leaves to a process and its children.

    Entries that name no device here are skipped, since their ranks fail; a repeated entry counts once. A module id
    of the process itself narrows the list to that module.

    Returns:
        Ids in the order of the list; None when neither variable is set.

    Raises:
        ValueError: When the runtime would refuse the value.
    """
    listed = _modules(environ, VISIBLE_MODULES)
    own = _modules(environ, MODULE_ID)
    if own is not None and len(own) != 1:
        raise ValueError(f"{MODULE_ID} must be one module id (got {environ[MODULE_ID]!r}); unset it")
    if own and listed is not None and own[0] not in listed:
        raise ValueError(
            f"{MODULE_ID} must be one of {VISIBLE_MODULES}"
            f" (got {environ[MODULE_ID]!r} and {environ[VISIBLE_MODULES]!r}); unset {MODULE_ID}"
        )
    wanted = listed if own is None else own
    if wanted is None:
        return None
    ids = {module: device.id for device in devices if (module := module_id(device)) is not None}
    return [ids[module] for module in dict.fromkeys(wanted) if module in ids]


def container(devices: Sequence[Device]) -> ContainerEdits:
    """Say what a container needs: node numbers for the container runtime, module ids for what runs inside.

    One device needs no module id inside, since no other can be opened there; some programs refuse one that is not
    below the number of devices that they see (vllm-project/vllm-gaudi#946, lifted by #1096). To the container
    runtime an unset or empty list means all devices, and only ``none`` means none.
    """
    numbers = ",".join(str(device.attributes.get("accel", device.index)) for device in devices)
    env = {CONTAINER_DEVICES: numbers or "none"}
    if len(devices) > 1:
        env[VISIBLE_MODULES] = mask(devices).set[VISIBLE_MODULES]
    addresses = {str(path) for device in devices if (path := device.attributes.get("gaudinet"))}
    return ContainerEdits(
        nodes=tuple(dict.fromkeys(node for device in devices for node in device.nodes)),
        mounts=tuple(Mount(source=path, target=path) for path in sorted(addresses)),
        env=env,
    )


def _modules(environ: Mapping[str, str], name: str) -> list[int] | None:
    """Read a list of module ids the way the runtime does: blanks around a number are fine, nothing else is."""
    text = environ.get(name)
    if text is None:
        return None
    entries = [_ENTRY.fullmatch(part) for part in text.split(",")]
    if None in entries:
        raise ValueError(f"{name} must be module ids such as '0,1' (got {text!r}); unset it to see every HPU")
    return [int(entry[1]) for entry in entries if entry]
