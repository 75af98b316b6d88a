"""Building blocks of plug-ins: a vendor declared as a class, and the parts that most vendors need.

A plug-in of the kit is an instance of a subclass of :class:`Vendor`. Attributes describe the vendor; a plug-in
overrides a method only where the vendor differs from the default. The kit uses nothing but :mod:`anyaccel.plugin`: a
plug-in may also use single parts of the kit, or none.
"""

from anyaccel.kit.caps import GROWTH, Cap, cap_frameworks
from anyaccel.kit.card import Card, board_links
from anyaccel.kit.catalog import Catalog, Entry, pci_name, tag
from anyaccel.kit.fault import Condition, Fault, FaultError, condition, fail, warn
from anyaccel.kit.files import (
    PCI_DEVICES,
    Holders,
    host_memory,
    in_container,
    kernel_log,
    number,
    numbered,
    physical_function,
    text,
    total,
    try_query,
)
from anyaccel.kit.masks import Ids, Mask, Numbers, Sets, c_integer
from anyaccel.kit.tools import Measures, Row, Tool, pairs
from anyaccel.kit.vendor import Vendor, inventory

__all__ = [
    "GROWTH",
    "PCI_DEVICES",
    "Cap",
    "Card",
    "Catalog",
    "Condition",
    "Entry",
    "Fault",
    "FaultError",
    "Holders",
    "Ids",
    "Mask",
    "Measures",
    "Numbers",
    "Row",
    "Sets",
    "Tool",
    "Vendor",
    "board_links",
    "c_integer",
    "cap_frameworks",
    "condition",
    "fail",
    "host_memory",
    "in_container",
    "inventory",
    "kernel_log",
    "number",
    "numbered",
    "pairs",
    "pci_name",
    "physical_function",
    "tag",
    "text",
    "total",
    "try_query",
    "warn",
]
