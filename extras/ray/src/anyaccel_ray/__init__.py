"""The Ray engine, nodes of Ray with accelerators, and Ray's accelerator interface for plug-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel_ray.interface import accelerator_manager

__all__ = ["accelerator_manager"]


def __getattr__(name: str) -> object:
    """Import the public function on first use: hosts of calls do not need it."""
    if name != "accelerator_manager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from anyaccel_ray.interface import accelerator_manager

    return accelerator_manager
