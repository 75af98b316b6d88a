"""Machines that look the same on every day: made-up devices, users and holders, for pictures of what commands show."""

from __future__ import annotations

import time

from anyaccel.cli.sample import Sample
from anyaccel.ledger import LeaseRecord, TicketRecord
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Device,
    DeviceProcess,
    Fractional,
    Health,
    Inventory,
    Problem,
    ProblemKind,
    Stats,
    VendorReport,
    VendorState,
)

GIB = 1 << 30
YEARS_AHEAD = 4_070_952_000.0
"""A time limit that is shown by its date, the same on every day."""
NO_PROCESS = 4_194_305
"""The lowest number that no process has: see ``pid_max`` in ``proc_sys_kernel(5)``."""


def device(vendor, index, kind, gib, **more):
    return Device(
        id=f"{vendor}-{index:08x}-5f3a-4c1e-9d27-{index * 40503 % 65536:04x}a8c09b11",
        index=index,
        model=f"{vendor.title()} {kind}",
        memory_bytes=int(gib * GIB),
        vendor=vendor,
        resource="GPU",
        kind="gpu",
        tags=(kind,),
        fractional=Fractional.SHARED,
        **more,
    )


def seen(used=0.0, load=0.0, celsius=40.0, watts=60.0, **more):
    return Stats(
        memory_used_bytes=int(used * GIB),
        utilization=load,
        temperature_celsius=celsius,
        power_watts=watts,
        health=Health.HEALTHY,
        **more,
    )


def lease(number, of, user, *, share=1.0, program="python", ago=2 * 3600 + 14 * 60, **more):
    return LeaseRecord(
        id=f"{0xA1B2C3D4 + number:08x}{number:012x}",
        device=of.id,
        units=int(share * UNITS_PER_DEVICE),
        pid=NO_PROCESS + number,
        uid=NO_PROCESS + number,
        user=user,
        since=time.time() - ago - 5,
        command=program,
        **{"state": "held", **more},
    )


def ticket(number, user, request, *, waited=125.0, **more):
    return TicketRecord(
        id=f"{number:020x}",
        priority=0,
        pid=NO_PROCESS + 500 + number,
        uid=NO_PROCESS + number,
        user=user,
        waited=waited,
        request=request,
        command="python",
        **{"responsive": True, **more},
    )


def machine(devices, stats=(), leases=(), tickets=(), *, problems=(), text="made up"):
    vendors = [
        VendorReport(vendor=vendor, state=VendorState.OK) for vendor in dict.fromkeys(each.vendor for each in devices)
    ]
    by_device = {}
    for each in leases:
        by_device.setdefault(each.device, []).append(each)
    return Sample(
        inventory=Inventory(machine=text, devices=tuple(devices), vendors=tuple(vendors)),
        observed={each.id: told for each, told in zip(devices, stats, strict=False) if told is not None},
        remarks=tuple(map(str, problems)),
        leases=by_device,
        tickets=tuple(tickets),
        at=time.time(),
    )


def one():
    return machine([device("acme", 0, "A1", 16)])


def eight():
    """A box of a lab: whole and half devices held, one lost, one used without a lease, one kept."""
    lost = {
        "health": Health.UNHEALTHY,
        "health_reason": "it has fallen off the bus",
        "health_remedy": "reboot the machine",
    }
    devices = [device("acme", number, "H100", 79.6, **(lost if number == 6 else {})) for number in range(8)]
    stats = [
        seen(71.2, 0.98, 66, 650),
        seen(71.4, 0.97, 93, 661),
        seen(12.0, 0.31, 48, 210),
        seen(),
        seen(0.6, 0.0, 35, 62, processes=(DeviceProcess(pid=NO_PROCESS + 77, memory_bytes=GIB),)),
        seen(33.0, 1.0, 84, 699),
        None,
        seen(79.6, 0.5, 71, 400),
    ]
    leases = [
        lease(1, devices[0], "alice", note="train 7b"),
        lease(1, devices[1], "alice", note="train 7b"),
        lease(
            2, devices[2], "bob", share=0.5, program="python3.12", ago=4 * 3600, request="GPU:0.5", until=YEARS_AHEAD
        ),
        lease(
            3, devices[2], "carol-ann.longname", share=0.25, program="jupyter-lab", ago=300000, note="a long note " * 5
        ),
        lease(4, devices[5], "dave", program="VLLM::EngineCor", ago=7200, confined=True),
        lease(
            5,
            devices[7],
            "\u65e5\u672c",
            state="kept",
            program="sleep",
            reason="kept: process 7 (eve, sleep) still runs",
        ),
    ]
    return machine(devices, stats, leases, [ticket(1, "frank", "GPU:2"), ticket(2, "grace", "H100:8")])


def mixed():
    """Several vendors, long names, one that cannot tell anything, one device hidden, one divided into parts."""
    devices = [
        device("acme", 0, "Accelerator-9000-SXM", 191.7),
        device("acme", 1, "Accelerator-9000-SXM", 191.7, visible=False),
        device("longvendorname", 10, "L2", 0.5, slots=8),
        device("bolt", 0, "B4", 24),
        device("bolt", 1, "B4-1g.10gb", 10, parent="bolt-whole"),
        device("declared", 0, "declared GPU", 0, declared=True),
    ]
    stats = [seen(100, 0.123, 50, 1000), seen(), seen(0.1, 0.07, 30, 5), None, None, None]
    leases = [
        lease(1, devices[0], "alice"),
        *(lease(10 + each, devices[2], f"user{each}", share=0.125, slots=(each,)) for each in range(4)),
        lease(20, devices[4], "bob", through="bolt-whole"),
    ]
    problem = Problem(
        kind=ProblemKind.TIMEOUT, reason="it did not answer within 10 s.", vendor="bolt", hook="anyaccel_stats",
        distribution="anyaccel-bolt", version="1.2.3",
    )  # fmt: skip
    return machine(devices, stats, leases, problems=[problem])


def sixty_four():
    devices = [device("acme", number, "T2", 96, numa_node=number // 32) for number in range(64)]
    stats = [seen(number * 1.5, number / 63, 30 + number, 100 + 9 * number) for number in range(64)]
    leases = [
        lease(number, devices[number], ("alice", "bob")[number % 2], ago=3600.0 * number + 5)
        for number in range(0, 64, 3)
    ]
    return machine(devices, stats, leases)


MACHINES = {"one": one, "eight": eight, "mixed": mixed, "sixty-four": sixty_four}

RUN = """
import sys
import anyaccel, made_up
from anyaccel.cli import sample as samples, program
sample = made_up.MACHINES[sys.argv.pop(1)]()
anyaccel.detect = lambda **_: sample.inventory
samples.take_sample = lambda *_, **__: sample
program()
"""
"""A program that runs a command on one of these machines."""
