"""What a pool does, on Ray."""

from engine_calls import *  # noqa: F403
