"""The metadata server, asked over real sockets."""

import socket
import time

import pytest
from anyaccel.plugin import ProbeContext, QueryError
from anyaccel.probe.host import HostFacts
from anyaccel_tpu import metadata, plugin
from waiting import PATIENCE

V4 = {
    "attributes/accelerator-type": "v4-16",
    "attributes/instance-id": "my-slice",
    "attributes/agent-worker-number": "1",
    "attributes/tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nTOPOLOGY: '2x2x2'\nPROJECT_ID: 'secret'\nWORKER_ID: '1'\n",
    "maintenance-event": "NONE",
}


def _context(environ):
    return ProbeContext(HostFacts(environ), time.monotonic() + PATIENCE)


def _v4(tree):
    for index in range(4):
        tree.pci(f"0000:00:0{index + 4}.0", "0x005e")
        tree.node(f"/dev/accel{index}")


def test_slice_facts_come_from_the_server(tree, metadata_server):
    metadata_server.answers = V4
    _v4(tree)
    found = tree.detect({"GCE_METADATA_HOST": metadata_server.host})
    assert found.notes == ()
    assert found.devices[0].attributes == {
        "generation": "v4",
        "accelerator_type": "v4-16",
        "pod_type": "v4-16",
        "topology": "2x2x2",
        "worker_id": 1,
        "slice_name": "my-slice",
        "slice_chips": 8,
        "slice_hosts": 2,
    }
    assert {flavor for _, flavor in metadata_server.requests} == {"Google"}


def test_address_is_taken_from_gce_metadata_ip_too(metadata_server):
    metadata_server.answers = V4
    answers = metadata.ask(_context({"GCE_METADATA_IP": metadata_server.host}))
    assert answers["attributes/accelerator-type"] == "v4-16"


def test_proxies_of_the_environment_are_not_asked(metadata_server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    metadata_server.answers = V4
    assert metadata.ask(_context({"GCE_METADATA_HOST": metadata_server.host}))


def test_keys_that_the_server_does_not_know_are_left_out(metadata_server):
    metadata_server.answers = {"attributes/accelerator-type": "v6e-1"}
    answers = metadata.ask(_context({"GCE_METADATA_HOST": metadata_server.host}))
    assert answers == {"attributes/accelerator-type": "v6e-1"}


def test_names_of_projects_do_not_get_into_recordings(metadata_server):
    metadata_server.answers = V4
    answers = metadata.ask(_context({"GCE_METADATA_HOST": metadata_server.host}))
    assert "secret" not in str(answers)
    assert "TOPOLOGY: '2x2x2'" in answers["attributes/tpu-env"]


def test_environment_wins_over_the_server(tree, metadata_server):
    metadata_server.answers = V4
    _v4(tree)
    environ = {"GCE_METADATA_HOST": metadata_server.host, "TPU_WORKER_ID": "3", "TPU_ACCELERATOR_TYPE": "v4-32"}
    attributes = tree.detect(environ).devices[0].attributes
    assert (attributes["worker_id"], attributes["pod_type"], attributes["slice_name"]) == (3, "v4-32", "my-slice")


@pytest.mark.parametrize(
    "environ",
    [
        {"TPU_SKIP_MDS_QUERY": "1"},
        {"TPU_SKIP_MDS_QUERY": "true"},
        {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_TOPOLOGY": "2x2x1", "TPU_WORKER_ID": "0", "TPU_NAME": "slice"},
    ],
    ids=["skip-1", "skip-true", "all-known"],
)
def test_server_is_not_asked_when_told_so_or_when_nothing_is_missing(tree, metadata_server, environ):
    _v4(tree)
    assert tree.detect({**environ, "GCE_METADATA_HOST": metadata_server.host}).devices
    assert metadata_server.requests == []


def test_server_is_not_asked_on_a_machine_without_tpu(tree, metadata_server):
    tree.pci("0000:00:04.0", "0x0042")
    assert tree.detect({"GCE_METADATA_HOST": metadata_server.host}) is None
    assert metadata_server.requests == []


def test_server_is_not_asked_off_google_where_pci_shows_no_tpu(tree, metadata_server):
    tree.text("/sys/class/dmi/id/product_name", "PowerEdge R760\n")
    tree.node("/dev/accel0")
    assert tree.detect({"GCE_METADATA_HOST": metadata_server.host}) is None
    assert metadata_server.requests == []


def test_server_names_the_generation_where_google_hides_pci(tree, metadata_server):
    metadata_server.answers = V4
    tree.node("/dev/accel0", "/dev/accel1", "/dev/accel2", "/dev/accel3")
    found = tree.detect({"GCE_METADATA_HOST": metadata_server.host})
    assert [device.model for device in found.devices] == ["TPU v4"] * 4


def test_a_server_that_never_answers_costs_one_second_in_all(tree):
    _v4(tree)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        hanging.setblocking(False)
        found = tree.detect({"GCE_METADATA_HOST": f"127.0.0.1:{hanging.getsockname()[1]}"})
        hanging.accept()[0].close()
        with pytest.raises(BlockingIOError):  # nor is the next question put to it
            hanging.accept()
    assert len(found.devices) == 4
    assert "did not answer within 1.0 s" in found.notes[0]


def test_a_server_that_answers_byte_by_byte_costs_one_second_in_all(metadata_server, monkeypatch):
    monkeypatch.setattr(metadata, "SECONDS", 1.0)
    metadata_server.drip = True
    metadata_server.answers = dict.fromkeys(metadata.KEYS, "x" * 100)
    with pytest.raises(QueryError) as caught:  # each byte comes in time, and so would all of them
        metadata.ask(_context({"GCE_METADATA_HOST": metadata_server.host}))
    assert caught.value.kind == "TimeoutError"


def test_diagnosis_asks_a_silent_server_once(tree):
    _v4(tree)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        hanging.setblocking(False)
        plugin.anyaccel_diagnose(tree.context({"GCE_METADATA_HOST": f"127.0.0.1:{hanging.getsockname()[1]}"}))
        hanging.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hanging.accept()


def test_the_deadline_of_the_hook_is_kept_where_it_is_shorter():
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        environ = {"GCE_METADATA_HOST": f"127.0.0.1:{hanging.getsockname()[1]}"}
        with pytest.raises(QueryError, match=r"did not answer within 0\.[01] s"):
            metadata.ask(ProbeContext(HostFacts(environ), time.monotonic() + 0.1))


def test_a_refused_connection_is_a_note_and_no_failure(tree):
    _v4(tree)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = tree.detect({"GCE_METADATA_HOST": f"127.0.0.1:{port}"})
    assert len(found.devices) == 4
    assert "the metadata server told nothing" in found.notes[0]


@pytest.mark.parametrize(("status", "flavor"), [(403, "Google"), (500, "Google"), (200, None), (404, None)])
def test_an_answer_that_is_not_googles_is_not_believed(tree, metadata_server, status, flavor):
    metadata_server.answers, metadata_server.status, metadata_server.flavor = V4, status, flavor
    _v4(tree)
    found = tree.detect({"GCE_METADATA_HOST": metadata_server.host})
    assert set(found.devices[0].attributes) == {"generation"}
    assert "the metadata server told nothing" in found.notes[0]


def test_a_host_that_is_no_address_is_a_note(tree):
    _v4(tree)
    found = tree.detect({"GCE_METADATA_HOST": "127.0.0.1:http"})
    assert len(found.devices) == 4
    assert "the metadata server told nothing" in found.notes[0]


@pytest.mark.parametrize(
    "text",
    [
        "ACCELERATOR_TYPE: 'v4-16'\nWORKER_ID: '1'\nTOPOLOGY: '2x2x2'\n",
        "TPU_ACCELERATOR_TYPE: 'v4-16'\nTPU_WORKER_ID: '1'\nNODE_ID: '0'\nTPU_TOPOLOGY: '2x2x2'\n",
        "ACCELERATOR_TYPE: v4-16\nWORKER_ID: 1\nTOPOLOGY: 2x2x2\n",
    ],
    ids=["cloud-tpu", "compute-engine", "unquoted"],
)
def test_all_dialects_of_tpu_env_are_read(tree, metadata_server, text):
    metadata_server.answers = {"attributes/tpu-env": text}
    _v4(tree)
    attributes = tree.detect({"GCE_METADATA_HOST": metadata_server.host}).devices[0].attributes
    assert (attributes["accelerator_type"], attributes["worker_id"], attributes["topology"]) == ("v4-16", 1, "2x2x2")


def test_a_malformed_line_of_tpu_env_is_a_note(tree, metadata_server):
    metadata_server.answers = {"attributes/tpu-env": "WORKER_ID: '1\nACCELERATOR_TYPE: 'v4-16'\n"}
    _v4(tree)
    found = tree.detect({"GCE_METADATA_HOST": metadata_server.host})
    assert found.devices[0].attributes["accelerator_type"] == "v4-16"
    assert "worker_id" not in found.devices[0].attributes
    assert len(found.notes) == 1


def test_announced_maintenance_is_a_note(tree, metadata_server):
    metadata_server.answers = {**V4, "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    _v4(tree)
    found = tree.detect({"GCE_METADATA_HOST": metadata_server.host})
    assert "TERMINATE_ON_HOST_MAINTENANCE" in found.notes[0]
