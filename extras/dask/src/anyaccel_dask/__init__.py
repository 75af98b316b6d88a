"""Dask: a dispatcher beside its scheduler, what its workers say of their machines, and hosts of calls on them."""

HOLD = "anyaccel place "
"""What the resource is called that no worker has; the number of a place follows."""
PREFIX = "anyaccel-"
"""How keys of our tasks begin."""
NODES_TOPIC = "anyaccel nodes"
"""Of events that say that there is a new node."""
