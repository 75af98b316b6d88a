"""Connecting to a Ray cluster: which one, and what is said when that is not possible."""

import os
import subprocess
import sys
import types

import anyaccel as aa
import pytest
from anyaccel_ray.connection import connect
from ray_nodes import needs_ray


class Connected:
    """Ray as a process sees it that is connected to a cluster on its own machine."""

    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def get_runtime_context():
        return types.SimpleNamespace(gcs_address="10.0.0.7:6379")


@pytest.mark.parametrize("address", [None, "auto", "local", "10.0.0.7:6379", "127.0.0.1:6379", "localhost:6379"])
def test_the_cluster_that_there_is_goes_by_all_of_its_names(address):
    connect(Connected, address)


@pytest.mark.parametrize("address", ["10.0.0.8:6379", "127.0.0.1:6380", "ray://127.0.0.1:10001", "6379"])
def test_a_process_is_connected_to_one_cluster_at_a_time(address):
    with pytest.raises(aa.UsageError, match=r"connected to the Ray cluster at 10\.0\.0\.7:6379 already") as caught:
        connect(Connected, address)
    assert address in str(caught.value)


PROGRAM = """import anyaccel as aa
try:
    aa.Pool(engine='ray', address='local')
except aa.WorkerStartError as error:
    print(error, error.hint)
"""


@needs_ray
def test_a_cluster_that_ray_cannot_start_is_one_clear_error(tmp_path):
    environ = {**os.environ, "RAY_TMPDIR": str(tmp_path / ("too-long-for-the-path-of-a-socket" * 4))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "Ray could not start a cluster on this machine: " in done.stdout, done.stderr
    assert "anyaccel ray start --head" in done.stdout
