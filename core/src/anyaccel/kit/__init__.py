"""What plug-ins share: a vendor declared as a class, and the parts that most vendors need.

A plug-in of the kit is an instance of a subclass of :class:`Vendor`. Its attributes describe the vendor; a method is
overridden where the vendor is odd, and only there. Everything here works on what :mod:`anyaccel.plugin` offers: a
plug-in may use single parts of the kit, or none.
"""

from anyaccel.kit.caps import Cap, capped
from anyaccel.kit.card import Card, board_links
from anyaccel.kit.catalog import Catalog, Entry, pci_name, tag
from anyaccel.kit.fault import Condition, Fault, FaultError, condition, fail, warn
from anyaccel.kit.files import (
    PCI_DEVICES,
    asked,
    in_container,
    kernel_log,
    number,
    numbered,
    physical_function,
    text,
    total,
)
from anyaccel.kit.masks import Ids, Mask, Numbers, c_integer
from anyaccel.kit.processes import Holders
from anyaccel.kit.tools import Measures, Row, Tool, pairs
from anyaccel.kit.vendor import Vendor, inventory

__all__ = [
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
    "Tool",
    "Vendor",
    "asked",
    "board_links",
    "c_integer",
    "capped",
    "condition",
    "fail",
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
    "warn",
]
