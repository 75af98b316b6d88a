"""The targets that an inventory can be exported to."""

from __future__ import annotations

from enum import Flag, auto
from importlib import import_module

from anyaccel.exports.source import Export, Source
from anyaccel.model import Value


class Needs(Flag):
    """What a target is made of besides the inventory."""

    NOTHING = 0
    CONTAINERS = auto()
    """What containers need, alone and together."""
    ENVIRONMENTS = auto()
    """The environment for each device."""
    EVERYTHING = auto()
    """The environment for all devices."""
    NODE = auto()
    """The name under which a cluster knows the machine."""


class Target(Value):
    """One target.

    Attributes:
        summary: What is written, in a few words.
        function: Where it is written: ``module:function`` within this package.
        needs: What it is made of.
    """

    summary: str
    function: str
    needs: Needs = Needs.NOTHING


TARGETS = {
    "apptainer": Target(summary="flags for apptainer exec", function="apptainer:export", needs=Needs.CONTAINERS),
    "cdi": Target(summary="a Container Device Interface specification", function="cdi:export", needs=Needs.CONTAINERS),
    "dask": Target(
        summary="a script that starts one Dask worker per device",
        function="dask:export",
        needs=Needs.ENVIRONMENTS | Needs.NODE,
    ),
    "docker": Target(summary="flags for docker run", function="containers:export", needs=Needs.CONTAINERS),
    "env": Target(summary="export lines for a shell", function="shell:export", needs=Needs.EVERYTHING),
    "flux": Target(summary="an entry of Flux's resource.config", function="flux:export", needs=Needs.NODE),
    "htcondor": Target(summary="what an inventory command of HTCondor prints", function="htcondor:export"),
    "hyperqueue": Target(
        summary="the command that starts a HyperQueue worker", function="hyperqueue:export", needs=Needs.ENVIRONMENTS
    ),
    "kubernetes": Target(
        summary="ResourceSlices and DeviceClasses of Kubernetes", function="kubernetes:export", needs=Needs.NODE
    ),
    "kuberay": Target(summary="a worker group of KubeRay", function="ray:kuberay", needs=Needs.NODE),
    "lsf": Target(summary="a section of lsf.cluster", function="lsf:resource_map", needs=Needs.NODE),
    "lsf-shared": Target(summary="a section of lsf.shared", function="lsf:resources"),
    "nomad": Target(summary="device blocks for a Nomad job", function="nomad:export"),
    "pbs": Target(summary="a vnode definition of PBS", function="pbs:export", needs=Needs.NODE),
    "podman": Target(summary="flags for podman run", function="containers:export", needs=Needs.CONTAINERS),
    "ray": Target(summary="the command that starts a Ray node", function="ray:command"),
    "ray-autoscaler": Target(
        summary="a node type of Ray's cluster launcher", function="ray:node_type", needs=Needs.NODE
    ),
    "slurm": Target(summary="lines for Slurm's gres.conf", function="slurm:gres_conf", needs=Needs.NODE),
    "slurm-node": Target(summary="lines for slurm.conf", function="slurm:node_line", needs=Needs.NODE),
}


def export(target: str, source: Source) -> Export:
    """Write what a target wants to be told.

    Args:
        target: A key of :data:`TARGETS`.
        source: The machine, with what the target needs.

    Raises:
        AnyaccelError: When the target has no form for this machine.
    """
    module, _, function = TARGETS[target].function.partition(":")
    exported: Export = getattr(import_module(f"anyaccel.exports.{module}"), function)(source)
    return exported
