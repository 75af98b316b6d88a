"""Slices: what an accelerator type such as ``v6e-16`` says about chips, hosts and topology.

The shapes are those of the Cloud TPU documentation. The number of a type counts TensorCores for v2, v3, v4, v5p and
tpu7x, and chips for v5e and v6e.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.plugin import Device

from anyaccel_tpu.products import GENERATIONS, Generation

_TYPE = re.compile(r"(v|tpu)(\d+[a-z]*)-([1-9]\d*)", re.IGNORECASE)
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_CHIPS_PER_VM = 4
_CUBE = 64
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_FLAT_V3 = {512: "16x32", 1024: "32x32"}
_SOLID = {
    1: "1x1x1",
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceShape:
    """The shape of a slice.

    Attributes:
        chips: Chips of all hosts together.
        hosts: Virtual machines.
        topology: Grid of the chips such as ``2x2x4``; None where the number of chips leaves several.
    """

    chips: int
    hosts: int
    topology: str | None


def parse_type(text: str) -> tuple[Generation, int]:
    """Split an accelerator type into its generation and the number behind the dash.

    Both ``tpu7x-8`` (Google) and ``v7x-8`` (Ray), both ``v5litepod-4`` and ``v5e-4`` are understood.

    Raises:
        ValueError: When it is no accelerator type of a known generation.
    """
    match = _TYPE.fullmatch(text.strip())
    key = f"v{match[2].lower()}" if match else ""
    generation = GENERATIONS.get("v5litepod" if key == "v5e" else key)
    if match is None or generation is None:
        raise ValueError(
            f"a TPU accelerator type must be GENERATION-NUMBER with one of {', '.join(GENERATIONS)} (got {text!r});"
            " write for example v4-8, v6e-16 or tpu7x-8"
        )
    return generation, int(match[3])


def pod_type(text: str) -> str:
    """Write an accelerator type as Ray does in its resources and labels: ``tpu7x-16`` becomes ``v7x-16``.

    Raises:
        ValueError: When it is no accelerator type of a known generation.
    """
    generation, number = parse_type(text)
    return f"{generation.key}-{number}"


def slice_shape(accelerator_type: str, chips_per_vm: int | None = None) -> SliceShape:
    """Work out chips, hosts and topology of an accelerator type.

    Args:
        accelerator_type: For example ``v5p-128``.
        chips_per_vm: Chips of one host where known. It decides between one host of 8 chips and two hosts of 4, which
            the type ``v6e-8`` leaves open; without it, 8 chips of v5e and v6e are one host.

    Raises:
        ValueError: When no slice of that type can exist; the message says which rule it breaks.
    """
    generation, number = parse_type(accelerator_type)
    if generation.cores is None or generation.max_chips is None:
        raise ValueError(f"the slices of {generation.model} are not published (got {accelerator_type!r})")
    chips, rest = divmod(number, generation.cores)
    if rest:
        raise ValueError(
            f"the number of a {generation.key} type counts TensorCores, {generation.cores} per chip, and must be a"
            f" multiple of that (got {accelerator_type!r})"
        )
    _check_size(accelerator_type, generation, chips)
    per_vm = chips_per_vm or max(generation.counts)
    if chips > per_vm and chips_per_vm is None:
        per_vm = _CHIPS_PER_VM
    if chips > per_vm and chips % per_vm:
        raise ValueError(
            f"a slice of several hosts must have a multiple of {per_vm} chips (got {accelerator_type!r}: {chips})"
        )
    if chips <= per_vm and chips not in generation.counts:
        raise ValueError(
            f"one host of {generation.model} has {', '.join(map(str, generation.counts))} chips"
            f" (got {accelerator_type!r}: {chips})"
        )
    return SliceShape(chips=chips, hosts=max(1, chips // per_vm), topology=_topology(generation, chips))


def _check_size(accelerator_type: str, generation: Generation, chips: int) -> None:
    if generation.max_chips is not None and chips > generation.max_chips:
        raise ValueError(
            f"a slice of {generation.model} has at most {generation.max_chips} chips"
            f" (got {accelerator_type!r}: {chips})"
        )
    if generation.dimensions == 3 and chips > _CUBE and chips % _CUBE:  # noqa: PLR2004
        raise ValueError(
            f"a slice of {generation.model} above 64 chips must be whole 4x4x4 cubes, a multiple of 64 chips"
            f" (got {accelerator_type!r}: {chips})"
        )


def _topology(generation: Generation, chips: int) -> str | None:
    if generation.dimensions == 3:  # noqa: PLR2004
        return _SOLID.get(chips)
    return (_FLAT | _FLAT_V3).get(chips) if generation.key == "v3" else _FLAT.get(chips)


def is_topology(text: str) -> bool:
    """Whether a text is a grid of chips such as ``4x4`` or ``2x2x2``."""
    return _TOPOLOGY.fullmatch(text) is not None


def ray_resources(devices: tuple[Device, ...]) -> Mapping[str, float]:
    """Extra resources that Ray gives a host of a slice, beside ``TPU`` itself.

    The slice's name counts 1 on every host, the head resource 1 on worker 0 alone. As in Ray, name, worker and type
    must all be known; else there is none.

    Args:
        devices: The chips of this host.
    """
    facts = devices[0].attributes if devices else {}
    if not {"slice_name", "worker_id", "pod_type"} <= facts.keys():
        return {}
    head = {f"TPU-{facts['pod_type']}-head": 1.0} if facts["worker_id"] == 0 else {}
    return {str(facts["slice_name"]): 1.0, **head}


def ray_labels(devices: tuple[Device, ...]) -> Mapping[str, str]:
    """Labels that Ray gives the node of a TPU host, those of them that are known."""
    facts = devices[0].attributes if devices else {}
    names = {
        "ray.io/tpu-slice-name": "slice_name",
        "ray.io/tpu-worker-id": "worker_id",
        "ray.io/tpu-topology": "topology",
        "ray.io/tpu-pod-type": "pod_type",
    }
    return {label: str(facts[name]) for label, name in names.items() if name in facts}
