"""A filter that only this test has, on Ray."""

from engine_filter import *  # noqa: F403
