"""The environment of a worker: every vendor's edits merged, the unallocated hidden, nothing applied to ourselves."""

import os

import anyaccel as aa
import pytest
from anyaccel.errors import EnvConflictError, PluginError

RIVAL = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="rival", resource="RPU", kind="rpu", env_vars=("RIVAL", "ACME_VISIBLE", "ACME_ORDER"))
@hookimpl
def anyaccel_detect(ctx):
    {detect}
@hookimpl
def anyaccel_fractional(device): return Fractional.PARTITIONED
@hookimpl
def anyaccel_tags(device): return ("R1",)
@hookimpl
def anyaccel_env(devices, ctx):
    {env}
@hookimpl
def anyaccel_products(): return [Product(name="R1", model="R", memory_bytes=100, id_template="rival-{{index}}")]
"""
PLAIN = 'return EnvEdits(set={"RIVAL": ",".join(d.id for d in devices)}, memory_by="R-cap" if ctx.shares else "")'


@pytest.fixture
def rival(install):
    def rival(env=PLAIN, detect="return Detected()"):
        install("rival", RIVAL.format(env=env, detect=detect), distribution="rival")

    return rival


def environment(request, machine, **options):
    return aa.prepare(request, machine=machine, **options).environment


def test_a_worker_sees_exactly_what_it_was_given(acme):
    made = environment("APU:2", "sim:Acme-Whole:4", environ={"X": "1", "ACME_ORDER": "wild"})
    assert made.values["ACME_VISIBLE"] == made.values["ANYACCEL_DEVICES"] == "acme-0,acme-1"
    assert made.unset == {"ACME_ORDER"}
    assert "ACME_ORDER" not in made.values
    assert made.values["X"] == "1"
    assert "ACME_VISIBLE" not in os.environ


def test_masks_name_indexes_on_demand(acme):
    assert environment("APU:2", "sim:Acme-Whole:4", mask="index").values["ACME_VISIBLE"] == "0,1"


def test_two_vendors_serve_one_request(acme, rival):
    rival()
    made = environment(["APU:1", "R1:2"], "sim:Acme-Whole:4,R1:4")
    assert (made.values["ACME_VISIBLE"], made.values["RIVAL"]) == ("acme-0", "rival-0,rival-1")
    assert made.values["ANYACCEL_DEVICES"] == "acme-0,rival-0,rival-1"


def test_vendors_of_which_nothing_was_given_are_hidden(acme, rival):
    rival()
    machine = "sim:Acme-Whole:4,R1:4"
    assert environment("APU", machine).values["RIVAL"] == ""
    inherited = environment("APU", machine, unallocated="inherit", environ={"RIVAL": "rival-3"})
    assert inherited.values["RIVAL"] == "rival-3"


def test_a_vendor_whose_detection_failed_is_hidden_too(acme, rival, record):
    rival(detect="raise OSError('library too old')")
    assert environment("APU", record({})).values["RIVAL"] == ""


def test_a_vendor_that_is_not_here_leaves_the_environment_alone(acme, rival, record):
    rival(detect="return None")
    assert "RIVAL" not in environment("APU", record({})).values


def test_two_vendors_that_set_one_variable_differently_are_refused(acme, rival):
    rival(env='return EnvEdits(set={"ACME_VISIBLE": "mine"})')
    with pytest.raises(aa.EnvConflictError) as caught:
        environment(["APU", "R1"], "sim:Acme-Whole:4,R1:4")
    assert str(caught.value) == (
        "acme and rival set the variable ACME_VISIBLE differently ('acme-0' and 'mine'), so one worker cannot hold "
        "this combination; ask for their devices in separate commands"
    )


def test_vendors_that_agree_are_not_named_as_a_conflict(acme, rival, install):
    rival(env='return EnvEdits(set={"ACME_VISIBLE": "acme-0"})')
    third = RIVAL.format(env='return EnvEdits(set={"ACME_VISIBLE": "mine"})', detect="return Detected()")
    for old, new in (("rival", "third"), ("R1", "T1"), ("RPU", "XPU")):
        third = third.replace(old, new)
    install("third", third, distribution="third")
    with pytest.raises(aa.EnvConflictError, match="acme and third set the variable ACME_VISIBLE differently"):
        environment(["APU", "R1", "T1"], "sim:Acme-Whole:4,R1:4,T1:4")


def test_what_is_given_wins_over_what_is_hidden(acme, rival):
    rival(env='return EnvEdits(set={"ACME_ORDER": "pci"})')  # which acme unsets
    assert environment("R1", "sim:Acme-Whole:4,R1:4").values["ACME_ORDER"] == "pci"
    made = environment("APU", "sim:Acme-Whole:4,R1:4", environ={"ACME_ORDER": "old"})
    assert "ACME_ORDER" not in made.values
    assert made.allocation.gaps == (
        "devices of rival may be open to the worker: ACME_ORDER='pci' hides them, and acme needs it unset",
    )


def test_set_against_unset_among_the_given_is_refused_with_both_names(acme, rival):
    rival(env='return EnvEdits(set={"ACME_ORDER": "pci"})')
    with pytest.raises(EnvConflictError, match=r"rival sets the variable ACME_ORDER \(to 'pci'\), which acme unsets"):
        environment(["APU", "R1"], "sim:Acme-Whole:4,R1:4")


CLEARS = 'return EnvEdits(set={"RIVAL": ",".join(d.id for d in devices)}, unset=frozenset({"ACME_VISIBLE"}))'


@pytest.fixture
def polite(install):
    """A vendor that clears the variable of another one, whose programs would be misled by it."""
    source = RIVAL.format(env=CLEARS, detect="return Detected()")
    owned = 'env_vars=("RIVAL", "ACME_VISIBLE", "ACME_ORDER")'
    assert owned in source
    install("rival", source.replace(owned, owned + ', cleared=("ACME_VISIBLE",)'), distribution="rival")


def test_what_is_only_cleared_stays_with_a_vendor_that_obeys_it(acme, polite):
    machine = "sim:Acme-Whole:4,R1:4"
    both = environment(["APU", "R1"], machine)
    assert (both.values["ACME_VISIBLE"], both.values["RIVAL"]) == ("acme-0", "rival-0")
    alone = environment("R1", machine, environ={"ACME_VISIBLE": "acme-3"})
    assert (alone.values["ACME_VISIBLE"], alone.allocation.gaps) == ("", ())
    inherited = environment("R1", machine, unallocated="inherit", environ={"ACME_VISIBLE": "acme-3"})
    assert inherited.values["ACME_VISIBLE"] == "acme-3"  # to clear it would show all of them


def test_what_is_cleared_goes_where_no_vendor_reads_it(acme, polite, record):
    made = environment("R1", "sim:R1:4", environ={"ACME_VISIBLE": "acme-3"})
    assert "ACME_VISIBLE" not in made.values
    assert made.unset == {"ACME_VISIBLE"}


def test_set_against_unset_is_never_silent(acme, rival):
    """A vendor that empties the variable of another one without saying so costs that one's worker its devices."""
    rival(env='return EnvEdits(set={"RIVAL": "", "ACME_VISIBLE": ""})')
    made = environment("APU", "sim:Acme-Whole:4,R1:4")
    assert made.values["ACME_VISIBLE"] == "acme-0"
    assert made.allocation.gaps == (
        "devices of rival may be open to the worker: ACME_VISIBLE='' hides them, and acme needs it to be 'acme-0'",
    )


def test_a_vendor_that_cannot_hide_its_devices_costs_itself_alone(acme, rival):
    rival(env='raise ValueError("no idea")')
    made = environment("APU", "sim:Acme-Whole:4,R1:4")
    assert made.values["ACME_VISIBLE"] == "acme-0"
    (gap,) = made.allocation.gaps
    assert gap == (
        "devices of rival may be open to the worker: it raised ValueError: no idea (plug_rival.py, line 15);"
        " see 'anyaccel plugins rival', or set ANYACCEL_DISABLE=rival where there are none"
    )


def test_no_mask_no_launch(acme, rival):
    rival(env='if devices: raise ValueError("no idea")\n    return EnvEdits()')
    with pytest.raises(
        PluginError,
        match=r"rival 1.2.3 \(vendor 'rival'\): anyaccel_env: it raised ValueError: no idea",
    ):
        environment("R1", "sim:Acme-Whole:4,R1:4")


def test_every_share_says_what_enforces_it(acme, rival):
    rival()
    made = environment(["A1:0.5", "R1:0.25"], "sim:A1:1,R1:1")
    assert [share.enforced_by for share in made.allocation.shares] == [
        "by agreement",
        "memory: R-cap, compute: by agreement",
    ]
    assert [share.memory_bytes for share in made.allocation.shares] == [8 << 30, 25]
    assert "ANYACCEL_MEMORY_LIMIT" not in made.values  # two limits are no limit
    assert environment("A1:0.5", "sim:A1:1,R1:1").values["ANYACCEL_MEMORY_LIMIT"] == str(8 << 30)


def test_a_stale_limit_is_not_inherited(acme):
    made = environment("A1:1", "sim:A1:1", environ={"ANYACCEL_MEMORY_LIMIT": "5"})
    assert made.unset == {"ANYACCEL_MEMORY_LIMIT"}
    assert "ANYACCEL_MEMORY_LIMIT" not in made.values


def test_a_worker_of_this_host_does_not_inherit_another_machine(acme):
    made = environment("FPGA:1", "host", declare={"FPGA": 1}, environ={"ANYACCEL_MACHINE": "sim:A1:1"})
    assert made.unset == {"ANYACCEL_MACHINE"}
    assert "ANYACCEL_MACHINE" not in made.values


def test_declared_devices_set_no_vendor_variable(acme):
    made = environment("FPGA:2", "sim:Acme-Whole:1", declare={"FPGA": 4})
    assert made.values["ANYACCEL_DEVICES"] == "declared-FPGA-0,declared-FPGA-1"
    assert made.values["ACME_VISIBLE"] == ""


def test_a_large_allocation_fits_into_a_variable(acme):
    made = environment("A1:256,mixed", "sim:A1:256")
    assert max(map(len, made.values.values())) < 131_072  # the kernel's limit for one variable
