"""``anyaccel export``, from the outside."""

import json
import os
import sys

import pytest
import yaml
from anyaccel_export.targets import TARGETS

BROKEN = "import os\nos._exit(3)\n"
NODE_NAMED = {"flux", "dask", "kubernetes", "kuberay", "ray-autoscaler", "slurm", "slurm-node", "lsf", "pbs"}


def run(anyaccel, *arguments, **options):
    done = anyaccel(*arguments, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_form_that_json_holds_with_the_notes(target, acme, anyaccel, record):
    arguments = ("export", target, "--machine", record({}, {}), "--node", "n1")
    status, out, err = run(anyaccel, *arguments, "--json")
    document = json.loads(out)
    assert (status, document["schema"], document["target"]) == (0, "anyaccel.export/1", target)
    assert document["text"] == run(anyaccel, *arguments)[1]
    if target == "flux":
        assert (document["text"], document["notes"]) == (
            "",
            ["APU is left out, because Flux counts no other devices than GPUs."],
        )
        return
    assert document["text"].endswith("\n")
    assert [f"anyaccel: {note}" for note in document["notes"]] == err.splitlines()


@pytest.mark.parametrize("target", sorted(NODE_NAMED))
def test_a_machine_that_is_not_this_one_has_no_name(target, acme, anyaccel):
    status, out, err = run(anyaccel, "export", target, "--machine", "sim:A1:2")
    assert (status, out) == (2, "")
    assert "'sim:A1:2' has no name; add --node NAME" in err


def test_this_host_has_its_own_name(acme, anyaccel):
    status, out, _ = run(anyaccel, "export", "slurm-node", "--declare", "APU=2")
    assert status == 0
    assert f"NodeName={os.uname().nodename.split('.')[0]} Gres=apu:declared-apu:2\n" in out


def test_only_what_is_visible_and_healthy_is_exported(acme, anyaccel, record):
    machine = record({}, {"health": "unhealthy", "reason": "it fell off the bus."}, {}, {})
    arguments = ("export", "slurm-node", "--machine", machine, "--node", "n1")
    status, out, err = run(anyaccel, *arguments, env={"ACME_VISIBLE": "0,1,2"})
    assert (status, out.splitlines()[-1]) == (0, "NodeName=n1 Gres=apu:acme-one:2")
    assert "1 device is left out, because the environment hides it." in err
    assert "acme/1 (acme-s1) is left out, because it is unhealthy: it fell off the bus." in err


def test_inside_a_worker_only_its_devices_are_exported(acme, anyaccel):
    inner = (sys.executable, "-m", "anyaccel", "export", "env", "--json")
    status, out, _ = run(anyaccel, "run", "APU:1", "--machine", "sim:A1:4", "--", *inner)
    assert status == 0
    assert json.loads(out)["text"].count("acme-") == 1


def test_env_hides_the_rest(acme, anyaccel, record):
    machine = record({}, {"health": "unhealthy"}, {})
    status, out, _ = run(anyaccel, "export", "env", "--machine", machine, env={"ACME_ORDER": "x"})
    assert status == 0
    assert {"unset ACME_ORDER", "export ACME_VISIBLE=acme-s0,acme-s2"} < set(out.splitlines())
    assert "ANYACCEL_ALLOCATION" not in out


def test_a_vendor_that_failed_is_not_a_vendor_without_devices(acme, install, anyaccel):
    install("broken", BROKEN)
    status, out, err = run(anyaccel, "export", "slurm", "--machine", "sim:A1:2", "--node", "n1")
    assert (status, out) == (1, "")
    assert "the devices of broken are unknown, and an incomplete list is not exported" in err
    status, out, _ = run(
        anyaccel, "export", "slurm", "--machine", "sim:A1:2", "--node", "n1", env={"ANYACCEL_PLUGINS": "acme"}
    )
    assert (status, out.count("Name=apu")) == (0, 1)


def test_no_devices(acme, anyaccel, tmp_path):
    status, out, err = run(anyaccel, "export", "docker")
    assert (status, out) == (0, "")
    assert "there is no usable device to export" in err
    target = tmp_path / "spec.json"
    target.write_text("old")
    status, _, err = run(anyaccel, "export", "cdi", "--out", str(target))
    assert (status, target.read_text()) == (1, "old")
    assert "a CDI specification must have one" in err


def test_out_writes_the_file_whole(acme, anyaccel, tmp_path):
    target = tmp_path / "nodes.yaml"
    target.write_text("old")
    arguments = ("--out", str(target), "export", "kubernetes", "--machine", "sim:A1:2", "--node", "n1")
    assert run(anyaccel, *arguments)[:2] == (0, "")
    assert len(list(yaml.safe_load_all(target.read_text()))) == 4
    assert target.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("export",), 2, "TARGET"),
        (("export", "slurms"), 2, "invalid choice: 'slurms'"),
        (
            ("export", "slurm", "--node", "a b"),
            2,
            "the name of a node must be letters, digits, '-' and '.' (got 'a b')",
        ),
        (("export", "slurm", "--node", "n1", "--shards", "0"), 2, "must be a whole number from 1 to 1000 (got '0')"),
        (("export", "slurm", "--node", "n1", "--shards", "9" * 9999), 2, "must be a whole number from 1 to 1000"),
        (("export", "docker", "--cores"), 2, "--cores belongs to the target slurm (got it with docker)"),
        (("export", "slurm", "--node", "n1", "--cores"), 2, "--cores counts the cores of this host, and"),
        (("export", "docker", "--shards", "4"), 2, "--shards belongs to the target slurm (got it with docker)"),
        (("export", "slurm", "--node", "n1", "--shards", "4"), 2, "leave --shards out"),
        (("export", "ray", "--out", "/nowhere/at/all"), 1, "cannot be written: No such file or directory"),
        (("export", "ray", "--out", "/"), 1, "cannot be written"),
    ],
)
def test_mistakes(arguments, status, message, acme, anyaccel):
    code, out, err = run(anyaccel, *arguments, "--machine", "sim:A1:2")
    assert (code, out) == (status, "")
    assert message in err
    assert "Traceback" not in err


def test_an_instance_type_is_a_machine_with_a_name(acme, anyaccel):
    known = acme.read_text().replace('name="Acme-Whole",', 'name="Acme-Whole", instance_types={"acme.4xlarge": 4},')
    acme.write_text(known)
    status, out, _ = run(anyaccel, "--instance", "acme.4xlarge", "export", "ray-autoscaler")
    assert status == 0
    [(name, entry)] = yaml.safe_load(out)["available_node_types"].items()
    labels = {"anyaccel/APU": "Acme-Whole", "anyaccel/APU.mem": "32GiB"}
    assert (name, entry["resources"]["APU"], entry["labels"]) == ("acme.4xlarge", 4, labels)
    status, _, err = run(anyaccel, "export", "kuberay", "--instance", "acme.5xlarge")
    assert status == 2
    assert "did you mean acme.4xlarge?" in err
    status, _, err = run(anyaccel, "export", "kuberay", "--instance", "acme.4xlarge", "--machine", "sim:A1:1")
    assert status == 2
    assert "leave --machine and --declare out" in err
