"""Many calls and their results, on Ray."""

from engine_results import *  # noqa: F403
