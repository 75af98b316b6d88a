"""The programs of ``examples/``."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 240.0
"""Seconds for what they do, which loads other people's frameworks."""
