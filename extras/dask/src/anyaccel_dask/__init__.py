"""The Dask engine: a dispatcher in Dask's scheduler, and on its workers their inventories and hosts of calls."""

HOLD = "anyaccel place "
"""Prefix of resources that no worker has, which keep a task on the scheduler; the id of a place follows."""
PREFIX = "anyaccel-"
"""Prefix of the keys of our tasks."""
NODES_TOPIC = "anyaccel nodes"
"""Topic of events about new nodes."""


def topic(key: str) -> str:
    """Return the topic of events for the pool of a key."""
    return f"anyaccel {key.partition('/')[0]}"
