"""The variables of the Neuron runtime, and the sets of cores that it accepts.

Sources: "Neuron Runtime configuration" and the ``nrt`` developer guide of the AWS Neuron documentation;
aws-neuron-sdk#1024 for lists and ranges in one value; optimum-neuron#619 for the sizes that collectives run on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from anyaccel.plugin import ContainerEdits, Device, EnvEdits, Term

from anyaccel_neuron.products import chip_index, cores_per_chip, family_of

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
NUM_CORES = "NEURON_RT_NUM_CORES"
LNC_CONFIG = "NEURON_LOGICAL_NC_CONFIG"
LNC_CONFIG_OLD = "NEURON_RT_VIRTUAL_CORE_SIZE"

ENV_VARS = (VISIBLE_CORES, NUM_CORES, LNC_CONFIG, LNC_CONFIG_OLD)

NO_CORE = 65535
"""A core that no machine has. The runtime documents no value for "none" and without a value takes every core of the
machine, so hiding must not rest on what it makes of an empty one; a core that is not there it refuses."""

_ITEM = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?")


def env(devices: Sequence[Device]) -> EnvEdits:
    """Write the mask: increasing core ids as a comma list, which every reader of the variable understands.

    Raises:
        ValueError: When the cores are not one contiguous run, which the runtime refuses.
    """
    cores = sorted(device.index for device in devices)
    unset = {NUM_CORES}
    if not cores:
        return EnvEdits(set={VISIBLE_CORES: str(NO_CORE)}, unset=frozenset(unset))
    reason = _not_contiguous(cores)
    if reason:
        raise ValueError(reason)
    values = {VISIBLE_CORES: ",".join(map(str, cores))}
    family = family_of(devices[0])
    if family and len(family.lncs) > 1 and "lnc" in devices[0].attributes:
        # Core ids count logical cores: they mean other hardware where the worker is configured differently.
        values[LNC_CONFIG] = str(devices[0].attributes["lnc"])
        unset.add(LNC_CONFIG_OLD)
    return EnvEdits(set=values, unset=frozenset(unset))


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[str, ...] | None:
    """Say which cores an environment leaves visible; ``NEURON_RT_VISIBLE_CORES`` wins over ``NEURON_RT_NUM_CORES``.

    An empty value counts as "none": nobody documents what the runtime makes of it, and only narrowing is safe.
    ``NEURON_RT_NUM_CORES`` leaves the choice of cores to the runtime; the lowest ones stand for them.

    Raises:
        ValueError: For a value that the runtime refuses.
    """
    in_order = sorted(devices, key=lambda device: device.index)
    value = environ.get(VISIBLE_CORES)
    if value is not None:
        if value.strip() in ("", str(NO_CORE)):
            return ()
        ids = {device.index: device.id for device in in_order}
        cores = parse_cores(value)
        unknown = [core for core in cores if core not in ids]
        if unknown:
            known = f"0-based ids {_runs(list(ids))}" if ids else "none"
            raise ValueError(f"{VISIBLE_CORES}={value!r} names core {unknown[0]}, this machine has {known}; correct it")
        return tuple(ids[core] for core in cores)
    number = environ.get(NUM_CORES, "").strip()
    if not number:
        return None
    # A list gives the sizes of groups of cores (AWS Neuron application note on parallel execution, Inf1).
    if not re.fullmatch(r"[0-9]{1,5}(\s*,\s*[0-9]{1,5})*", number):
        raise ValueError(f"{NUM_CORES} must be a number of cores, 0 for all (got {number!r}); correct or unset it")
    count = sum(map(int, number.split(",")))
    if count > len(in_order):
        raise ValueError(f"{NUM_CORES}={number} is more than the {len(in_order)} cores of this machine; lower it")
    return tuple(device.id for device in in_order[:count]) if count else None


def parse_cores(value: str) -> list[int]:
    """Read a value of ``NEURON_RT_VISIBLE_CORES``: ids and ranges, separated by commas: ``0``, ``0-3``, ``3-5,6``.

    Raises:
        ValueError: When it is malformed or not one contiguous increasing run, as the runtime demands.
    """
    cores: list[int] = []
    for item in value.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"{VISIBLE_CORES} must list core ids and ranges such as 0,1 or 0-3 (got {value!r})")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{VISIBLE_CORES}={value!r}: the range {item.strip()} runs backward; write {last}-{first}")
        cores += range(first, last + 1)
    reason = _not_contiguous(cores)
    if reason:
        raise ValueError(f"{VISIBLE_CORES}={value!r}: {reason}")
    return cores


def validate(term: Term, devices: Sequence[Device]) -> str | None:
    """Say why the runtime cannot serve a term with exactly these cores.

    Every chip: whole cores, in one contiguous run. On Trainium collectives also want either cores of one chip, or a
    power of two that starts at a multiple of itself: such runs are pairs, rows and squares of the torus.
    """
    if term.fraction:
        return (
            "a NeuronCore belongs to one process and programs are compiled for whole cores, so it cannot be shared:"
            f" ask for a whole number of cores (got {term.units / 10_000:g})"
        )
    cores = sorted(device.index for device in devices)
    reason = _not_contiguous(cores)
    if reason or not cores:
        return reason
    family = family_of(devices[0])
    count, per_chip = len(cores), cores_per_chip(devices[0])
    one_chip = chip_index(min(devices, key=_index)) == chip_index(max(devices, key=_index))
    if family is None or not family.trainium or one_chip:
        return None
    if count & (count - 1):
        return f"{family.device_name} takes 1 to {per_chip} cores of one chip, or a power of two of them (got {count})"
    if cores[0] % count:
        return f"{count} cores of {family.device_name} must begin at a multiple of {count} (got cores {_runs(cores)})"
    return None


def container(devices: Sequence[Device]) -> ContainerEdits:
    """List the nodes of the chips that hold the cores: a chip is what can be mounted, and there is no node for all."""
    nodes = [node for device in devices for node in device.nodes or (f"/dev/neuron{chip_index(device)}",)]
    return ContainerEdits(nodes=tuple(dict.fromkeys(nodes)))


def _index(device: Device) -> int:
    return device.index


def _not_contiguous(cores: Sequence[int]) -> str | None:
    """Why the runtime would refuse these ids in this order, or None."""
    if all(after == core + 1 for core, after in pairwise(cores)):
        return None
    return f"the Neuron runtime takes one contiguous, increasing run of cores such as 4-7 (got {_runs(cores)})"


def _runs(cores: Sequence[int]) -> str:
    """Write core ids as ranges: ``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
