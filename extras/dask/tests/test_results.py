"""Many calls and their results, on Dask."""

from engine_results import *  # noqa: F403
