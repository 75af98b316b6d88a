"""What a test sees that names no machine, whatever is plugged in where it runs."""

import json
from pathlib import Path

import anyaccel as aa
import pytest

NOTHING_HERE = Path(__file__).parents[1] / "support" / "nothing_here"


def test_it_sees_a_machine_without_accelerators_and_so_does_what_it_starts(anyaccel):
    inventory = aa.detect()
    started = json.loads(anyaccel("status", "--json").stdout)
    assert (inventory.machine, started["machine"]) == (str(NOTHING_HERE), str(NOTHING_HERE))
    assert (inventory.devices, started["devices"]) == ((), [])
    assert {report.state for report in inventory.vendors} == {aa.VendorState.NOT_ASKED}


@pytest.mark.host
def test_a_test_about_the_host_asks_no_vendor_that_it_does_not_name(anyaccel):
    inventory = aa.detect()
    assert (inventory.machine, inventory.vendors, inventory.devices) == ("host", (), ())
    assert json.loads(anyaccel("status", "--json").stdout)["vendors"] == []
