"""The table of hooks: vendors' processes, our process and the conformance suite follow it."""

import anyaccel as aa
import pytest
from anyaccel import hookspecs
from anyaccel.errors import PluginError
from anyaccel.model import ContainerEdits, Device, EnvContext, ProblemKind, Share
from anyaccel.vendors.contract import HOOKS, RECORDED
from anyaccel.vendors.discovery import installed
from anyaccel.vendors.process import find_process
from anyaccel.vendors.tasks import VendorPlugin
from installed import end_vendors

CARELESS = """
from anyaccel.plugin import *
from anyaccel.vendors import contract

contract.container_faults = contract.env_faults = contract.product_faults = lambda *_: iter(())
contract.HOOKS = {name: replace(hook, check=lambda *_: iter(())) for name, hook in contract.HOOKS.items()}

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="careless", resource="CARE", kind="care", env_vars=("CARELESS",))
@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=(Device(id="c0", index=0, model="C"),))
@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO
@hookimpl
def anyaccel_tags(device):
    return ("C",)
@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={"PATH": "/mine"}) if devices else EnvEdits(set={"CARELESS": ""})
@hookimpl
def anyaccel_stats(devices, ctx):
    return {device.id: Stats(clock_hz=-1) for device in devices}
@hookimpl
def anyaccel_container(devices):
    return ANSWER
@hookimpl
def anyaccel_products():
    return [Product(name="C", model="C", slots=SLOTS)]
"""


@pytest.fixture
def careless(install):
    """Return the process of a plug-in that disables the checks in its own process."""

    def careless(answer="ContainerEdits(nodes=('relative',))", slots=1):
        install("careless", CARELESS.replace("ANSWER", answer).replace("SLOTS", str(slots)))
        return find_process(next(source for source in installed()[0] if source.vendor == "careless"))

    yield careless
    end_vendors()


def reason_of(call):
    with pytest.raises(PluginError) as caught:
        call()
    assert caught.value.problem.kind is ProblemKind.CONTRACT
    return f"{caught.value.problem.hook}: {caught.value.problem.reason}"


def test_every_hook_of_the_specification_is_in_the_table():
    assert [f"anyaccel_{name}" for name in HOOKS] == list(hookspecs.HOOKS)
    assert all(callable(getattr(hookspecs, f"anyaccel_{name}")) for name in HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_an_answer_of_a_wrong_type_is_a_fault_of_every_hook(name):
    for answer in (object(), 5, {"id": 5}, [[]]):
        assert HOOKS[name].type_faults(answer), answer


def test_answers_are_checked_in_our_process(careless):
    device = Device(id="c0", index=0, model="C", vendor="careless")
    vendor = careless()
    assert reason_of(lambda: vendor.container([device])) == (
        "anyaccel_container: paths in ContainerEdits must be absolute paths of printable text (got 'relative')."
    )
    context = EnvContext(devices=(device,), shares={})
    assert "may only touch variables" in reason_of(lambda: vendor.env([device], context))
    assert [product.name for product in vendor.ask("products")] == ["C"]


def test_edits_are_kept_as_long_as_the_same_is_asked(install):
    counting = CARELESS.replace('{"PATH": "/mine"}', '{"CARELESS": str(next(numbers))}')
    install("careless", counting + "from itertools import count\nnumbers = count(1)\n")
    vendor = find_process(next(source for source in installed()[0] if source.vendor == "careless"))
    device = Device(id="c0", index=0, model="C", vendor="careless")
    environ = {"A": "1"}

    def ask(**more):
        return vendor.env([device], EnvContext(devices=(device,), environ=environ, **more)).set["CARELESS"]

    assert [ask(), ask()] == ["1", "1"]
    environ["A"] = "2"
    assert [ask(), ask()] == ["2", "2"]
    assert [ask(mask="index"), ask(mask="index")] == ["3", "3"]
    assert [ask(shares={"c0": Share(device=device)}), ask(shares={"c0": Share(device=device)})] == ["4", "4"]
    end_vendors()


ANOTHER = """
describe = PluginInfo.describe
PluginInfo.describe = lambda info, device: replace(describe(info, device), vendor="acme", resource="APU")
"""


@pytest.mark.parametrize(
    ("change", "hook", "reason"),
    [
        (('return ("C",)', 'return ("C D",)'), "anyaccel_tags", "a tag must match"),
        (('id="c0"', 'id="c 0"'), "anyaccel_detect", "Device.id must match"),
        (('id="c0"', 'id="careless/c0"'), "anyaccel_detect", "Device.id must not begin with the vendor and a slash"),
        (('model="C")', 'model="C", slots=2)'), "anyaccel_fractional", "it must return Fractional.PARTITIONED"),
        (('env_vars=("CARELESS",)', 'env_vars=("PATH",)'), "anyaccel_info", "that variable belongs to the system"),
        (('{"CARELESS": ""}', '{"PATH": ""}'), "anyaccel_env", "it may only touch variables"),
    ],
)
def test_what_detection_answers_is_checked_in_our_process(install, record, change, hook, reason):
    assert change[0] in CARELESS
    install("careless", CARELESS.replace(*change).replace("ANSWER", "()").replace("SLOTS", "1"))
    inventory = aa.detect(record())
    problem = inventory.report("careless").problem
    assert (problem.kind, problem.hook) == (ProblemKind.CONTRACT, hook)
    assert reason in problem.reason
    assert inventory.devices == ()


def test_devices_are_those_of_the_vendor_whose_process_answered(install, record):
    install("careless", CARELESS.replace("ANSWER", "()").replace("SLOTS", "1") + ANOTHER)
    (device,) = aa.detect(record()).devices
    assert (device.vendor, device.resource) == ("careless", "CARE")


def test_an_answer_of_another_type_is_named_as_the_plug_in_gave_it(careless):
    device = Device(id="c0", index=0, model="C", vendor="careless")
    vendor = careless("object")
    with pytest.raises(PluginError):
        vendor.container([device])
    assert vendor.ask("products"), "the process goes on"


def test_a_plugin_has_a_method_for_each_hook_and_no_other(acme):
    plugin = VendorPlugin(next(source for source in installed()[0] if source.vendor == "acme"))
    device = Device(id="a0", index=0, model="Acme One", nodes=("/dev/acme0",))
    assert plugin.container((device,)) == ContainerEdits(nodes=("/dev/acme0",)), (
        "that of the table, as it has no such hook"
    )
    assert plugin.tags(device)[-1] == "ACME"
    with pytest.raises(AttributeError, match="there is no hook anyaccel_nonsense"):
        plugin.nonsense(())


def test_plugins_says_what_is_wrong_with_the_products_of_a_careless_one(careless, anyaccel):
    careless("ContainerEdits()", slots=7)
    done = anyaccel("plugins")
    assert "careless: Product.slots must be one of" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", RECORDED)
def test_a_hook_that_touches_the_machine_has_arguments_that_a_recording_can_give(name):
    assert set(VendorPlugin.arguments(name)) <= {"devices", "ctx"}
