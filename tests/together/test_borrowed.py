"""Vendors whose runtimes obey another's variable, beside its owner. Needs the vendors' plug-ins."""

import json
from collections import defaultdict
from importlib.metadata import entry_points

import anyaccel as aa
import pytest

CUDA, HIP, MACA, MUSA = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES"
PRODUCTS = {
    "nvidia": "H100:2",
    "amd": "AMD-Instinct-MI300X-OAM:2",
    "metax": "MXC500:2",
    "iluvatar": "BI-V150:2",
    "hygon": "K100_AI:2",
    "moorethreads": "MTT-S4000:2",
}
RIVALS = [
    ("metax", "nvidia", CUDA),
    ("iluvatar", "nvidia", CUDA),
    ("metax", "iluvatar", CUDA),
    ("hygon", "amd", HIP),
    ("hygon", "nvidia", CUDA),
    ("hygon", "metax", CUDA),
]


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    """No other vendor is asked; TPUs have nothing to do with any of them."""
    monkeypatch.setenv("ANYACCEL_PLUGINS", ",".join([*PRODUCTS, "tpu"]))


def sim(*vendors):
    return "sim:" + ",".join(PRODUCTS[vendor] for vendor in vendors)


def environment(request, machine, environ=None, **options):
    return aa.prepare(request, machine=machine, environ=environ or {}, **options).environment


@pytest.mark.parametrize(("one", "other", "variable"), RIVALS)
def test_devices_of_both_are_refused_with_both_names_and_the_variable(one, other, variable, anyaccel):
    machine = sim(one, other)
    done = anyaccel("--machine", machine, "run", f"{one}:1", f"{other}:1", "--", "true")
    said = f"{one} and {other} both obey the variable {variable}, and no value of it means devices of both"
    assert (done.returncode, said in done.stderr) == (3, True)
    assert "ask for their devices in separate commands" in done.stderr
    why = json.loads(anyaccel("--json", "--machine", machine, "why", f"{one}:1", f"{other}:1").stdout)
    assert [reason["code"] for reason in why["reasons"]] == ["variable"]


@pytest.mark.parametrize(("one", "other", "variable"), RIVALS)
def test_one_of_them_is_served_and_says_what_may_be_open(one, other, variable, anyaccel):
    machine = sim(one, other)
    for vendor, rival in ((one, other), (other, one)):
        done = anyaccel("--machine", machine, "run", f"{vendor}:1", "--mask", "index", "--", "printenv", variable)
        assert (done.returncode, done.stdout) == (0, "0\n")
        hidden = rival == "hygon" and variable == CUDA  # by its other variable
        assert (f"devices of {rival} may be open to the worker: {variable}=" in done.stderr) is not hidden
    assert environment("GPU:2", machine).allocation.devices[0].vendor in (one, other)


@pytest.mark.parametrize(("one", "other", "variable"), RIVALS)
def test_where_one_is_alone_nothing_is_said(one, other, variable):
    for vendor in (one, other):
        made = environment(f"{vendor}:2", sim(vendor))
        assert (len(made.allocation.devices), made.allocation.gaps) == (2, ())
        assert variable in made.set


def test_a_worker_without_any_of_them_sees_none_of_them():
    made = environment("TPU:4", sim(*PRODUCTS) + ",TPU-V4:4")
    assert made.allocation.gaps == ()
    assert (made.set[CUDA], made.set[HIP], made.set[MACA], made.set[MUSA]) == ("", "-1", "", "")


def test_the_own_variable_of_the_borrower_hides_it_beside_the_owner():
    made = environment("nvidia:1", sim("metax", "nvidia"), mask="index")
    assert (made.set[CUDA], made.set[MACA]) == ("0", "")


def test_a_variable_that_is_only_cleared_keeps_no_vendors_apart():
    """Moore Threads' runtime does not obey it; neither does AMD's beside its own."""
    made = environment(["moorethreads:1", "nvidia:1"], sim("moorethreads", "nvidia"), mask="index")
    assert (made.set[CUDA], made.set[MUSA], made.allocation.gaps) == ("0", "0", ())
    hidden = environment("moorethreads:1", sim("moorethreads", "nvidia"), environ={CUDA: "1"})
    assert (hidden.set[CUDA], hidden.set[MUSA], hidden.allocation.gaps) == ("", "0", ())
    alone = environment("moorethreads:1", sim("moorethreads"), environ={CUDA: "1"})
    assert alone.unset == {CUDA}
    both = environment(["amd:1", "nvidia:1"], sim("amd", "nvidia"), mask="index")
    assert (both.set[CUDA], both.set[HIP], both.allocation.gaps) == ("0", "0", ())


def test_mixed_devices_are_of_vendors_that_go_together():
    machine = sim("metax", "nvidia", "moorethreads")
    vendors = {device.vendor for device in environment("GPU:4,mixed", machine).allocation.devices}
    assert vendors in ({"metax", "moorethreads"}, {"nvidia", "moorethreads"})
    with pytest.raises(aa.NeverFitsError, match="both obey the variable CUDA_VISIBLE_DEVICES"):
        environment("GPU:6,mixed", machine)


def test_no_name_of_a_product_means_products_of_two_vendors():
    """P100, S60 and S90 are names of several vendors' cards: one of them has the name, others a longer one."""
    makers = defaultdict(set)
    for point in entry_points(group="anyaccel"):
        for product in point.load().anyaccel_products():
            for name in (product.name, *product.aliases):
                makers[name.casefold()].add(point.name)
    assert len(makers["mtt-s60"]) == len(makers["p100"]) == 1
    assert {name: found for name, found in makers.items() if len(found) > 1} == {}
