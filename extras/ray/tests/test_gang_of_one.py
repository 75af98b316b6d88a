"""Gangs of one, on Ray."""

from engine_gangs import *  # noqa: F403
