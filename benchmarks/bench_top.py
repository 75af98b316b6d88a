"""What ``anyaccel top`` costs while it runs: processor time of its process and of the vendors' processes, per second.

It shows eight devices that say how they fare, on a terminal of 120 x 40, at the default interval; alone, and with a
hundred who wait. What it takes until its first picture does not count.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import psutil
from measure import Row, at_most

ROUNDS = 15
INTERVAL = 2.0
BUDGET = 0.02
WAITERS = 100
PATIENCE = 120.0

PLUGIN = """
import random
from anyaccel.plugin import Detected, Device, DeviceProcess, EnvEdits, Fractional, PluginInfo, Stats, hookimpl

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="bench", resource="BENCH", kind="gpu", env_vars=("BENCH_VISIBLE",))

@hookimpl
def anyaccel_detect(ctx):
    return Detected(
        devices=tuple(Device(id=f"bench-{i}", index=i, model="Bench", memory_bytes=80 << 30) for i in range(8))
    )

@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED

@hookimpl
def anyaccel_tags(device):
    return ("Bench",)

@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={"BENCH_VISIBLE": ",".join(device.id for device in devices)})

@hookimpl
def anyaccel_stats(devices, ctx):
    return {
        device.id: Stats(
            memory_used_bytes=random.randrange(80 << 30), utilization=random.random(), temperature_celsius=60.0,
            power_watts=400.0, processes=(DeviceProcess(pid=1, memory_bytes=1 << 30),),
        )
        for device in devices
    }
"""
"""A vendor whose devices are always busy, each time in another way."""

WAIT = """
import sys, threading
import anyaccel
hold = anyaccel.acquire("BENCH:8")
for number in range(int(sys.argv[1])):
    threading.Thread(target=anyaccel.acquire, args=(f"BENCH:{1 + number % 8}",), daemon=True).start()
print("here", flush=True)
sys.stdin.read()
import os
os._exit(0)
"""


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure it alone, and with waiting processes."""
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory)
        info = site / "anyaccel_bench-1.dist-info"
        info.mkdir()
        (site / "plug_bench.py").write_text(PLUGIN)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anyaccel-bench\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[anyaccel]\nbench = plug_bench\n")
        environ = {
            **os.environ,
            "PYTHONPATH": directory,
            "ANYACCEL_PLUGINS": "bench",
            "ANYACCEL_STATE_DIR": f"{directory}/leases",
            "TERM": "xterm-256color",
        }
        alone = load(environ, rounds, "8 devices")
        holder = subprocess.Popen(
            [sys.executable, "-c", WAIT, str(WAITERS)], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            waiting = load(environ, rounds, f"{WAITERS} waiting")
        finally:
            holder.communicate()
    return [
        at_most("top, 8 devices: processor time per second", alone, BUDGET),
        at_most(f"top, 8 devices, {WAITERS} waiters: the same", waiting, BUDGET),
    ]


def load(environ: dict[str, str], rounds: int, wanted: str) -> float:
    """Processor time per second of ``anyaccel top`` once it shows something, over some of its intervals."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "anyaccel", "top"], env=environ, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    try:
        read(main, PATIENCE, wanted.encode())
        read(main, 2 * INTERVAL)
        before, start = spent(process.pid), time.monotonic()
        read(main, rounds * INTERVAL)
        return (spent(process.pid) - before) / (time.monotonic() - start)
    finally:
        os.write(main, b"q")
        end = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < end:
            read(main, 0.2)
        process.kill()
        process.wait()
        os.close(main)


def read(main: int, seconds: float, wanted: bytes = b"") -> None:
    """Take what the terminal gets for so long, or until it has got something."""
    data = b""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not (wanted and wanted in data):
        if select.select([main], [], [], left)[0]:
            try:
                data += os.read(main, 1 << 16)
            except OSError:  # it has ended
                return
    if wanted and wanted not in data:
        raise RuntimeError(f"{wanted!r} was never shown: {data[-500:]!r}")


def spent(pid: int) -> float:
    """Processor time of a process and all that it has started."""
    first = psutil.Process(pid)
    total = 0.0
    for each in (first, *first.children(recursive=True)):
        times = each.cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    for row in rows():
        print(f"{row.what}: {row.seconds:.2%} ({row.budget}: {'kept' if row.kept else 'missed'})")
