"""What a pool does, on this machine."""

from engine_calls import *  # noqa: F403
