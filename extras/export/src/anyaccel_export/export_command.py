"""Print the devices of this machine in the form of another scheduler or of a container engine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import anyaccel
from anyaccel.accelerators import instance_type
from anyaccel.cli import output, survey, whole
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.inventory import ALLOCATION_VARIABLE
from anyaccel.launcher import DEVICES_VARIABLE
from anyaccel.linux import write_whole
from anyaccel.model import Allocation, Device, EnvEdits, Grant, Inventory, Request, Share, Term, VendorState
from anyaccel.probe import HOST
from anyaccel.scheduler import facts

from anyaccel_export.cores import cores_by_node
from anyaccel_export.source import ExportSource, container_edits, left_out, usable
from anyaccel_export.targets import TARGETS, Needs, export

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from anyaccel.cli import Parser

_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


EXAMPLES = (
    ("anyaccel export slurm --node n1", "lines for gres.conf and slurm.conf"),
    ("anyaccel export cdi --out /etc/cdi/anyaccel.json", "a CDI file for container engines"),
)


def add_arguments(parser: Parser) -> None:
    """Declare the command's arguments."""
    parser.listed = "targets", {name: target.summary for name, target in TARGETS.items()}
    parser.add_argument("target", metavar="TARGET", choices=tuple(TARGETS), help="one of the targets below")
    parser.add_argument(
        "--instance", metavar="TYPE", help="the devices of a cloud instance type, for a node that does not exist yet"
    )
    parser.add_argument("--out", metavar="FILE", help="write FILE instead of printing; it is replaced in one step")
    parser.add_argument("--node", metavar="NAME", help="the machine's name in its cluster (default: its host name)")
    parser.add_argument(
        "--shards",
        metavar="COUNT",
        type=whole(1, 1000),
        default=0,
        help="slurm: also divide each device that can be shared into this many shards",
    )
    parser.add_argument("--cores", action="store_true", help="slurm: also list the cores of this host near each device")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    target = TARGETS[args.target]
    if args.shards and not args.target.startswith("slurm"):
        raise UsageError(f"--shards belongs to the target slurm (got it with {args.target})")
    if args.cores and args.target != "slurm":
        raise UsageError(f"--cores belongs to the target slurm (got it with {args.target})")
    if args.instance:
        _imagine(args)
    inventory = survey(args)
    _refuse_failed(inventory)
    exported = export(args.target, _collect(inventory, args, target.needs))
    notes = [*left_out(inventory), *_empty(inventory), *exported.notes]
    for note in notes:
        output.say(note)
    if args.out:
        _write(args.out, exported.text)
    if args.json:
        output.print_json("export/1", {"target": args.target, "text": exported.text, "notes": notes})
    elif not args.out:
        output.print_document(exported.text)
    return 0


def _imagine(args: argparse.Namespace) -> None:
    """Replace the machine by one of the cloud instance type, whose name becomes the node's."""
    if args.machine or args.declare:
        raise UsageError("--instance stands for a machine: leave --machine and --declare out")
    args.machine = instance_type(args.instance).machine
    args.node = args.node or args.instance


def _collect(inventory: Inventory, args: argparse.Namespace, needs: Needs) -> ExportSource:
    devices = usable(inventory)
    # Edits of containers read device nodes: made only for targets that need them.
    alone, together = container_edits(devices) if needs & Needs.CONTAINERS else ({}, {})
    environments = {device.id: _environment([device], inventory) for device in devices if needs & Needs.ENVIRONMENTS}
    everything = _masks(_environment(devices, inventory)) if needs & Needs.EVERYTHING else EnvEdits()
    return ExportSource(
        inventory=inventory,
        node=_node(args.node, inventory) if needs & Needs.NODE else "localhost",
        facts={device.id: facts(device, inventory, typed=False) for device in devices},
        shards=args.shards,
        cores=_cores(inventory) if args.cores else {},
        alone=alone,
        together=together,
        environments=environments,
        everything=everything,
    )


def _environment(devices: Sequence[Device], inventory: Inventory) -> EnvEdits:
    """Return the edits by which a process sees only these devices."""
    grants = [
        Grant(term=Term(names=(device.resource,)), shares=(Share(device=device, memory_bytes=device.memory_bytes),))
        for device in devices
    ]
    request = Request(terms=tuple(grant.term for grant in grants))
    allocation = Allocation(id="export", request=request, grants=tuple(grants))
    # The same function as for a worker: what an export says is what a worker would see.
    environment = anyaccel.worker_environment(allocation, inventory)
    return EnvEdits(set=environment.set, unset=environment.unset)


def _masks(edits: EnvEdits) -> EnvEdits:
    """Remove the variables of a lease: a process with every device has no lease."""
    given = (ALLOCATION_VARIABLE, DEVICES_VARIABLE)
    return EnvEdits(set={name: value for name, value in edits.set.items() if name not in given}, unset=edits.unset)


def _refuse_failed(inventory: Inventory) -> None:
    """Refuse an incomplete list: a failed vendor may have devices."""
    failed = [report.vendor for report in inventory.vendors if report.state is VendorState.FAILED]
    if failed:
        raise AnyaccelError(
            f"the devices of {' and '.join(failed)} are unknown, and an incomplete list is not exported",
            hint="see 'anyaccel doctor', or set ANYACCEL_PLUGINS to the vendors to export",
        )


def _empty(inventory: Inventory) -> list[str]:
    return [] if usable(inventory) else ["there is no usable device to export; 'anyaccel' shows those found"]


def _node(name: str | None, inventory: Inventory) -> str:
    """Return the node's name; a recording or a simulation has no name of its own."""
    if name is None and inventory.machine != HOST:
        raise UsageError(f"this target names the machine, and {inventory.machine!r} has no name; add --node NAME")
    # Slurm and Kubernetes call a node by its short name.
    found = os.uname().nodename.split(".")[0] if name is None else name
    # A name with a blank or a newline could add lines to another program's configuration.
    if not _NODE.fullmatch(found):
        raise UsageError(
            f"the name of a node must be letters, digits, '-' and '.' (got {found!r:.80}); add --node NAME"
        )
    return found


def _cores(inventory: Inventory) -> dict[int, tuple[int, ...]]:
    if inventory.machine != HOST:
        raise UsageError(f"--cores counts the cores of this host, and {inventory.machine!r} is another machine")
    return cores_by_node()


def _write(path: str, text: str) -> None:
    """Write a file that the readers of configuration may read."""
    if not text:
        raise AnyaccelError(f"there is nothing to write; {path!r} is unchanged")
    try:
        write_whole(path, text)
    except OSError as error:
        raise AnyaccelError(f"{path!r} cannot be written: {error.strerror}; choose another with --out") from error
