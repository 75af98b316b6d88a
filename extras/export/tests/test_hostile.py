"""Whatever machines, devices and directories are called, no target takes a name for code, a line or a key."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from dataclasses import replace

import hcl2
import pytest
import yaml
from anyaccel.errors import UsageError
from anyaccel.model import ContainerEdits, EnvEdits, Mount
from anyaccel_export.targets import TARGETS, export
from export_machines import device, inventory, source

STEERING = ["x\n{}", "x\r{}", "x\u2028{}", "x\x0b{}", "x\x85{}", "x\x1b[2J", "\u202ex", "x\udcff"]
CODE = [
    "touch pwned",
    '"; touch pwned; "',
    "'; touch pwned; '",
    "$(touch pwned)",
    "`touch pwned`",
    "x # touch pwned",
    '"""\ntouch pwned\n"""',
    "${env.pwned} %{ if true }$${x}",
    "x\\",
    "$(HOME) {0} %s",
    "- pwned: [1, 2]",
    "Include /etc/passwd",
]
HOSTILE = [*CODE, *(text.format("touch pwned") for text in STEERING), "x\nNodeName=pwned\npwned: 1\n---\npwned: 1"]
SHELL = {"apptainer", "dask", "docker", "env", "hyperqueue", "podman", "ray"}


def hostile_source(text):
    """A machine of which every text is hostile that may be: what the contract with plug-ins restricts is not."""
    devices = [
        device(
            index, id=f"`id`$(touch~pwned);#&|\\{index}", model=f"{text} {index}", kind=text, tags=(), parent=text,
            attributes={"fact": text, text: text, "slice_name": text}, health_reason=text,
        )
        for index in range(2)
    ]  # fmt: skip
    made = source(*devices)
    found = inventory(*devices, machine=f"/data/{text}")
    return replace(made, inventory=found, everything=EnvEdits(set={"ACME_VISIBLE": devices[0].id}))


def written(target, text):
    """What a target gets, or None where it refuses in one clear message."""
    refusal = None
    try:
        return export(target, hostile_source(text)).text
    except UsageError as error:
        refusal = error
    said = r"takes printable text only \(got '|must be Unicode to be exported \(got '|cannot be a flag of apptainer"
    assert re.search(said, str(refusal))
    assert refusal.hint
    return None


def assert_lines(text):
    """Check that a text has no other lines and characters than an editor shows."""
    assert text.splitlines() == text.split("\n")[:-1]
    assert all(line.isprintable() for line in text.splitlines())
    text.encode()


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_writes_lines_of_plain_text(target):
    pure = written(target, "x y")
    for text in HOSTILE:
        found = written(target, text)
        if found is not None:
            assert_lines(found)
            assert pure is not None
            assert found.count("\n") == pure.count("\n"), found


@pytest.mark.parametrize("target", sorted(SHELL))
def test_a_shell_that_runs_it_runs_nothing_else(target, tmp_path):
    for program in ("dask", "hq", "ray"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / program).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for text in HOSTILE:
        found = written(target, text)
        if found is None:
            continue
        script = f": {found}" if target in ("apptainer", "docker", "podman") else found
        words = ["sh", "-c", script, "x", "tcp://nowhere:1"]
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
        assert (done.returncode, done.stderr) == (0, ""), text
        assert sorted(os.listdir(tmp_path)) == ["dask", "hq", "ray"], text


@pytest.mark.parametrize("text", HOSTILE)
def test_slurm_reads_a_comment_and_lines_of_its_own_keys(text):
    first, *lines = written("slurm", text).splitlines()
    assert first.startswith("# ")
    assert len(first) < 300
    key = r"(?:NodeName=node-1|Name=gpu|Type=[a-z0-9_.-]+|File=/dev/(?:null|zero))"
    assert [re.fullmatch(rf"{key}(?: {key})*", line) is not None for line in lines] == [True, True]
    assert re.fullmatch(
        r"GresTypes=gpu\nNodeName=node-1 Gres=gpu:[a-z0-9_.-]+:[12](,gpu:[a-z0-9_.-]+:1)?\n",
        written("slurm-node", text),
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_readers_of_yaml_and_json_find_the_keys_that_are_ours(text):
    for target in ("kubernetes", "kuberay", "ray-autoscaler"):
        found = written(target, text)
        if found is None:
            continue
        documents = list(yaml.safe_load_all(found))
        assert len(documents) == (5 if target == "kubernetes" else 1)
        if target == "kubernetes":
            assert set(documents[0]) == {"apiVersion", "kind", "metadata", "spec"}
            told = documents[0]["spec"]["devices"][0]["attributes"]
            assert text not in told
            plain = text.encode(errors="replace").decode()  # JSON has no lone surrogates
            assert told.get("fact", {"string": plain}) == {"string": plain}
        if target == "kuberay":
            resources = documents[0][0]["rayStartParams"].get("resources")
            script = f"printf %s {resources}"
            done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
            assert "$" not in resources  # Kubernetes expands $(NAME)
            assert set(json.loads(done.stdout)) == {f"accelerator_type:{text} 0", f"accelerator_type:{text} 1"}
    entries = json.loads(written("cdi", text))["devices"]
    assert {entry["name"] for entry in entries} >= {"acme", "all"}


@pytest.mark.full  # the reader takes seconds for its own grammar; the text is compared in test_nomad.py
@pytest.mark.xdist_group("hcl")  # it takes seconds until the reader has read its own grammar
@pytest.mark.parametrize("text", HOSTILE)
def test_a_reader_of_hcl_finds_two_blocks(text):
    found = written("nomad", text)
    if found is not None:
        blocks = hcl2.loads(found)["device"]
        assert len(blocks) == 2
        assert not re.search(r"(?<!\$)(?:\$\$)*\$\{|(?<!%)(?:%%)*%\{", found.replace("$${", "").replace("%%{", ""))


@pytest.mark.parametrize("text", HOSTILE)
def test_pbs_lsf_and_flux_read_lines_of_their_own_words(text):
    assert re.fullmatch(
        r"\$configversion 2\n"
        r"node-1: resources_available\.ngpus=2\n"
        r"node-1: resources_available\.accelerator_type=[a-z0-9_-]+\n",
        written("pbs", text),
    )
    for target in ("lsf", "lsf-shared"):
        assert all(
            re.fullmatch(
                r"(Begin|End) Resource(Map)?"
                r"|RESOURCENAME +(LOCATION|TYPE +INTERVAL +INCREASING +CONSUMABLE +DESCRIPTION)"
                r"|accel_gpu +(\(2@\[node-1\]\)|Numeric +\(\) +N +Y +\(devices\))"
                r"|acceltype_gpu +(\([a-z0-9_]+@\[node-1\]\)|String +(\(\) +){3}\(type of the devices or mixed\))",
                line,
            )
            for line in written(target, text).splitlines()
        )
    [entry] = tomllib.loads(written("flux", text))["resource"]["config"]
    assert (entry["hosts"], entry["gpus"], set(entry)) == ("node-1", "0-1", {"hosts", "gpus", "properties"})
    assert re.fullmatch(r"[a-z0-9_.-]+", entry["properties"][0])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_reader_of_classads_finds_our_attributes_and_no_expressions(text):
    classad = pytest.importorskip("classad2", reason="needs HTCondor's ClassAds (try: pip install htcondor)")
    found = classad.parseOne(written("htcondor", text), classad.ParserType.Old)
    assert set(found) == {"DetectedGPUs", "Device0", "Device1"}
    names = {"id", "DeviceName", "DeviceType", "DeviceVendor", "DeviceIndex", "GlobalMemoryMb", "DevicePciBusId"}
    for key in ("Device0", "Device1"):
        assert {*found[key]} == names | {"DeviceNumaNode"}
        assert {type(value) for value in dict(found[key]).values()} == {str, int}
        assert found[key]["id"] in found["DetectedGPUs"].split(", ")


@pytest.mark.parametrize("target", ["apptainer", "docker", "podman"])
@pytest.mark.parametrize("path", ["/dev/a\nb", "/dev/\x1b", "/dev/a:b", '/dev/a"b'])
def test_a_path_that_no_flag_can_name_is_refused(target, path):
    made = source(device(0))
    made = replace(made, together={"acme": ContainerEdits(nodes=(path,))})
    with pytest.raises(UsageError, match=r"cannot be a flag|printable text only"):
        export(target, made)


@pytest.mark.parametrize("text", [text for text in CODE if "\n" not in text])
def test_values_arrive_as_they_are(text):
    mount = Mount(source=f"/data/{text}".replace(",", ";").replace('"', "'"), target="/data")
    made = replace(source(device(0)), together={"acme": ContainerEdits(env={"ACME_VISIBLE": text}, mounts=(mount,))})
    words = shlex.split(export("docker", made).text)
    assert f"--env=ACME_VISIBLE={text}" in words
    assert f"--mount=type=bind,source={mount.source},target=/data,readonly" in words
    edits = json.loads(export("cdi", replace(made, alone={"acme-0": made.together["acme"]})).text)["devices"][0]
    assert edits["containerEdits"]["env"] == [f"ACME_VISIBLE={text}"]
