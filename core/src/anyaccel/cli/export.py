"""Print the devices of this machine in the form that another scheduler or a container engine reads."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import anyaccel
from anyaccel.accelerators import instance_type
from anyaccel.cli import output
from anyaccel.cli.options import survey
from anyaccel.cli.quantities import whole
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.exports.cores import cores_by_node
from anyaccel.exports.source import ExportSource, container_edits, left_out, usable
from anyaccel.exports.targets import TARGETS, Needs, export
from anyaccel.inventory.current import ALLOCATION_VARIABLE
from anyaccel.launcher.environment import DEVICES_VARIABLE
from anyaccel.linux.files import write_whole
from anyaccel.model import Allocation, Device, EnvEdits, Grant, Inventory, Request, Share, Term, VendorState
from anyaccel.probe import HOST
from anyaccel.scheduler.filters import facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from anyaccel.cli.arguments import Parser

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
        "--instance", metavar="TYPE", help="a cloud instance type, such as a node that does not exist yet will be of"
    )
    parser.add_argument("--out", metavar="FILE", help="write this file, whole or not at all, instead of printing")
    parser.add_argument("--node", metavar="NAME", help="name of the machine in its cluster (default: its host name)")
    parser.add_argument(
        "--shards",
        metavar="COUNT",
        type=whole(1, 1000),
        default=0,
        help="slurm: also cut each device that can be shared into so many shards",
    )
    parser.add_argument(
        "--cores", action="store_true", help="slurm: also say which cores of this host are near a device"
    )


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
    """Let the machine be one of the instance type, which is also its name in the cluster."""
    if args.machine or args.declare:
        raise UsageError("--instance stands for a machine: leave --machine and --declare out")
    args.machine = instance_type(args.instance).machine
    args.node = args.node or args.instance


def _collect(inventory: Inventory, args: argparse.Namespace, needs: Needs) -> ExportSource:
    devices = usable(inventory)
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
    """The edits by which a process sees these devices and no other."""
    grants = [
        Grant(term=Term(names=(device.resource,)), shares=(Share(device=device, memory_bytes=device.memory_bytes),))
        for device in devices
    ]
    request = Request(terms=tuple(grant.term for grant in grants))
    allocation = Allocation(id="export", request=request, grants=tuple(grants))
    environment = anyaccel.worker_environment(allocation, inventory)
    return EnvEdits(set=environment.set, unset=environment.unset)


def _masks(edits: EnvEdits) -> EnvEdits:
    """Leave out what tells a worker that it was given devices: whoever sees all of them was given none."""
    given = (ALLOCATION_VARIABLE, DEVICES_VARIABLE)
    return EnvEdits(set={name: value for name, value in edits.set.items() if name not in given}, unset=edits.unset)


def _refuse_failed(inventory: Inventory) -> None:
    """Refuse to tell others that there are fewer devices than there may be: failed is not absent."""
    failed = [report.vendor for report in inventory.vendors if report.state is VendorState.FAILED]
    if failed:
        raise AnyaccelError(
            f"nothing is exported, because it is not known what there is of {' and '.join(failed)}; repair that (see"
            " 'anyaccel doctor'), or set ANYACCEL_PLUGINS to the vendors to export"
        )


def _empty(inventory: Inventory) -> list[str]:
    return [] if usable(inventory) else ["There is no usable device to export; see 'anyaccel' for what was found."]


def _node(name: str | None, inventory: Inventory) -> str:
    """The machine's name: the one given, or that of this host; a recording or a simulation has none of its own."""
    if name is None and inventory.machine != HOST:
        raise UsageError(f"this target names the machine, and {inventory.machine!r} has no name; add --node NAME")
    found = os.uname().nodename.split(".")[0] if name is None else name
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
    """Put a file in place, readable for whoever reads configuration."""
    if not text:
        raise AnyaccelError(f"there is nothing to write, so {path!r} was left as it is")
    try:
        write_whole(path, text)
    except OSError as error:
        raise AnyaccelError(f"{path!r} cannot be written: {error.strerror}; choose another with --out") from error
