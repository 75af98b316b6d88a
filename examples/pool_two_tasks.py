"""Two tasks on two devices: each sees one device, and not the other's.

Prints:
    task 1 sees ['declared-GPU-0']
    task 2 sees ['declared-GPU-1']
"""

import time

import anyaccel as aa


def task(number: int) -> str:
    """Say what this process holds; a real task would use it."""
    time.sleep(0.2)  # long enough for both to run at once
    held = aa.current()
    return f"task {number} sees {[device.id for device in held.devices] if held else 'nothing'}"


# Two devices, whatever this machine has; leave ``declare`` out to use its own.
with aa.Pool("GPU:1", declare={"GPU": 2}) as pool:
    for line in pool.map(task, [1, 2]):
        print(line)
