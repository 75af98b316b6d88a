"""The container file of a cluster's node: its commands, carried out with the wheels of this checkout."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CONTAINERFILE = Path(__file__).parents[2] / "examples" / "container" / "Containerfile"
IMAGE = Path(__file__).parent / "image.sh"
MACHINE = "sim:H100:2"
MAY_MOUNT = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0

pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.timeout(400)]


def instructions():
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def values(name):
    return [value for instruction, value in instructions() if instruction == name]


@pytest.fixture
def node(dist, tmp_path):
    """Make the image with other extras, run its command with arguments, and return what it printed."""

    def node(extras, *arguments, first="true"):
        commands = [value.replace("--mount=type=bind,source=dist,target=/dist ", "") for value in values("RUN")]
        settings = {**dict(value.split("=", 1) for value in values("ARG")), "EXTRAS": extras}
        (entry,) = map(json.loads, values("ENTRYPOINT"))
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "PYTHON"))},
            **settings,
            **dict(value.split("=", 1) for value in values("ENV")),
            "SCRATCH": str(tmp_path),
            "DIST": str(dist),
            "PYTHON": os.path.realpath(sys.executable),
            "RUN": "\n".join(commands),
            "USER_ID": f"{values('USER')[0]}:{values('USER')[0]}",
            "WORKDIR": values("WORKDIR")[0],
            "HOME_OF_USER": values("WORKDIR")[0],
            "COMMAND": f"id -u; {first}; {shlex.join(entry)} {shlex.join(arguments)}",
            "ANYACCEL_MACHINE": MACHINE,
            "ANYACCEL_STATE_DIR": "/tmp/leases",
        }
        command = ["unshare", "--mount", "--fork", "--pid", "--kill-child", "sh", str(IMAGE)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=350, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return node


@pytest.mark.full  # Ray is downloaded and installed
@pytest.mark.skipif(not MAY_MOUNT, reason="needs root and the right to mount, for a file system of its own")
def test_it_starts_a_node_with_the_devices_of_its_machine(node):
    extras = dict(value.split("=", 1) for value in values("ARG"))["EXTRAS"]
    user, ray, command = node(extras, "--dry-run", *json.loads(values("CMD")[0]), first="ray --version")
    assert user == values("USER")[0]
    assert ray.startswith("ray, version ")
    assert command.startswith("ray start --num-gpus=2 '--resources={\"accelerator_type:H100\":1}'")
    assert command.endswith("--block --head")
