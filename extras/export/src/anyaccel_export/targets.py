"""Export targets by name."""

from __future__ import annotations

from enum import Flag, auto
from importlib import import_module
from typing import NamedTuple

from anyaccel_export.source import Export, ExportSource


class Needs(Flag):
    """Input of a target besides the inventory."""

    NOTHING = 0
    CONTAINERS = auto()
    """Container edits, for single devices and together."""
    ENVIRONMENTS = auto()
    """Environment edits for each single device."""
    EVERYTHING = auto()
    """Environment edits for the devices together."""
    NODE = auto()
    """Name of the machine in the cluster."""


class Target(NamedTuple):
    """An export target.

    Attributes:
        summary: The output, in a few words.
        function: Function of the export: ``module:function`` within this package.
        needs: The input.
    """

    summary: str
    function: str
    needs: Needs = Needs.NOTHING


TARGETS = {
    "apptainer": Target("flags for apptainer exec", "apptainer:export", Needs.CONTAINERS),
    "cdi": Target("a Container Device Interface specification", "cdi:export", Needs.CONTAINERS),
    "dask": Target("a script that starts one Dask worker per device", "dask:export", Needs.ENVIRONMENTS | Needs.NODE),
    "docker": Target("flags for docker run", "containers:export", Needs.CONTAINERS),
    "env": Target("export lines for a shell", "shell:export", Needs.EVERYTHING),
    "flux": Target("an entry of Flux's resource.config", "flux:export", Needs.NODE),
    "htcondor": Target("the output of an inventory command of HTCondor", "htcondor:export"),
    "hyperqueue": Target("the command that starts a HyperQueue worker", "hyperqueue:export", Needs.ENVIRONMENTS),
    "kubernetes": Target("ResourceSlices and DeviceClasses of Kubernetes", "kubernetes:export", Needs.NODE),
    "kuberay": Target("a worker group of KubeRay", "ray:kuberay", Needs.NODE),
    "lsf": Target("a section of lsf.cluster", "lsf:resource_map", Needs.NODE),
    "lsf-shared": Target("a section of lsf.shared", "lsf:resources"),
    "nomad": Target("device blocks for a Nomad job", "nomad:export"),
    "pbs": Target("a vnode definition of PBS", "pbs:export", Needs.NODE),
    "podman": Target("flags for podman run", "containers:export", Needs.CONTAINERS),
    "ray": Target("the command that starts a Ray node", "ray:command"),
    "ray-autoscaler": Target("a node type of Ray's cluster launcher", "ray:node_type", Needs.NODE),
    "slurm": Target("lines for Slurm's gres.conf", "slurm:gres_conf", Needs.NODE),
    "slurm-node": Target("lines for slurm.conf", "slurm:node_line", Needs.NODE),
}


def export(target: str, source: ExportSource) -> Export:
    """Write the configuration of a target.

    Args:
        target: A key of :data:`TARGETS`.
        source: The machine, with the input that the target needs.

    Raises:
        AnyaccelError: When the target has no form for this machine.
    """
    module, _, function = TARGETS[target].function.partition(":")
    exported: Export = getattr(import_module(f"anyaccel_export.{module}"), function)(source)
    return exported
