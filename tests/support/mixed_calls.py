"""Calls of every kind at once on a cluster of two machines, and whether each saw what it was given and nothing else."""

import os
import random
import time

import anyaccel as aa

ONE, TWO = "sim:H100:4", "sim:MI300X:4,TPU-V4:4"
"""What the machines are."""
NEEDS = ("H100", "GPU:2", "MI300X:0.25", "H100:0.25", "GPU:0.5", "TPU:1", "TPU:2", "TPU:4", "H100|MI300X", None)
NEEDS += ("MI300X:1 TPU:1", "nvidia:1", "v4:1")


def variables(machine):
    """Names of the variables that the vendors of a machine own."""
    return {name for report in aa.detect(machine, everybody=True).vendors for name in report.env_vars}


def report(names, seconds=0.0):
    """What a worker sees, and from when to when it had it."""
    start = time.monotonic()
    held = aa.current()
    time.sleep(seconds)
    shares = [(share.device.id, share.units) for share in held.shares]
    return {name: os.environ[name] for name in names if name in os.environ}, shares, (start, time.monotonic())


def check_mixed_calls(pool, count, seconds):
    """Run calls, and check that each has a mask of its own devices, and that no device is given twice.

    Args:
        pool: The pool.
        count: How many calls.
        seconds: For which to wait for each.

    Returns:
        Devices that were given, and those that there are, by id.
    """
    names = variables("host")
    inventories = {device.id: inventory for inventory in map(aa.detect, (ONE, TWO)) for device in inventory.devices}
    chance = random.Random(7)
    views = {needs: pool.options(needs=needs) for needs in NEEDS}
    wanted = [chance.choice(NEEDS) for _ in range(count)]
    futures = [views[needs].submit(report, names, chance.choice((0.0, 0.005, 0.02))) for needs in wanted]
    changes = []
    for needs, future in zip(wanted, futures, strict=True):
        seen, shares, (start, end) = future.result(seconds)
        assert shares == [(share.device.id, share.units) for share in future.allocation.shares]
        if needs is None:
            assert not shares
            assert all(value in ("", "-1") for value in seen.values()), "a call without needs sees a device"
            continue
        # Each on its own: the cluster may have given whatever it likes, and the mask must be that.
        assert sum(units for _, units in shares) == sum(term.units for term in aa.parse_request(needs).terms)
        expected = aa.worker_environment(future.allocation, inventories[shares[0][0]], environ={}).set
        assert seen == {name: expected[name] for name in names if name in expected}
        if future.allocation.devices[0].vendor == "nvidia":
            assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(device_id for device_id, _ in shares)
        changes += [(start, units, device_id) for device_id, units in shares]
        changes += [(end, -units, device_id) for device_id, units in shares]
    held = dict.fromkeys(inventories, 0)
    for _, units, device_id in sorted(changes):
        held[device_id] += units
        assert held[device_id] <= 10_000, f"{device_id} was given twice"
    return {device_id for _, _, device_id in changes}, {*inventories}
