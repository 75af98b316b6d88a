import shlex

import docker_daemon
import podman_runtime
import pytest
from anyaccel.errors import EnvConflictError, UsageError
from anyaccel.model import ContainerEdits, Mount
from anyaccel_export.containers import export
from export_machines import READ_ONLY, WRITABLE, device, source

PAIR = (device(0), device(1))


def flags(*devices, **changes):
    return shlex.split(export(source(*devices, **changes)).text)


def test_flags():
    assert flags(*PAIR, shared_nodes=("/dev/tty",)) == [
        "--device=/dev/tty",
        "--device=/dev/null",
        "--device=/dev/zero",
        "--env=ACME_ALWAYS=1",
        "--env=ACME_RUNTIME=acme-0,acme-1",
        "--env=ACME_VISIBLE=acme-0,acme-1",
        "--label=anyaccel.devices=acme-0,acme-1",
    ]


def test_groups_are_added_once_each():
    found = flags(*PAIR, device(2, id="other-2", vendor="other"), groups=(109, 44))
    assert [flag for flag in found if "group" in flag] == ["--group-add=44", "--group-add=109"]


def test_the_flags_are_one_line_that_a_shell_need_not_unquote():
    """So that ``docker run $(anyaccel export docker)`` works."""
    text = export(source(*PAIR)).text
    assert text.split() == shlex.split(text)
    assert text.count("\n") == 1


def test_without_devices_there_are_no_flags():
    assert export(source()).text == ""
    assert export(source(device(0, visible=False))).text == ""


def test_devices_that_need_nothing_are_told():
    exported = export(source(device(0), together={"acme": ContainerEdits()}))
    assert exported.text == ""
    assert exported.notes == (
        "There are no flags for the devices of acme, because a container needs nothing for them.",
    )


def test_a_path_that_cannot_be_a_flag_is_refused():
    with pytest.raises(UsageError, match=r"'/dev/a:b' cannot be a flag .* use 'anyaccel export cdi'"):
        export(source(device(0, nodes=("/dev/a:b",))))
    with pytest.raises(UsageError, match="cannot be a flag"):
        export(source(device(0), mounts=[Mount(source="/a,b", target="/c")]))


def test_vendors_that_contradict_each_other_are_refused():
    together = {vendor: ContainerEdits(env={"X": vendor}) for vendor in ("acme", "other")}
    with pytest.raises(EnvConflictError, match="acme and other set the variable X differently"):
        export(source(*PAIR, together=together))


def test_docker_understands_the_flags(needs):
    needs("docker", packages="the docker command line, docker-ce-cli")
    asked = docker_daemon.request(*flags(*PAIR, mounts=[READ_ONLY, WRITABLE]))
    assert [entry["PathOnHost"] for entry in asked["HostConfig"]["Devices"]] == ["/dev/null", "/dev/zero"]
    assert {"ACME_ALWAYS=1", "ACME_VISIBLE=acme-0,acme-1"} < set(asked["Env"])
    assert asked["Labels"] == {"anyaccel.devices": "acme-0,acme-1"}
    mounts = [
        (entry["Source"], entry["Target"], entry.get("ReadOnly", False)) for entry in asked["HostConfig"]["Mounts"]
    ]
    assert mounts == [("/etc", "/host etc", True), ("/tmp", "/scratch", False)]


def test_docker_hands_names_of_cdi_on(needs):
    needs("docker", packages="the docker command line, docker-ce-cli")
    asked = docker_daemon.request("--device=anyaccel/device=acme-0")
    if not asked["HostConfig"]["DeviceRequests"]:
        pytest.skip("this docker is older than CDI in its command line (28.2)")
    assert asked["HostConfig"]["DeviceRequests"][0]["Driver"] == "cdi"
    assert asked["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == ["anyaccel/device=acme-0"]


def test_podman_understands_the_flags(needs, as_root, tmp_path):
    needs("podman", "unshare", packages="apt-get install podman")
    asked = podman_runtime.request(tmp_path / "p", *flags(*PAIR, mounts=[READ_ONLY, WRITABLE]))
    assert sorted(podman_runtime.devices(asked)) == ["/dev/null", "/dev/zero"]
    assert podman_runtime.environment(asked)["ACME_VISIBLE"] == "acme-0,acme-1"
    source_of, options = podman_runtime.mounts(asked)["/host etc"]
    assert (source_of, "ro" in options) == ("/etc", True)
    source_of, options = podman_runtime.mounts(asked)["/scratch"]
    assert (source_of, "rw" in options) == ("/tmp", True)
