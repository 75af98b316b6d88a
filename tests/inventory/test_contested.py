"""No request gets a device of two vendors until only one plug-in is enabled."""

import json

import anyaccel as aa
import pytest
from anyaccel.model import Health
from two_plugins import plugin

FUNCTION = 'pci_bus_id="0000:c1:00.0"'


@pytest.fixture
def detect(install):
    """Install one plug-in for each list of devices, and return the devices by id."""

    def detect(control_nodes=(), **vendors):
        for vendor, devices in vendors.items():
            install(vendor, plugin(vendor, *devices, control_nodes=control_nodes))
        return {device.id: device for device in aa.detect().devices}

    return detect


def refused(devices):
    return {name for name, device in devices.items() if not device.usable}


def test_a_pci_function_that_two_vendors_list(detect, anyaccel):
    found = detect(one=[f'id="one-0", {FUNCTION}', 'id="one-1"'], two=[f'id="two-0", {FUNCTION}'])
    assert refused(found) == {"one-0", "two-0"}
    for device in (found["one-0"], found["two-0"]):
        assert device.health is Health.UNHEALTHY
        assert device.health_reason == "the plug-ins one and two both list PCI function 0000:c1:00.0"
        assert device.health_remedy == (
            "leave all but one of these plug-ins out: set ANYACCEL_DISABLE=two or ANYACCEL_DISABLE=one, or uninstall"
            " them"
        )
    verdict = aa.open_scheduler(aa.detect()).why("two:1")
    assert not verdict.ever_fits
    assert "the plug-ins one and two both list PCI function 0000:c1:00.0" in verdict.message
    done = anyaccel("status", "--json")
    reasons = [device["health_reason"] for device in json.loads(done.stdout)["devices"]]
    assert reasons == [found["one-0"].health_reason, None, found["two-0"].health_reason]
    done = anyaccel("doctor")
    assert done.stdout.count("both list PCI function 0000:c1:00.0") == 2
    done = anyaccel("run", "two:1", "--no-wait", "--", "true")
    assert done.returncode == 3
    assert "the plug-ins one and two both list" in done.stderr
    done = anyaccel("run", "two:1", "--", "printenv", "TWO_VISIBLE", env={"ANYACCEL_DISABLE": "one"})
    assert (done.returncode, done.stdout) == (0, "two-0\n")


def test_three_vendors_are_all_named(detect):
    found = detect(one=[f'id="a", {FUNCTION}'], two=[f'id="b", {FUNCTION}'], three=[f'id="c", {FUNCTION}'])
    assert refused(found) == {"a", "b", "c"}
    assert found["a"].health_reason == "the plug-ins one and three and two all list PCI function 0000:c1:00.0"
    assert "ANYACCEL_DISABLE=three,two or ANYACCEL_DISABLE=one,two" in found["a"].health_remedy


@pytest.mark.parametrize("own", ['nodes=("/dev/x0",)', 'occupies=("/sys/class/x/x0",)'])
def test_a_node_or_a_part_that_two_vendors_list(own, detect):
    found = detect(one=[f'id="one-0", {own}', 'id="one-1"'], two=[f'id="two-0", {own}', 'id="two-1"'])
    assert refused(found) == {"one-0", "two-0"}
    assert "/x" in found["one-0"].health_reason


def test_a_node_and_the_function_that_the_kernel_has_behind_it_are_one_device(install, tmp_path, monkeypatch):
    from anyaccel.inventory import contested

    function = tmp_path / "devices" / "pci0000:c0" / "0000:c1:00.0" / "accel" / "accel0"
    function.mkdir(parents=True)
    (tmp_path / "dev" / "char").mkdir(parents=True)
    (tmp_path / "dev" / "char" / "1:3").symlink_to(function)
    monkeypatch.setattr(contested, "SYSFS", str(tmp_path))
    install("one", plugin("one", f'id="one-0", {FUNCTION}'))
    install("two", plugin("two", 'id="two-0", nodes=("/dev/null",)'))
    assert not any(device.usable for device in aa.detect().devices)


def test_nodes_that_all_devices_of_a_vendor_use_are_no_devices_own(detect):
    shared = '"/dev/xctl"'
    found = detect(
        one=[f'id="one-{n}", nodes=("/dev/one{n}", {shared})' for n in range(2)],
        two=[f'id="two-{n}", nodes=("/dev/two{n}", {shared})' for n in range(2)],
    )
    assert refused(found) == set()


def test_a_control_node_that_the_plugin_names_is_no_devices_own(detect):
    nodes = 'nodes=("/dev/{0}0", "/dev/xctl")'
    own = {vendor: [f'id="{vendor}-0", {nodes.format(vendor)}'] for vendor in ("one", "two")}
    assert refused(detect(control_nodes=("/dev/xctl",), **own)) == set()
    assert refused(detect(**{f"{vendor}s": devices for vendor, devices in own.items()})) != set()


@pytest.mark.parametrize("parent", [[], [f'id="whole", {FUNCTION}']])
def test_parts_of_a_device_go_with_it(parent, detect):
    parts = [f'id="part-{n}", parent="whole", {FUNCTION if not parent else ""}' for n in range(2)]
    found = detect(one=[*parent, *parts, 'id="other"'], two=[f'id="two-0", {FUNCTION}'])
    assert refused(found) == {*found} - {"other"}


def test_the_parts_of_one_vendor_share_what_they_are_parts_of(detect):
    nodes = 'parent="whole", nodes=("/dev/x0",)'
    found = detect(one=[f'id="part-{n}", {FUNCTION}, {nodes}' for n in range(2)], two=['id="two-0"'])
    assert refused(found) == set()


def test_a_simulated_machine_of_several_vendors_has_usable_devices(install):
    for vendor in ("one", "two"):
        source = plugin(vendor, products=[(f"{vendor}-card",)])
        install(vendor, source.replace("model=name,", 'model=name, node_templates=("/dev/x{index}", "/dev/xctl"),'))
    inventory = aa.detect("sim:one-card:2,two-card:2")
    assert all(device.usable for device in inventory.devices)
