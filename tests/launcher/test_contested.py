"""Users of whom each has another plug-in for one device exclude each other by the lock on the device itself.

The machine is one of its own: a mount namespace in which sysfs shows the PCI functions of this test, so that no other
process on the host has them locked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from two_plugins import plugin

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "users.py"
USERS = {"anna": 61_201, "ben": 61_202}
ADDRESS = "0000:c1:00.0"
MACHINE = f"""
set -e
mount -t tmpfs none /sys/bus/pci/devices && mount -t tmpfs none /sys/dev/char
mkdir -p /sys/bus/pci/devices/{ADDRESS}/accel/accel0 /sys/dev/char/virtual
ln -s /sys/bus/pci/devices/{ADDRESS}/accel/accel0 /sys/dev/char/1:3
ln -s /sys/dev/char/virtual /sys/dev/char/1:5
chmod -R a+rX /sys/bus/pci/devices /sys/dev/char
set +e
"""
PLUGINS = {
    "one": f'pci_bus_id="{ADDRESS}"',
    "two": f'pci_bus_id="{ADDRESS}", nodes=("/dev/zero",)',
    "node": 'nodes=("/dev/null",)',
    "here": 'nodes=("/dev/zero",)',
    "there": 'nodes=("/dev/zero",)',
    "part": f'pci_bus_id="{ADDRESS}", parent="whole"',
}


def hold(vendor, request):
    return f"""
rm -f /tmp/end /tmp/held; mkfifo -m 666 /tmp/end
ANYACCEL_PLUGINS={vendor} anyaccel run {request} -- sh -c 'echo > /tmp/held; cat /tmp/end' &
until test -e /tmp/held; do sleep 0.01; done
"""


def begin(vendor, request):
    return f"""
ANYACCEL_PLUGINS={vendor} anyaccel run {request} -- echo got >waited 2>&1 &
until grep -q waiting waited; do sleep 0.01; done
"""


def one_order(holder, other, request="1"):
    """What anna and ben type: one holds the device, the other one is refused, waits, and gets it in the end."""
    refused = f"ANYACCEL_PLUGINS={other} anyaccel run {other}:1 --no-wait -- echo got"
    return [
        ("anna", hold(holder, f"{holder}:{request}"), 0),
        ("ben", refused, 4),
        ("ben", begin(other, f"{other}:1"), 0),
        ("anna", "echo > /tmp/end; wait", 0),
        ("ben", "wait; tail -n 1 waited | grep -x got", 0),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as several users")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("left", "right", "share"),
    [
        pytest.param("one", "two", "0.5", marks=pytest.mark.full),  # tests/ledger has each of these locks as well
        ("one", "node", "1"),
        pytest.param("here", "there", "0.5", marks=pytest.mark.full),
        ("part", "one", "1"),
    ],
)
def test_two_users_with_one_plugin_each(left, right, share, tmp_path, install):
    for vendor in (left, right):
        install(vendor, plugin(vendor, f'id="{vendor}-0", {PLUGINS[vendor]}'))
    steps = [("root", MACHINE, 0), *one_order(left, right, share), *one_order(right, left)]
    site = tmp_path / "site"
    given = {
        "users": USERS,
        "keep": sorted({str(ROOT), sys.prefix, sys.base_prefix, str(site)}),
        "environ": {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(site),
        },
        "check": "python -c 'import anyaccel'",
        "commands": [(user, command) for user, command, _ in steps],
    }
    inner = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, str(SCRIPT)]  # bash collects what it inherits
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *inner]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=280, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "skip" in answer:
        pytest.skip(answer["skip"])
    if answer["results"][0][0]:
        pytest.skip(f"sysfs cannot be covered here: {answer['results'][0][1]}")
    for (user, typed, expected), (status, printed) in zip(steps, answer["results"], strict=True):
        assert status == expected, f"{user}$ {typed}\n{printed}"
        if expected == 4:
            assert "is in use outside of this ledger" in printed
