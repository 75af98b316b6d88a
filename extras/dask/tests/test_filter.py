"""A filter that only this test has, on Dask."""

from engine_filter import *  # noqa: F403
