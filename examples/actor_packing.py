"""Three actors of half a device each: the third gets a device of its own, since two fill the first.

Prints:
    ['declared-GPU-0', 'declared-GPU-0', 'declared-GPU-1']
"""

import anyaccel as aa


class Half:
    """Says where it is."""

    def where(self) -> str:
        """The device of this process."""
        held = aa.current()
        return held.devices[0].id if held else "nothing"


with aa.Pool("GPU:0.5", declare={"GPU": 2}) as pool:
    actors = [pool.actor(Half) for _ in range(3)]
    print([actor.where().result() for actor in actors])
