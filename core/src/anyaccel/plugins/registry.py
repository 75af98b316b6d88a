"""The plug-ins that this process uses for the hooks that run inline."""

from __future__ import annotations

import functools

from anyaccel.errors import PluginError
from anyaccel.model import ProblemKind
from anyaccel.plugins.discovery import Source, installed, problem_of
from anyaccel.plugins.vendor import VendorPlugin


@functools.cache
def plugin(vendor: str) -> VendorPlugin:
    """Load the plug-in of one vendor into this process, once.

    Raises:
        PluginError: When it is not installed, cannot be imported or does not keep the contract.
    """
    sources, problems = installed()
    for source in sources:
        if source.vendor == vendor:
            return VendorPlugin(source)
    for problem in problems:
        if problem.vendor == vendor:
            raise PluginError(problem)
    missing = problem_of(Source(vendor=vendor, target=""), ProblemKind.LOAD, "no plug-in of that name is installed.")
    raise PluginError(missing)
