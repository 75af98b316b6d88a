"""A filter that only this test has, on this machine."""

from engine_filter import *  # noqa: F403
