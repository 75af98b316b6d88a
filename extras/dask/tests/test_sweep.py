"""Sweeps on a cluster, on Dask."""

from engine_sweep import *  # noqa: F403
