"""An actor takes the first device and a task the second; the actor keeps its state and its device between calls.

Prints:
    actor on declared-GPU-0, task on declared-GPU-1
    counted to 10
    the actor is gone: ended with exit status 3
"""

import os

import anyaccel as aa


def where() -> str:
    """The device of this process."""
    held = aa.current()
    return held.devices[0].id if held else "nothing"


class Counter:
    """Stands for a model that stays loaded."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, number: int) -> int:
        """Count."""
        self.value += number
        return self.value

    def where(self) -> str:
        """The device of this process."""
        return where()

    def crash(self) -> None:
        """End as a crash would."""
        os._exit(3)


with aa.Pool("GPU:1", declare={"GPU": 2}) as pool:
    counter = pool.actor(Counter)
    print(f"actor on {counter.where().result()}, task on {pool.submit(where).result()}")
    print(f"counted to {[counter.add(number) for number in range(5)][-1].result()}")
    try:
        counter.crash().result()
    except aa.BrokenWorkerError as error:
        print(f"the actor is gone: ended with exit status {error.exit_status}")
