"""Declared devices."""

import pytest
from anyaccel.errors import UsageError
from anyaccel.inventory.declared import declare, label, parse_declaration
from anyaccel.scheduler import Scheduler
from small_machines import gpus, machine


def test_more_than_there_are():
    inventory = declare(machine(gpus(1)), {"gpu": 3})
    assert [device.id for device in inventory.devices] == ["h100-0", "declared-GPU-0", "declared-GPU-1"]
    made_up = inventory.devices[2]
    assert (made_up.vendor, made_up.resource, made_up.kind, made_up.declared) == ("declared", "GPU", "gpu", True)
    assert made_up.fractional
    assert len(Scheduler(inventory).allocate("GPU GPU GPU:0.5").devices) == 3


def test_fewer_than_there_are():
    inventory = declare(machine(gpus(3)), {"GPU": 1})
    assert [device.visible for device in inventory.devices] == [True, False, False]
    assert not any(device.visible for device in declare(machine(gpus(3)), {"GPU": 0}).devices)


def test_again_and_of_something_new():
    inventory = declare(declare(machine(), {"FPGA": 2}), {"FPGA": 1, "GPU": 1})
    inventory = declare(inventory, {"FPGA": 2})
    assert [device.id for device in inventory.devices if device.usable] == [
        "declared-FPGA-0",
        "declared-GPU-0",
        "declared-FPGA-2",
    ]


def test_text():
    assert parse_declaration("GPU=8") == ("GPU", 8)


@pytest.mark.parametrize("text", ["", "GPU", "GPU=", "=8", "GPU=-1", "GPU=1.5", "GPU=٢", "G U=1", "GPU=" + "9" * 5000])
def test_text_of_another_form(text):
    with pytest.raises(
        UsageError, match=r"a declaration must be NAME=NUMBER with a whole number up to 65536, such as GPU=8"
    ):
        parse_declaration(text)


@pytest.mark.parametrize("number", [-1, 1.5, True, "8", 10**7])
def test_a_number_that_cannot_be(number):
    with pytest.raises(UsageError, match="GPU must be declared as a whole number from 0 to 65536"):
        declare(machine(), {"GPU": number})


def test_a_name_that_cannot_be():
    with pytest.raises(UsageError, match="a declared resource must be a name such as GPU"):
        declare(machine(), {"8": 8})


def test_what_is_no_mapping_is_refused():
    with pytest.raises(UsageError, match=r"devices are declared as a mapping such as {'GPU': 8} \(got 'GPU=8'\)"):
        declare(machine(), "GPU=8")
    with pytest.raises(UsageError, match=r"labels are a mapping such as .* \(got \['a'\]\)"):
        label(machine(), ["a"])
