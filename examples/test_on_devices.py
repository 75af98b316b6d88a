"""Tests of a program that uses devices, for a CI machine that has none.

pip install pytest pytest-xdist
ANYACCEL_MACHINE=sim:H100:2 pytest -n 2 --accel GPU:1 --accel-required examples/test_on_devices.py
"""

import os
import subprocess
import sys

import anyaccel
import pytest

PROGRAM = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]


def test_a_program_sees_the_device_of_this_test_worker(accel):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == accel.devices[0].id
    assert subprocess.check_output(PROGRAM, text=True).split() == [accel.devices[0].id]


@pytest.mark.parametrize("machine", ["sim:H100:8", "sim:A100-40G:4"])
def test_it_gets_two_linked_devices_on_each_machine_that_we_have(accel_machine, machine):
    accel_machine(machine)
    with anyaccel.acquire("GPU:2,linked") as lease:
        program = lease.popen(PROGRAM, stdout=subprocess.PIPE, text=True)
        assert program.communicate()[0].strip().split(",") == [device.id for device in lease.devices]


def test_a_small_machine_says_what_it_lacks(accel_machine):
    accel_machine("sim:L4:1")
    with pytest.raises(anyaccel.NeverFitsError, match="this machine has 1 GPU"):
        anyaccel.acquire("GPU:2")
