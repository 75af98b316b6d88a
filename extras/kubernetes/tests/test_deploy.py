"""The manifests and the unit fit the agents."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import slice_rules
import yaml
from anyaccel.ledger.machine_policy import KEPT
from anyaccel_export.slices import DRIVER
from anyaccel_kubernetes.kubernetes_command import KUBELET

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))


def documents(name="*"):
    return [each for path in MANIFESTS if path.match(f"{name}.yaml") for each in yaml.safe_load_all(path.read_text())]


def expressions(value):
    """Every CEL expression of a document."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "expression":
                yield item
            else:
                yield from expressions(item)
    elif isinstance(value, list):
        for item in value:
            yield from expressions(item)


def test_expressions_name_the_driver_and_its_attributes():
    classes = [each for each in documents() if each["kind"] in ("DeviceClass", "ResourceClaimTemplate")]
    assert len(classes) > 3
    known = {"type", "resource", "memory", "vendor"}
    for expression in (each for document in classes for each in expressions(document)):
        named = re.findall(r'device\.(?:driver == |attributes\[|capacity\[)"([^"]+)"', expression)
        assert named
        assert set(named) == {DRIVER}
        assert set(re.findall(r'"\]\.(\w+)', expression)) <= known
        assert expression.count("(") == expression.count(")")


def test_classes_are_those_of_the_products_of_all_plug_ins():
    command = [sys.executable, "-m", "anyaccel", "kubernetes", "classes"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, _, written = (DEPLOY / "classes.yaml").read_text().partition("\n")
    assert first == "# Written by: anyaccel kubernetes classes"
    assert written == told, "write it anew below its first line"
    names = [each["metadata"]["name"] for each in documents("classes")]
    assert len(names) == len(set(names)) > 200
    assert {"accelerator.anyaccel.dev", "gpu.anyaccel.dev", "h100.anyaccel.dev"} <= set(names)
    for each in documents("classes"):
        slice_rules.check_class(each)


def test_a_class_that_a_claim_names_is_there():
    classes = {each["metadata"]["name"] for each in documents() if each["kind"] == "DeviceClass"}
    page = DEPLOY.parents[2] / "docs" / "how-to" / "kubernetes-mixed-node.md"
    for path in (DEPLOY / "pod.yaml", page):
        named = set(re.findall(r"deviceClassName: ([\w.-]+)", path.read_text()))
        assert named - {"nic.example.com"}
        assert named - {"nic.example.com"} <= classes


@pytest.mark.parametrize("name", ["daemonset", "device-plugin"])
def test_an_agent_in_a_pod_has_its_folders(name):
    (found,) = documents(name)
    pod = found["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] in ("dra", "device-plugin")
    assert pod["hostPID"] is True
    assert (container["image"], container["imagePullPolicy"]) == ("anyaccel:latest", "IfNotPresent")
    assert f"docker build -t {container['image']} -f " in (DEPLOY / "Containerfile").read_text()
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert {each["name"]: each["hostPath"]["path"] for each in pod["volumes"]} == mounts
    # Without the second, the agent would not see drains between a boot and the next change of them.
    assert {"/run/anyaccel", os.path.dirname(KEPT), "/etc/anyaccel"} <= set(mounts.values())
    folders = {"daemonset": ("plugins", "plugins_registry"), "device-plugin": ("device-plugins", "pod-resources")}[name]
    assert {f"{KUBELET}/{folder}" for folder in folders} <= set(mounts.values())


def test_options_of_the_unit_are_those_of_the_command():
    text = (DEPLOY / "anyaccel-dra.service").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=\S+anyaccel (.*)$", text, re.MULTILINE)
    shown = subprocess.run(
        [sys.executable, "-m", "anyaccel", "kubernetes", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert command.startswith("kubernetes dra ")
    for option in re.findall(r"--[a-z-]+", command):
        assert option in shown


def test_the_policy_binds_slices_to_the_node_and_the_driver():
    (policy,) = (each for each in documents("rbac") if each["kind"] == "ValidatingAdmissionPolicy")
    told = " ".join(expressions(policy))
    assert "authentication.kubernetes.io/node-name" in told
    assert f"'{DRIVER}'" in told
    (account,) = (each for each in documents("rbac") if each["kind"] == "ServiceAccount")
    name = f"system:serviceaccount:{account['metadata']['namespace']}:{account['metadata']['name']}"
    assert f'"{name}"' in told
