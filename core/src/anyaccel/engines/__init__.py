"""Engines of pools: this machine, and what engines of clusters have in common."""
