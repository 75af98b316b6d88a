"""Many calls and their results, on this machine."""

from engine_results import *  # noqa: F403
