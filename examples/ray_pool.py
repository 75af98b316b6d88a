"""The same pool on many machines: Ray places the calls, and each sees exactly its devices.

Needs ``pip install 'anyaccel[ray]'``. Without an address, a cluster of this machine alone is started where none is
to be found.

Prints:
    4 calls, each with 1 device of its own
"""

import os

import anyaccel as aa

# What this machine shall have; leave it out to use its own devices, and give the address of a cluster.
os.environ.setdefault("ANYACCEL_MACHINE", "sim:H100:4")


def train(seed: int) -> tuple[int, list[str]]:
    """Stands for hours on a device."""
    return seed, [device.id for device in aa.current().devices]


if __name__ == "__main__":
    with aa.Pool("GPU:1", engine="ray", retries=2) as pool:
        runs = list(pool.map(train, range(4)))
    (each,) = {len(devices) for _, devices in runs}
    print(f"{len(runs)} calls, each with {each} device of its own")
