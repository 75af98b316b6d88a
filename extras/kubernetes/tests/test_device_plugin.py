"""The device plugin against a kubelet over real sockets."""

import os
import signal

import anyaccel
import grpc
import pytest

N, T = "anyaccel.dev/nvidia", "anyaccel.dev/tpu"


@pytest.fixture
def kubelet(node):
    node.kubelet.start()
    return node.kubelet


def test_all_vendors_in_one_agent(node, kubelet):
    process = node.start("device-plugin")
    kubelet.until(lambda devices: len(devices.get(N, ())) == 2 and len(devices.get(T, ())) == 4)
    chips = sorted(kubelet.devices[T])
    answer = kubelet.allocate(T, chips[:1])
    assert [each.host_path for each in answer.devices] == ["/dev/accel0"]
    assert len(kubelet.prefer(T, chips, [chips[3]], 2)) == 2
    assert chips[3] in kubelet.prefer(T, chips, [chips[3]], 2)
    node.kill(process, signal.SIGTERM)
    assert process.returncode == 0
    assert os.listdir(node.kubelet.root / "device-plugins") == ["kubelet.sock"]


def test_people_and_pods_agree_and_a_pod_that_ends_gives_back(node, kubelet):
    node.start("device-plugin")
    kubelet.until(lambda devices: len(devices.get(N, ())) == 2)
    with anyaccel.acquire("H100:1", machine=node.machine, note="a person") as person:
        taken = person.devices[0].id
        kubelet.until(lambda devices: devices[N][taken][0] == "Unhealthy")
        with pytest.raises(grpc.RpcError, match="a person"):
            kubelet.allocate(N, [taken])
        other = next(each for each in kubelet.devices[N] if each != taken)
        kubelet.pods["train"] = N, [other]
        kubelet.allocate(N, [other])
        node.wait_for(lambda: node.leases()[other].note == "pod default/train")
        with pytest.raises(grpc.RpcError):  # all or none
            kubelet.allocate(N, [other, taken])
        assert node.leases()[other].note == "pod default/train"
    kubelet.until(lambda devices: devices[N][taken][0] == "Healthy")
    assert kubelet.devices[N][other][0] == "Healthy"


def test_of_a_device_and_its_parts_the_parts_are_units(node, kubelet):
    node.machine = node.DIVIDED
    node.start("device-plugin")
    parts = {device.id for device in anyaccel.detect(node.machine).devices if device.parent}
    kubelet.until(lambda devices: set(devices.get("anyaccel.dev/intel", ())) == parts)
    assert len(parts) == 4


def test_leases_outlive_the_agent_and_are_recovered_from_the_kubelet(node, kubelet):
    process = node.start("device-plugin")
    kubelet.until(lambda devices: len(devices.get(N, ())) == 2)
    first, second = sorted(kubelet.devices[N])
    kubelet.pods["train"] = N, [first]
    kubelet.allocate(N, [first])
    node.kill(process)
    with pytest.raises(anyaccel.NotFreeError):
        anyaccel.acquire("H100:2", machine=node.machine, wait=0)
    # While there is no agent, a pod ends, and the lease of another is lost.
    kubelet.pods = {"other": (N, [second])}
    kubelet.stop()
    kubelet.start()
    node.start("device-plugin")
    node.wait_for(lambda: {each: lease.note for each, lease in node.leases().items()} == {second: "pod default/other"})


def test_a_kubelet_that_restarts_is_registered_with_again(node, kubelet):
    node.start("device-plugin")
    for _ in range(2):
        kubelet.until(lambda devices: len(devices.get(N, ())) == 2)
        kubelet.stop()
        kubelet.start()
    kubelet.until(lambda devices: len(devices.get(N, ())) == 2)


def test_shares_and_resources_by_type(node, kubelet):
    node.start("device-plugin", "--shares", "4", "--by", "type")
    name = "anyaccel.dev/h100.shared"
    kubelet.until(lambda devices: len(devices.get(name, ())) == 8)
    chosen = kubelet.prefer(name, sorted(kubelet.devices[name]), [], 2)
    assert len({each.split("::")[0] for each in chosen}) == 2  # two shares are of two devices
    answer = kubelet.allocate(name, chosen[:1])
    assert answer.envs["ANYACCEL_MEMORY_LIMIT"]
    (lease,) = node.leases().values()
    assert lease.units == 2500


def test_driver_and_device_plugin_at_once(node, kubelet):
    node.start("device-plugin")
    node.driver()
    kubelet.until(lambda devices: len(devices.get(N, ())) == 2)
    node.api.until(lambda devices: len(devices) == 6)
    first, second = sorted(kubelet.devices[N])
    kubelet.pods["old"] = N, [first]
    kubelet.allocate(N, [first])
    node.api.until(lambda devices: sum("taints" in device for device in devices.values()) == 1)
    (held,) = (name for name, device in node.api.devices().items() if "taints" in device)
    assert node.api.devices()[held]["attributes"]["id"] == {"string": first}
    (free,) = (name for name, device in node.api.devices().items() if device["attributes"]["id"] == {"string": second})
    node.api.allocate("train", "u-1", [held])
    with pytest.raises(RuntimeError, match="pod"):
        node.kubelet.prepare("train", "u-1")
    node.api.allocate("train", "u-2", [free])
    node.kubelet.prepare("train", "u-2")
    kubelet.until(lambda devices: devices[N][second][0] == "Unhealthy")
    with pytest.raises(grpc.RpcError):
        kubelet.allocate(N, [second])
