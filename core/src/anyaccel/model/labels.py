"""Labels: names that an administrator or a program gives to devices, for requests to choose by.

Labels come from files, documents and programs, and appear in tables, other schedulers and command lines. So the grammar
is narrow: a key, or ``key=value``, of letters, digits and ``. _ -``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from anyaccel.model.device import Device
from anyaccel.text import shown

MOST_LABELS = 32
"""Most labels of one device."""
RULE = (
    "a label must be a key such as 'reserved', or a key with a value such as 'team=vision': each at most 63 letters, "
    "digits and . _ -, that begins with a letter or digit, the key with a letter"
)
_LABEL = r"([A-Za-z][A-Za-z0-9._-]{0,62})(?:=([A-Za-z0-9][A-Za-z0-9._-]{0,62}))?"
"""Compiled at the first use: few machines have labels, and each command imports this module."""


def read_label(text: str) -> tuple[str, str]:
    """Parse a label; return the key and the value, which may be empty.

    Raises:
        ValueError: When the text breaks the grammar.
    """
    match = re.fullmatch(_LABEL, text)
    if match is None:
        raise ValueError(f"{RULE} (got {shown(text)})")
    return match[1], match[2] or ""


def read_labels(texts: Iterable[str]) -> dict[str, str]:
    """Parse the labels of a device.

    Raises:
        ValueError: When a label breaks the grammar, a key is given twice, or there are more than 32 labels.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, value = read_label(text)
        if key in found:  # two values of a key would depend on the order of files
            raise ValueError(f"a label must be given once (got {shown(key)} twice)")
        found[key] = value
    if len(found) > MOST_LABELS:
        raise ValueError(f"a device must have at most {MOST_LABELS} labels (got {len(found)})")
    return found


def write_label(key: str, value: str) -> str:
    """Write a label in the form of :func:`read_label`."""
    return f"{key}={value}" if value else key


def write_labels(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Write labels in the order of their keys."""
    return tuple(write_label(key, labels[key]) for key in sorted(labels))


def label_faults(devices: Iterable[Device]) -> Iterator[str]:
    """Yield the labels of devices that break the grammar."""
    for device in devices:
        try:
            read_labels(write_label(key, value) for key, value in device.labels.items())
        except ValueError as error:
            yield f"Device.labels of {shown(device.id)}: {error}"
