"""Labels: words that an administrator or a program gives devices, for requests to choose by.

They come from files, documents and programs, and go to tables, other schedulers and command lines, so they have a
narrow grammar: a key, or ``key=value``, of letters, digits and ``. _ -``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from anyaccel.model.device import Device
from anyaccel.text import shown

MOST_LABELS = 32
"""Labels of one device."""
RULE = (
    "a label must be a key such as 'reserved', or a key with a value such as 'team=vision': each at most 63 letters, "
    "digits and . _ -, that begins with a letter or digit, the key with a letter"
)
_LABEL = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,62})(?:=([A-Za-z0-9][A-Za-z0-9._-]{0,62}))?")


def read_label(text: str) -> tuple[str, str]:
    """Understand a label: its key, and its value, empty where it has none.

    Raises:
        ValueError: When it does not follow the grammar.
    """
    match = _LABEL.fullmatch(text)
    if match is None:
        raise ValueError(f"{RULE} (got {shown(text)})")
    return match[1], match[2] or ""


def read_labels(texts: Iterable[str]) -> dict[str, str]:
    """Understand the labels of one device.

    Raises:
        ValueError: When one does not follow the grammar, a key is given twice, or there are too many.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, value = read_label(text)
        if key in found:
            raise ValueError(f"a label must be given once (got {shown(key)} twice)")
        found[key] = value
    if len(found) > MOST_LABELS:
        raise ValueError(f"a device must have at most {MOST_LABELS} labels (got {len(found)})")
    return found


def write_label(key: str, value: str) -> str:
    """Write a label as :func:`read_label` understands it."""
    return f"{key}={value}" if value else key


def write_labels(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Write labels in the order of their keys."""
    return tuple(write_label(key, labels[key]) for key in sorted(labels))


def label_faults(devices: Iterable[Device]) -> Iterator[str]:
    """Name the labels of devices that do not follow the grammar."""
    for device in devices:
        try:
            read_labels(write_label(key, value) for key, value in device.labels.items())
        except ValueError as error:
            yield f"Device.labels of {shown(device.id)}: {error}"
