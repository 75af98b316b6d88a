"""What a pool does, on Dask."""

from engine_calls import *  # noqa: F403
