"""Typical mistakes of plug-in authors, and the messages about them."""

import types
from pathlib import Path

import pytest
from anyaccel.errors import PluginError
from anyaccel.kit import FaultError, Vendor
from anyaccel.model import (
    ContainerEdits,
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Fractional,
    PluginInfo,
    ProblemKind,
    Stats,
    Term,
)
from anyaccel.plugin import hookimpl
from anyaccel.vendors.discovery import Source
from anyaccel.vendors.tasks import VendorPlugin
from anyaccel_testing import context

DEVICE = Device(id="a0", index=0, model="A")
ACME = (Path(__file__).parent / "acme.py").read_text()
EMPTY = {"schema": "anyaccel.recording/1"}


def module(**changes):
    """Make a module with the required hooks, some changed, added, or removed with None."""
    hooks = {
        "anyaccel_info": lambda: PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=("ACME",)),
        "anyaccel_detect": lambda ctx: Detected(devices=(DEVICE,)),
        "anyaccel_fractional": lambda device: Fractional.NO,
        "anyaccel_tags": lambda device: ("A",),
        "anyaccel_env": lambda devices, ctx: EnvEdits(set={"ACME": ""}),
    } | changes
    made = types.ModuleType("anyaccel_acme")
    for name, function in hooks.items():
        if function is not None:
            setattr(made, name, hookimpl(function))
    return made


def load(plugin=None, **source):
    made = Source(
        **{"vendor": "acme", "target": "anyaccel_acme", "distribution": "anyaccel-acme", "version": "0.3"} | source
    )
    return VendorPlugin(made, plugin)


def reason(caught):
    return caught.value.problem.reason


def test_a_correct_plugin_loads():
    plugin = load(module())
    assert plugin.info.resource == "APU"
    assert plugin.detect(context(EMPTY)) == Detected(devices=(DEVICE,))
    assert plugin.implements("anyaccel_env")
    assert not plugin.implements("anyaccel_stats")


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (
            {"counts": (2, 1)},
            "PluginInfo.counts must be numbers of devices from 1 on, in ascending order (got (2, 1)).",
        ),
        (
            {"counts": (1, 1)},
            "PluginInfo.counts must be numbers of devices from 1 on, in ascending order (got (1, 1)).",
        ),
        ({"counts": (0,)}, "PluginInfo.counts must be numbers of devices from 1 on, in ascending order (got (0,))."),
        ({"borrowed": ("ELSE",)}, "PluginInfo.borrowed must hold variables of env_vars (got 'ELSE'); add it there."),
        ({"cleared": ("ELSE",)}, "PluginInfo.cleared must hold variables of env_vars (got 'ELSE'); add it there."),
        (
            {"borrowed": ("ACME",), "cleared": ("ACME",)},
            "PluginInfo.cleared must not hold 'ACME', which is borrowed: the vendor's runtime obeys it.",
        ),
        ({"exclusive": "so\nit is"}, "PluginInfo.exclusive must be printable text (got 'so\\nit is')."),
    ],
)
def test_what_cannot_be_is_refused(said, fault):
    info = PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=("ACME",), **said)
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_info=lambda: info))
    assert reason(caught) == fault


def test_what_was_raised_with_a_remedy_is_told_in_the_plug_ins_own_words():
    def detect(ctx):
        raise FaultError("the driver does not answer", "reload it")

    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_detect=detect)).detect(context(EMPTY))
    problem = caught.value.problem
    assert (problem.kind, problem.reason) == (ProblemKind.RAISED, "the driver does not answer")
    assert problem.next_step == "reload it"


@pytest.mark.parametrize("fault", ["text", ("reason",), (1, 2), None])
def test_an_error_whose_fault_is_none_is_told_as_any_other(fault):
    def detect(ctx):
        error = RuntimeError("boom")
        error.fault = fault
        raise error

    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_detect=detect)).detect(context(EMPTY))
    assert reason(caught) == "it raised RuntimeError: boom"


def test_hooks_that_are_not_implemented_have_their_default():
    plugin = load(module())
    term = Term(names=("APU",))
    device = Device(id="a", index=0, model="A", nodes=("/dev/a", "/dev/all"))
    assert plugin.visible({}, [DEVICE]) == (None, [])
    assert plugin.validate(term, [DEVICE]) is None
    assert plugin.stats([DEVICE], context(EMPTY)) == {}
    assert plugin.container([device, device]).nodes == ("/dev/a", "/dev/all")
    assert plugin.diagnose(context(EMPTY)) == ()
    assert plugin.products() == ()


def test_the_whole_message_names_subject_rule_value_and_way_out():
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_tags=None))
    assert str(caught.value) == (
        "anyaccel-acme 0.3 (vendor 'acme'): anyaccel_acme has no anyaccel_tags, which is required. "
        "Other vendors are unaffected. Run 'anyaccel plugins acme' for the details, or set ANYACCEL_DISABLE=acme to "
        "leave it out."
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "no_such_package",
            "importing 'no_such_package' raised ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (
            "anyaccel:no.such",
            "importing 'anyaccel:no.such' raised AttributeError: module 'anyaccel' has no attribute 'no'",
        ),
        ("json", "json has no anyaccel_info, which is required; "),
    ],
)
def test_the_entry_point_names_the_wrong_thing(target, message):
    with pytest.raises(PluginError) as caught:
        load(target=target)
    assert reason(caught).startswith(message)


def test_the_entry_point_names_a_class_instead_of_an_instance():
    class Acme(Vendor):
        """A vendor."""

    with pytest.raises(PluginError) as caught:
        load(Acme)
    assert reason(caught) == "Acme is a class; the entry point must name an instance of it: plugin = Acme()."


def test_what_a_hook_raised_is_told_with_its_line_and_as_a_sentence(install):
    path = install("acme", ACME.replace('ctx.exists("', 'ctx.exist("'))
    line = next(number for number, text in enumerate(path.read_text().splitlines(), start=1) if "ctx.exist(" in text)
    plugin = load(target=path.stem)
    with pytest.raises(PluginError) as caught:
        plugin.detect(context(EMPTY))
    told = f"it raised AttributeError: 'ProbeContext' object has no attribute 'exist' ({path.name}, line {line})"
    assert reason(caught) == told
    assert f"{told}. Other vendors are unaffected." in str(caught.value)


def test_the_vendor_key_differs_from_the_entry_point():
    info = PluginInfo(vendor="acme-inc", resource="APU", kind="apu", env_vars=())
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_info=lambda: info))
    assert reason(caught) == (
        "PluginInfo.vendor must equal the name of the entry point (got 'acme-inc', the entry point is 'acme'); change "
        "one of the two; PluginInfo.vendor must match [a-z][a-z0-9_]{0,31} (got 'acme-inc')."
    )


def test_an_unknown_hook_offers_the_close_one():
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_detekt=lambda ctx: None))
    assert reason(caught) == "anyaccel_detekt is no hook; did you mean anyaccel_detect?"


def test_an_unknown_argument_names_those_that_are_passed():
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_env=lambda devices, ctx, shares: EnvEdits()))
    assert reason(caught) == "anyaccel_env takes 'shares', which the hook does not pass; it passes (devices, ctx)."


def test_an_argument_with_a_default_would_never_be_passed():
    def anyaccel_detect(ctx=None):
        return None

    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_detect=anyaccel_detect))
    assert reason(caught) == ("anyaccel_detect gives 'ctx' a default, so it would never be passed; remove the default.")


def test_a_hook_without_its_decorator():
    made = module()
    made.anyaccel_tags = lambda device: ()
    with pytest.raises(PluginError) as caught:
        load(made)
    assert reason(caught) == "anyaccel_tags lacks the decorator @hookimpl (from anyaccel.plugin import hookimpl)."


def test_a_string_where_a_sequence_is_due():
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_tags=lambda device: "A100")).tags(DEVICE)
    assert reason(caught) == ("it must return a list or tuple of tags (got 'A100' that is a str); write ('A100',).")
    assert caught.value.problem.hook == "anyaccel_tags"


def test_a_variable_that_is_not_owned():
    plugin = load(module(anyaccel_env=lambda devices, ctx: EnvEdits(set={"OTHER": "1"})))
    with pytest.raises(PluginError) as caught:
        plugin.env([DEVICE], EnvContext(devices=(DEVICE,)))
    assert reason(caught) == ("it may only touch variables that PluginInfo.env_vars lists (got 'OTHER'); add it there.")


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "PYTHONPATH", "ANYACCEL_DEVICES", "HOME"])
def test_a_variable_of_the_system_cannot_be_owned(name):
    info = PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=(name,))
    with pytest.raises(PluginError, match="belongs to the system"):
        load(module(anyaccel_info=lambda: info))


def test_a_bool_where_a_fractional_is_due():
    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_fractional=lambda device: True)).fractional(DEVICE)
    assert reason(caught) == (
        "it must return Fractional.NO, Fractional.SHARED or Fractional.PARTITIONED (got True that is a bool)."
    )


def test_a_hook_that_raises_says_what():
    def anyaccel_validate(request, devices):
        raise KeyError("chips")

    with pytest.raises(PluginError) as caught:
        load(module(anyaccel_validate=anyaccel_validate)).validate(Term(names=("APU",)), [DEVICE])
    assert (caught.value.problem.kind, reason(caught)) == (ProblemKind.RAISED, "it raised KeyError: 'chips'")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("hook", "value", "call", "message"),
    [
        ("anyaccel_validate", lambda request, devices: False, lambda p: p.validate(Term(names=("A",)), [DEVICE]),
         "it must return a sentence with the rule, or None (got False that is a bool)."),
        ("anyaccel_visible", lambda environ, devices: ["zz"], lambda p: p.visible({}, [DEVICE]),
         "it must return ids of the given devices (got 'zz')."),
        ("anyaccel_visible", lambda environ, devices: ["a0", "a0"], lambda p: p.visible({}, [DEVICE]),
         "a visible id must be unique (got 'a0' more than once)."),
        ("anyaccel_stats", lambda devices, ctx: {"a0": Stats(clock_hz=-1)},
         lambda p: p.stats([DEVICE], context(EMPTY)), "Stats.clock_hz must not be negative (got -1 for 'a0')."),
        ("anyaccel_container", lambda devices: ContainerEdits(groups=(1 << 32,)),
         lambda p: p.container([DEVICE]),
         "ContainerEdits.groups must be numbers of groups, from 0 to 4294967294 (got 4294967296)."),
        ("anyaccel_stats", lambda devices, ctx: {"a0": 5}, lambda p: p.stats([DEVICE], context(EMPTY)),
         "stats['a0'] must be Stats (got 5 that is a int)."),
        ("anyaccel_env", lambda devices, ctx: EnvEdits(set={"ACME": "a\0b"}),
         lambda p: p.env([], EnvContext(devices=())), "the value of 'ACME' must not hold a NUL character."),
        ("anyaccel_env", lambda devices, ctx: EnvEdits(set={"ACME": ""}, unset=frozenset({"ACME"})),
         lambda p: p.env([], EnvContext(devices=())), "it must not set and unset 'ACME' at once."),
        ("anyaccel_products", lambda: ["A1"], lambda p: p.products(),
         "Products[0] must be Product (got 'A1' that is a str)."),
    ],
)  # fmt: skip
def test_an_answer_that_breaks_the_contract(hook, value, call, message):
    with pytest.raises(PluginError) as caught:
        call(load(module(**{hook: value})))
    assert (caught.value.problem.kind, reason(caught)) == (ProblemKind.CONTRACT, message)


def test_warnings_of_visible_are_handed_on():
    def anyaccel_visible(environ, devices):
        import warnings

        warnings.warn("ACME names a device twice", stacklevel=1)
        return []

    assert load(module(anyaccel_visible=anyaccel_visible)).visible({}, [DEVICE]) == ([], ["ACME names a device twice"])
