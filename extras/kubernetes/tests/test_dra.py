"""The driver against a kubelet and an API server over real sockets."""

import json
import signal
import ssl
import subprocess
from pathlib import Path

import anyaccel
import pytest
import slice_rules
from anyaccel.linux import write_whole
from anyaccel_export.slices import device_names
from anyaccel_kubernetes.claims import ClaimError, parse_quantity
from fake_api import FakeApi

PLUGINS = Path(__file__).parents[3] / "plugins"


def names(node, vendor):
    """Names in the cluster of the devices of a vendor."""
    inventory = anyaccel.detect(node.machine)
    all_names = device_names(inventory)
    return [all_names[device.id] for device in inventory.of_vendor(vendor)]


def test_devices_of_all_vendors_are_published_and_prepared(node):
    process = node.driver()
    node.api.until(lambda devices: len(devices) == 6)
    (h100, _), (tpu, *_) = names(node, "nvidia"), names(node, "tpu")
    node.api.allocate("train", "u-1", [h100, tpu], pods=["train"])
    given = node.kubelet.prepare("train", "u-1")
    assert given == {h100: ["anyaccel.dev/claim=u-1-nvidia"], tpu: ["anyaccel.dev/claim=u-1-tpu"]}
    edits = node.edits("u-1")
    assert {each["path"] for each in edits["anyaccel.dev/claim=u-1-tpu"]["deviceNodes"]} == {"/dev/accel0"}
    env = edits["anyaccel.dev/claim=u-1-nvidia"]["env"]
    assert any(each.startswith(("CUDA_VISIBLE_DEVICES=", "NVIDIA_VISIBLE_DEVICES=")) for each in env)
    assert {each.note for each in node.leases().values()} == {"pod default/train"}
    status = subprocess.run(
        [*process.args[:4], "status", "--machine", node.machine, "--json"], capture_output=True, text=True, check=True
    )
    assert {each["pod"] for each in json.loads(status.stdout)["pods"]} == {"pod default/train"}
    # Its own leases are no taints, and people get other devices.
    assert not any("taints" in device for device in node.api.devices().values())
    with pytest.raises(anyaccel.NotFreeError):
        anyaccel.acquire("H100:2", machine=node.machine, wait=0)
    assert node.kubelet.prepare("train", "u-1") == given
    node.kubelet.unprepare("train", "u-1")
    node.kubelet.unprepare("train", "u-1")
    assert node.leases() == {}
    assert not list(node.cdi.glob("*.json"))
    node.kill(process, signal.SIGTERM)
    assert process.returncode == 0
    assert not node.api.refused


def test_claims_that_cannot_be_prepared_say_why(node):
    node.driver()
    h100, _ = names(node, "nvidia")
    with pytest.raises(RuntimeError, match="not found"):
        node.kubelet.prepare("none", "u-1")
    node.api.allocate("train", "u-1", [h100])
    with pytest.raises(RuntimeError, match="its identity is"):
        node.kubelet.prepare("train", "u-2")
    node.api.allocate("gone", "u-3", ["nothing"])
    with pytest.raises(RuntimeError, match="is gone"):
        node.kubelet.prepare("gone", "u-3")
    result = node.api.claims["train"]["status"]["allocation"]["devices"]["results"][0]
    result["adminAccess"] = True
    with pytest.raises(RuntimeError, match="admin access"):
        node.kubelet.prepare("train", "u-1")
    result["adminAccess"], result["pool"] = False, "n2"
    with pytest.raises(RuntimeError, match="node n2"):
        node.kubelet.prepare("train", "u-1")
    with pytest.raises(RuntimeError, match="identity"):
        node.kubelet.unprepare("train", "../../etc/passwd")
    assert node.leases() == {}


def test_a_device_that_a_person_holds_has_a_taint_and_goes_to_no_pod(node):
    node.driver()
    node.api.until(lambda devices: len(devices) == 6)
    with anyaccel.acquire("H100:1", machine=node.machine, note="a person") as lease:
        taken = device_names(anyaccel.detect(node.machine))[lease.devices[0].id]
        node.api.until(lambda devices: "taints" in devices.get(taken, {}))
        (taint,) = node.api.devices()[taken]["taints"]
        assert (taint["key"], "a-person" in taint["value"]) == ("anyaccel.dev/held", True)
        node.api.allocate("train", "u-1", [taken])
        with pytest.raises(RuntimeError, match="a person"):
            node.kubelet.prepare("train", "u-1")
    node.api.until(lambda devices: "taints" not in devices.get(taken, {"taints": ()}))
    node.kubelet.prepare("train", "u-1")


def test_shares_of_a_device(node):
    node.driver("--shares", "1")
    node.api.until(lambda devices: any("allowMultipleAllocations" in each for each in devices.values()))
    h100, _ = names(node, "nvidia")
    for number in (1, 2):
        node.api.allocate(f"c{number}", f"u-{number}", [h100], capacity={"memory": "30Gi"})
        node.kubelet.prepare(f"c{number}", f"u-{number}")
    node.api.allocate("c3", "u-3", [h100], capacity={"anyaccel.dev/memory": "30Gi"})
    with pytest.raises(RuntimeError, match="default/c3"):
        node.kubelet.prepare("c3", "u-3")
    (edits,) = node.edits("u-1").values()
    assert any("MEMORY" in each for each in edits["env"])


@pytest.mark.parametrize("lacks", ["taints", "allowMultipleAllocations"])
def test_a_cluster_without_a_feature(node, lacks):
    node.api.lacks = (lacks,)
    with anyaccel.acquire("H100:1", machine=node.machine):
        node.driver("--shares", "1")
        node.api.until(lambda devices: len(devices) == (5 if lacks == "taints" else 6))
    if lacks == "taints":
        node.api.until(lambda devices: len(devices) == 6)


def test_slices_are_restored_after_conflicts_deletions_and_broken_watches(node):
    node.driver()
    node.api.until(lambda devices: len(devices) == 6)
    for _ in range(3):
        node.api.break_watches()
        node.api.delete(next(iter(node.api.slices)))
        node.api.until(lambda devices: len(devices) == 6)
    node.api.touch()
    with anyaccel.acquire("H100:1", machine=node.machine):
        node.api.until(lambda devices: any("taints" in device for device in devices.values()))
    (found,) = node.api.slices.values()
    before = found["spec"]["pool"]["generation"]
    node.api.until(lambda devices: devices and not any("taints" in device for device in devices.values()))
    (found,) = node.api.slices.values()
    assert found["spec"]["pool"]["generation"] > before
    assert not node.api.refused


def test_a_restart_changes_no_slice(node):
    process = node.driver()
    node.api.until(lambda devices: len(devices) == 6)
    node.kill(process)
    before = dict(node.api.slices)
    node.driver()
    node.api.until(lambda _: ("GET", "/apis/resource.k8s.io/v1/resourceslices") in node.api.requests)
    h100, _ = names(node, "nvidia")
    node.api.allocate("train", "u-1", [h100])
    node.kubelet.prepare("train", "u-1")
    assert node.api.slices == before


def test_tokens_that_rotate_over_tls(node, tmp_path):
    pem = tmp_path / "server.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(pem), "-out", str(tmp_path / "ca"),
         "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"openssl makes no certificate here: {made.stderr.decode(errors='replace').strip()[-200:]}")
    pem.write_text(pem.read_text() + (tmp_path / "ca").read_text())
    assert ssl.create_default_context(cafile=str(tmp_path / "ca"))
    api = FakeApi(str(pem))
    try:
        api.token = "first"
        token = tmp_path / "token"
        token.write_text("first\n")
        node.driver("--server", api.url, "--token-file", str(token), "--ca-file", str(tmp_path / "ca"))
        api.until(lambda devices: len(devices) == 6)
        api.token = "second"
        token.write_text("second\n")
        with anyaccel.acquire("H100:1", machine=node.machine):
            api.until(lambda devices: any("taints" in device for device in devices.values()))
    finally:
        api.close()


def test_claims_are_adopted_after_a_kill(node):
    process = node.driver()
    h100, other = names(node, "nvidia")
    node.api.allocate("train", "u-1", [h100], pods=["train"])
    given = node.kubelet.prepare("train", "u-1")
    node.kill(process)
    (lease,) = node.leases().values()
    assert lease.state == "on behalf"
    with pytest.raises(anyaccel.NotFreeError):
        anyaccel.acquire("H100:2", machine=node.machine, wait=0)
    node.driver()
    assert [each.id for each in node.leases().values()] == [lease.id]
    assert node.kubelet.prepare("train", "u-1") == given
    node.api.allocate("more", "u-2", [h100])
    with pytest.raises(RuntimeError, match="pod default/train"):
        node.kubelet.prepare("more", "u-2")
    node.api.allocate("other", "u-3", [other])
    node.kubelet.prepare("other", "u-3")
    node.kubelet.unprepare("train", "u-1")
    assert len(node.leases()) == 1


def test_lost_leases_and_cdi_files_are_made_again(node):
    process = node.driver()
    h100, _ = names(node, "nvidia")
    node.api.allocate("train", "u-1", [h100], pods=["train"])
    node.kubelet.prepare("train", "u-1")
    (path,) = node.cdi.glob("*.json")
    text = path.read_text()
    path.unlink()
    assert node.kubelet.prepare("train", "u-1")
    assert path.read_text() == text
    node.kill(process)
    for file in (node.root / "state").iterdir():
        if file.name.startswith("v2."):
            file.unlink()
    (node.cdi / "anyaccel-claim-odd.json").write_text("{")
    half = node.cdi / "anyaccel-claim-u-1.json.50e71e7f.new"
    half.write_text("{")
    node.driver()
    assert not half.exists(), "a driver that was killed while it wrote has left it"
    assert [each.key for each in node.leases().values()] == ["kubernetes/claim/u-1"]
    assert "odd" in node.log("dra")


def test_health_has_its_reason_and_recovers(node):
    node.machine = str(node.root / "machine")
    set_health(node, broken=False)
    node.driver()
    assert node.kubelet.health(lambda found: all(state == 1 for state, _ in found.values()))
    set_health(node, broken=True)
    found = node.kubelet.health(lambda found: any(state == 2 for state, _ in found.values()))
    assert any("device_state" in reason for state, reason in found.values() if state == 2)
    node.api.until(lambda devices: any("taints" in device for device in devices.values()))
    set_health(node, broken=False)
    node.kubelet.health(lambda found: all(state == 1 for state, _ in found.values()))
    node.api.until(lambda devices: devices and not any("taints" in device for device in devices.values()))


def set_health(node, *, broken):
    """Write the recording of a machine whose first card works, or does not."""
    recording = json.loads((PLUGINS / "furiosa/recordings/rngd-4card/machine.json").read_text())
    if broken:
        status = recording["commands"][1]
        status["stdout"] = status["stdout"].replace('"liveness": "alive"', '"liveness": "dead"', 1)
        recording["paths"]["/sys/class/rngd_mgmt/rngd!npu0mgmt/device_state"]["text"] = "1\n"
    path = node.root / "machine" / "machine.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(str(path), json.dumps(recording))


@pytest.fixture
def divided(install):
    """A plug-in that lists a card and its two halves, and no other."""
    install("divided", (PLUGINS.parent / "tests/vendors/divided.py").read_text())


@pytest.mark.usefixtures("divided")
def test_a_device_and_its_parts_are_counted_by_the_scheduler_and_never_leased_together(node):
    node.machine = "host"
    node.driver()
    node.api.until(lambda devices: len(devices) == 3)
    slices = list(node.api.slices.values())
    whole, first, second = "card-0", "card-0-a", "card-0-b"
    assert slice_rules.allows(slices, [first, second])
    assert not slice_rules.allows(slices, [whole, first])
    # A scheduler that does not count, such as that of a cluster without the feature, meets the ledger.
    node.api.allocate("part", "u-1", [first], pods=["part"])
    node.api.allocate("whole", "u-2", [whole], pods=["whole"])
    node.kubelet.prepare("part", "u-1")
    with pytest.raises(RuntimeError, match="pod default/part"):
        node.kubelet.prepare("whole", "u-2")
    node.kubelet.unprepare("part", "u-1")
    assert set(node.kubelet.prepare("whole", "u-2")) == {whole}


@pytest.mark.parametrize("text", ["", "Gi", "nan", "inf", "-inf", "1e400", "9" * 5000, "0x10"])
def test_a_quantity_that_is_none_is_refused(text):
    with pytest.raises(ClaimError, match="a quantity of the API server is not understood"):
        parse_quantity(text)
