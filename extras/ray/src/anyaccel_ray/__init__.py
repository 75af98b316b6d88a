"""Ray: what its nodes are told, and what its workers see."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel_ray.interface import accelerator_manager

__all__ = ["accelerator_manager"]


def __getattr__(name: str) -> object:
    """Import the public function when it is first used: hosts of calls do not need it."""
    if name != "accelerator_manager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from anyaccel_ray.interface import accelerator_manager

    return accelerator_manager
