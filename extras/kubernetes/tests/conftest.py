"""A node with agents, a kubelet and an API server."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyaccel
import pytest

sys.path.append(str(Path(__file__).parent))

from fake_api import FakeApi
from fake_kubelet import PATIENCE, FakeKubelet

MACHINE = "sim:H100:2,TPU-V4:4"


class NodeUnderTest:
    """Folders of a node, and agents in processes of their own."""

    DIVIDED = str(Path(__file__).parents[3] / "plugins/intel/recordings/flex170-sriov-4vf")
    """A machine with a device and its four parts."""

    def __init__(self, root, api):
        self.root, self.api = root, api
        self.kubelet = FakeKubelet(root / "kubelet")
        self.cdi = root / "cdi"
        self.agents = []
        self.environ = dict(os.environ)
        self.machine = MACHINE

    def start(self, agent, *options):
        log = (self.root / f"{agent}.log").open("a")
        command = [sys.executable, "-m", "anyaccel", "kubernetes", agent, "--machine", self.machine, "--kubelet",
                   str(self.kubelet.root), "--every", "1", *options]  # fmt: skip
        if agent == "dra":
            command += ["--node", "n1", "--cdi", str(self.cdi)]
            if "--server" not in options:
                command += ["--server", self.api.url]
        process = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)
        log.close()
        self.agents.append(process)
        return process

    def driver(self, *options):
        """Start the driver, and register it as the kubelet does."""
        process = self.start("dra", *options)
        self.register(process)
        return process

    def register(self, process):
        self.wait_for(lambda: process.poll() is not None or self._registers())
        assert process.poll() is None, self.log("dra")

    def _registers(self):
        import grpc

        try:
            self.kubelet.register_driver()
        except grpc.RpcError:
            return False
        return True

    @staticmethod
    def wait_for(holds):
        import time

        deadline = time.monotonic() + PATIENCE
        while not (found := holds()):
            assert time.monotonic() < deadline, "it never came to hold"
            time.sleep(0.02)
        return found

    def kill(self, process, number=signal.SIGKILL):
        process.send_signal(number)
        process.wait(PATIENCE)

    def log(self, agent):
        return (self.root / f"{agent}.log").read_text()

    def leases(self):
        inventory = anyaccel.detect(self.machine)
        return {each.device: each for each in anyaccel.leases(inventory) if not each.through}

    def edits(self, uid):
        """Container edits of a claim's CDI file, by device."""
        document = json.loads((self.cdi / f"anyaccel-claim-{uid}.json").read_text())
        return {f"{document['kind']}={each['name']}": each["containerEdits"] for each in document["devices"]}


@pytest.fixture
def node(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="k8s-") as folder:  # the path of a socket has 107 characters at most
        root = Path(folder)
        monkeypatch.setenv("ANYACCEL_STATE_DIR", str(root / "state"))
        api = FakeApi()
        found = NodeUnderTest(root, api)
        yield found
        for process in found.agents:
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE)
        found.kubelet.stop()
        api.close()
