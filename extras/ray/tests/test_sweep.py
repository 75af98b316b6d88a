"""Sweeps on a cluster, on Ray."""

from engine_sweep import *  # noqa: F403
