"""What names mean."""

import pytest
from anyaccel.errors import UnknownNameError
from anyaccel.model import Term, VendorReport, VendorState, replace
from anyaccel.scheduler.placement import Layout, NameRegistry
from small_machines import chips, gpus, machine


def named(layout, *names):
    return layout.named_each(Term(names=names))


def test_a_name_is_a_resource_a_vendor_or_a_tag_in_any_case():
    layout = Layout(machine(gpus(2), chips(1)), NameRegistry())
    assert named(layout, "gpu", "ACME", "h100") == (0b011,) * 3
    assert named(layout, "TPU") == (0b100,)
    assert layout.names.label(Term(names=("h100",))) == "H100"


def test_a_known_name_means_no_device_and_is_not_unknown():
    inventory = machine(gpus(1))
    report = VendorReport(vendor="other", resource="NPU", state=VendorState.ABSENT)
    layout = Layout(replace(inventory, vendors=(report,)), NameRegistry(["A100"]))
    assert named(layout, "a100", "npu", "other") == (0, 0, 0)


def test_known_names_are_looked_at_only_when_needed():
    def known():
        pytest.fail("asked for")
        yield ""

    assert named(Layout(machine(gpus(1)), NameRegistry(known())), "GPU") == (1,)


UNKNOWN = "unknown name 'H10O': no device and no installed plug-in goes by it; "


@pytest.mark.parametrize(
    ("inventory", "way_out"),
    [
        (machine(gpus(1)), "did you mean H100?"),
        (machine(chips(1)), "on this machine there are CHIP-V5, tensor, TPU."),
        (machine(), "this machine has no devices; is the vendor's plug-in installed?"),
    ],
)
def test_an_unknown_name_offers_close_ones(inventory, way_out):
    with pytest.raises(UnknownNameError) as refused:
        named(Layout(inventory, NameRegistry()), "H10O")
    assert str(refused.value) == UNKNOWN + way_out


def test_an_unknown_name_may_be_of_a_vendor_that_failed_before_it_gave_its_names():
    report = VendorReport(vendor="other", state=VendorState.FAILED)
    inventory = replace(machine(gpus(1)), vendors=(report,))
    with pytest.raises(UnknownNameError, match=r"and the plug-in of other failed .*; see 'anyaccel plugins other'"):
        named(Layout(inventory, NameRegistry()), "NPU")
    known = replace(report, resource="XPU")
    with pytest.raises(UnknownNameError, match="no device and no installed plug-in goes by it"):
        named(Layout(replace(inventory, vendors=(known,)), NameRegistry()), "NPU")
