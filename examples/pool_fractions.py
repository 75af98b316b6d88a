"""Four tasks share one device, a quarter each, at the same time.

Prints:
    4 tasks ran at once on ['declared-GPU-0'], 0.25 of it each
"""

import tempfile
import time
from pathlib import Path

import anyaccel as aa

TASKS = 4


def meet(place: Path, number: int) -> tuple[str, float]:
    """Wait until all four are here: they can only meet if they run at once."""
    (place / str(number)).touch()
    while len(list(place.iterdir())) < TASKS:
        time.sleep(0.01)
    held = aa.current()
    share = held.shares[0] if held else None
    return (share.device.id, share.units / 10_000) if share else ("nothing", 0.0)


with tempfile.TemporaryDirectory() as directory, aa.Pool("GPU:0.25", declare={"GPU": 1}) as pool:
    met = list(pool.map(meet, [Path(directory)] * TASKS, range(TASKS)))
    print(f"{len(met)} tasks ran at once on {sorted({device for device, _ in met})}, {met[0][1]} of it each")
