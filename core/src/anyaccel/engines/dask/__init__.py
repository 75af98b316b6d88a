"""Dask: a dispatcher beside its scheduler, what its workers say of their machines, and hosts of calls on them."""
