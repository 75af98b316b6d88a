"""Labels of devices: from the machine's configuration, from a program and in documents."""

import json
import os
import shutil
import subprocess
import sys

import anyaccel
import pytest
from anyaccel import configuration
from anyaccel.errors import ConfigurationError, RequestError, UsageError
from anyaccel.scheduler import Scheduler, facts, parse_request
from small_machines import gpus, machine

INVENTORY = anyaccel.label(
    machine(gpus(4), gpus(1, "A100")),
    {"GPU/0-1": ["team=vision"], "h100-1": ["rack=a3", "team=nlp"], "H100/3": "reserved", "TPU/0": ["absent"]},
)


def test_a_program_labels_devices_by_id_or_by_what_requests_call_them():
    assert [dict(device.labels) for device in INVENTORY.devices] == [
        {"team": "vision"},
        {"team": "nlp", "rack": "a3"},
        {},
        {"reserved": ""},
        {"team": "vision"},
    ]
    assert not machine(gpus(1)).devices[0].labels, "the machine that was given is as it was"


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        ("GPU:2,label=team=vision,mixed", ["h100-0", "a100-0"]),
        ("GPU:1,label=reserved", ["h100-3"]),
        ("GPU:1,label=team", ["h100-0"]),
        ("GPU:1,label=team+rack", ["h100-1"]),
        ("GPU:1,label=rack=a3+team=nlp", ["h100-1"]),
        ("GPU:3,label=-reserved", ["h100-0", "h100-1", "h100-2"]),
        ("GPU:1,label=-team+-reserved", ["h100-2"]),
        ("GPU:1,label=team+-team=vision", ["h100-1"]),
    ],
)
def test_requests_choose_by_labels(request_, ids):
    request = parse_request(request_)
    assert parse_request(str(request)) == request
    assert sorted(device.id for device in Scheduler(INVENTORY).allocate(request).devices) == sorted(ids)


def test_where_no_device_has_them_that_is_said_with_what_is_near():
    verdict = Scheduler(INVENTORY).why("H100:1,label=rack=a3+team=vision")
    assert verdict.reasons[1].message == (
        "not label=rack=a3+team=vision: acme/0 (team=vision), acme/1 (rack=a3+team=nlp), acme/2 (no label), "
        "acme/3 (reserved)"
    )
    assert str(verdict.nearest) == "H100:1,label=rack=a3"
    assert str(Scheduler(INVENTORY).why("GPU:1,label=unknown").nearest) == "GPU:1"


@pytest.mark.parametrize(
    "text", ["", "-", "+", "a+", "=b", "a=", "a=b=c", "1a", "a b", "a=-b", "\x1b[31m", "é", "a" * 64, "--a", "a|b"]
)
def test_what_is_no_label_is_refused_everywhere(text):
    with pytest.raises(RequestError) as refused:
        parse_request(f"GPU,label={text}" if " " not in text else ["GPU,label=" + text.replace(" ", "/")])
    assert "'label' must be a key such as reserved" in str(refused.value)
    assert "\x1b" not in str(refused.value)
    if not text.startswith("-a"):
        with pytest.raises(UsageError, match="labels of 'GPU': a label must be a key such as"):
            anyaccel.label(INVENTORY, {"GPU": [text]})


def test_a_device_has_so_many_labels_and_no_more():
    many = [f"k{number}" for number in range(32)]
    assert len(anyaccel.label(machine(gpus(1)), {"GPU": many}).devices[0].labels) == 32
    with pytest.raises(UsageError, match="at most 32 labels"):
        anyaccel.label(anyaccel.label(machine(gpus(1)), {"GPU": many}), {"GPU": ["more"]})
    with pytest.raises(UsageError, match="given once"):
        anyaccel.label(machine(gpus(1)), {"GPU": ["a=1", "a=2"]})


def test_a_document_keeps_labels_and_refuses_what_is_none():
    document = json.loads(json.dumps(anyaccel.to_json(INVENTORY)))
    assert anyaccel.from_json(document) == INVENTORY
    held = anyaccel.to_json(Scheduler(INVENTORY).allocate("GPU,label=reserved"))
    assert anyaccel.from_json(json.loads(json.dumps(held))).devices[0].labels == {"reserved": ""}
    for labels in ({"a b": ""}, {"a": "\x1b"}, {f"k{number}": "" for number in range(33)}):
        document["devices"][0]["labels"] = labels
        with pytest.raises(ValueError, match=r"Device\.labels of 'h100-0'"):
            anyaccel.from_json(document)
    document["devices"][0]["labels"] = {"a": 1}
    with pytest.raises(ValueError, match="must be str"):
        anyaccel.from_json(document)


def test_programs_that_choose_in_our_place_are_told():
    told = {device.id: facts(device, INVENTORY, typed=False) for device in INVENTORY.devices}
    assert told["h100-1"] == {"label": "rack=a3+team=nlp"}


def test_a_scheduler_goes_on_where_labels_change():
    scheduler = Scheduler(machine(gpus(2)))
    ticket = scheduler.submit("GPU,label=team=vision", infeasible="pend")
    scheduler.update(anyaccel.label(scheduler.inventory, {"GPU/1": ["team=vision"]}))
    assert [device.id for device in ticket.allocation.devices] == ["h100-1"]


def test_the_machines_file_has_them(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[devices."acme/0-3"]\nlabels = ["team=vision", "reserved"]\n[devices."0000:01:00.0"]\nlabels = []\n'
    )
    path.chmod(0o644)
    found = configuration._read(str(path), "machine", {os.geteuid()})
    assert found.names("devices") == ("acme/0-3", "0000:01:00.0")
    assert found.get("devices.acme/0-3.labels") == ("reserved", "team=vision")
    path.write_text('[devices.GPU]\nlabels = ["a b"]\n')
    with pytest.raises(ConfigurationError, match=r"devices.GPU.labels must be a list of labels"):
        configuration._read(str(path), "machine", {os.geteuid()})


FILE = "/etc/anyaccel/config.toml"
MOUNTS = f'mount -t tmpfs none /etc && mkdir /etc/anyaccel && printf %s "$1" > {FILE} && shift && exec "$@"'


@pytest.mark.host
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare(1)")
def test_commands_go_by_the_labels_of_the_machine(tmp_path):
    """With the real file in a private mount namespace."""
    text = '[devices."GPU/0"]\nlabels = ["team=vision"]\n'

    def run(*words):
        command = [sys.executable, "-m", "anyaccel", *words, "--declare", "GPU=2"]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", text, *command],
            env={**os.environ, "ANYACCEL_STATE_DIR": str(tmp_path)},
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )

    done = run("status", "--json")
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    labels = {each["id"]: each["labels"] for each in json.loads(done.stdout)["devices"] if each["declared"]}
    assert labels == {"declared-GPU-0": {"team": "vision"}, "declared-GPU-1": {}}
    assert run("why", "declared:1,label=team=vision").returncode == 0
    refused = run("why", "declared:1,label=team=nlp")
    assert refused.returncode != 0
    assert "not label=team=nlp: declared/0 (team=vision), declared/1 (no label)" in refused.stdout
    assert "team=vision" in run("status", "--columns", "device,labels").stdout
