"""A filter that only tests have, and devices that it tells apart."""

import pytest
from anyaccel.model import replace
from anyaccel.scheduler.filters import FILTERS, Filter, with_filter
from small_machines import gpus


class Lanes(Filter[int]):
    """At least so many lanes, which devices tell in an attribute."""

    name = "lanes"
    form = "lanes=COUNT"
    summary = "has at least so many lanes: lanes=8"

    def read(self, text):
        if not text.isdecimal():
            raise ValueError(f"'lanes' must be a number (got {text!r})")
        return int(text)

    def predicate(self, asked):
        return lambda device: device.attributes.get("lanes", 0) >= asked.wanted

    def fact(self, device, inventory):
        return str(device.attributes.get("lanes", ""))

    def find_near(self, asked, devices):
        for lanes in sorted({device.attributes.get("lanes", 0) for device in devices} - {0}, reverse=True):
            if lanes < asked.wanted:
                yield with_filter(asked.term, "lanes", str(lanes))


@pytest.fixture
def lanes(monkeypatch):
    monkeypatch.setitem(FILTERS, "lanes", Lanes())


def laned(*counts):
    """Devices with so many lanes; None where that is unknown."""
    return [
        replace(device, attributes={} if count is None else {"lanes": count})
        for device, count in zip(gpus(len(counts)), counts, strict=True)
    ]
