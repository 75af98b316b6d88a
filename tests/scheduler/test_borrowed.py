"""Vendors that obey one variable are never served together, and everything else is as if there were no such rule."""

from dataclasses import replace
from itertools import permutations

import pytest
from anyaccel.model import Extent, VendorReport, VendorState
from anyaccel.scheduler import Choice, ReasonCode, Scheduler, parse_request
from small_machines import gpus, machine


def report(vendor, *variables, borrowed=(), cleared=()):
    return VendorReport(
        vendor=vendor, state=VendorState.OK, resource="GPU", env_vars=variables, borrowed=borrowed, cleared=cleared
    )


OWNER = report("owner", "LIST", "ORDER")
BORROWER = report("borrower", "LIST", "OWN", borrowed=("LIST",))
SECOND = report("second", "LIST", borrowed=("LIST",))
POLITE = report("polite", "OTHER", "LIST", cleared=("LIST",))
OWN = gpus(2, "O1", vendor="owner")
TWO = gpus(2, "B1", vendor="borrower")
MORE = gpus(2, "S1", vendor="second")
LAST = gpus(2, "P1", vendor="polite")


def mixed(*devices):
    return replace(machine(*devices), vendors=(BORROWER, OWNER, POLITE, SECOND))


def placed(inventory, *request, taken=()):
    found = Choice(inventory, parse_request(list(request))).choose({name: Extent(10_000) for name in taken})
    return found and [[share.device.id for share in grant.shares] for grant in found]


@pytest.mark.parametrize(
    ("one", "other", "variable"),
    [
        (OWNER, BORROWER, "LIST"),
        (BORROWER, SECOND, "LIST"),
        (OWNER, POLITE, ""),
        (BORROWER, POLITE, ""),
        (OWNER, report("same", "ORDER"), ""),  # no plug-in says that it is borrowed: the launch decides
        (OWNER, report("strange", "ELSE", borrowed=("ELSE",)), ""),
    ],
)
def test_two_vendors_share_a_variable_that_one_of_them_borrows(one, other, variable):
    assert one.shared_with(other) == other.shared_with(one) == variable


def test_two_vendors_that_obey_one_variable_are_not_served_together():
    inventory = mixed(OWN, TWO, LAST)
    assert placed(inventory, "owner:1", "borrower:1") is None
    assert placed(inventory, "owner:1", "polite:1") == [["o1-0"], ["p1-0"]]
    assert placed(inventory, "owner:2") == [["o1-0", "o1-1"]]
    assert placed(inventory, "borrower:2", "polite:2") == [["b1-0", "b1-1"], ["p1-0", "p1-1"]]


def test_a_term_that_may_be_of_several_vendors_takes_the_one_that_goes_with_the_others():
    for order in permutations((OWN, TWO)):
        assert placed(mixed(*order), "GPU:1", "O1:1") == [["o1-1"], ["o1-0"]]
        assert placed(mixed(*order), "GPU:1", "B1:1") == [["b1-1"], ["b1-0"]]
    assert placed(mixed(TWO, OWN), "GPU:1", "GPU:1", taken=["b1-0"]) == [["o1-0"], ["o1-1"]]
    assert placed(mixed(TWO, OWN), "GPU:1", "GPU:1", taken=["b1-0", "o1-0"]) is None


def test_mixed_devices_are_of_vendors_that_go_together():
    assert placed(mixed(OWN, TWO), "GPU:3,mixed") is None
    assert placed(mixed(OWN, TWO), "GPU:2,mixed", taken=["o1-0"]) == [["b1-0", "b1-1"]]
    assert placed(mixed(OWN, TWO, LAST), "GPU:4,mixed", taken=["o1-0"]) == [["b1-0", "b1-1", "p1-0", "p1-1"]]
    assert placed(mixed(OWN, TWO, MORE, LAST), "GPU:5,mixed") is None


def test_a_vendor_that_is_not_on_the_machine_keeps_no_vendors_apart():
    assert placed(mixed(TWO, LAST), "GPU:4,mixed") == [["b1-0", "b1-1", "p1-0", "p1-1"]]
    assert not Scheduler(mixed(TWO, LAST)).why("GPU:5,mixed").fits_now


def test_why_names_both_the_variable_and_the_way_out():
    verdict = Scheduler(mixed(OWN, TWO, LAST)).why(["owner:1", "borrower:1"])

    (reason,) = verdict.reasons
    assert reason.code is ReasonCode.VARIABLE
    assert set(reason.devices) == {"o1-0", "b1-0"}
    assert str(verdict) == (
        "owner:1 borrower:1 can never fit: owner and borrower both obey the variable LIST, and no value of it means"
        " devices of both, so one worker cannot have them together.\n"
        "ask for their devices in separate commands\n"
        "nearest that fits: owner:1"
    )


def test_what_else_is_in_the_way_is_told_first():
    verdict = Scheduler(mixed(OWN, TWO)).why(["owner:3", "borrower:1"])

    assert [reason.code for reason in verdict.reasons] == [ReasonCode.NOT_ENOUGH]


def test_devices_of_one_tag_and_two_vendors_are_not_mixed_unasked():
    """Two vendors sell cards of one name: a request by that name gets cards of one of them."""
    one, other = gpus(2, "S60", vendor="owner"), gpus(2, "S60", vendor="polite")
    other = tuple(replace(device, id=f"other-{device.index}", links={}) for device in other)
    inventory = mixed(one, other)
    assert placed(inventory, "S60:2") == [["s60-0", "s60-1"]]
    assert placed(inventory, "S60:2", taken=["s60-0"]) == [["other-0", "other-1"]]
    assert placed(inventory, "S60:3") is None
    assert placed(inventory, "polite:1") == [["other-0"]]
    assert placed(inventory, "S60:4,mixed") == [["s60-0", "s60-1", "other-0", "other-1"]]
