"""Cores are numbered as Slurm numbers them, whatever order the kernel numbers threads in."""

import os

import pytest
from anyaccel_export.cores import cores_by_node


@pytest.fixture
def machine(tmp_path):
    """Lay out sysfs for threads, each a triple of socket, NUMA node and core."""

    def lay_out(threads):
        for cpu, (socket, node, core) in threads.items():
            topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            siblings = [str(other) for other, place in threads.items() if place == (socket, node, core)]
            (topology / "thread_siblings_list").write_text(",".join(siblings) + "\n")
            (topology / "physical_package_id").write_text(f"{socket}\n")
            folder = tmp_path / "node" / f"node{node}"
            folder.mkdir(parents=True, exist_ok=True)
            cpus = [str(other) for other, place in threads.items() if place[1] == node]
            (folder / "cpulist").write_text(",".join(cpus) + "\n")
        return str(tmp_path)

    return lay_out


def test_threads_of_one_core_are_one(machine):
    threads = {cpu: (cpu % 4 // 2, cpu % 4 // 2, cpu % 4) for cpu in range(8)}
    assert cores_by_node(machine(threads)) == {0: (0, 1), 1: (2, 3)}


def test_sockets_come_one_after_the_other(machine):
    """Some machines number their threads in turns: 0 on one socket, 1 on the other."""
    threads = {cpu: (cpu % 2, cpu % 2, cpu // 2) for cpu in range(8)}
    assert cores_by_node(machine(threads)) == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


def test_nodes_of_one_socket_come_one_after_the_other(machine):
    threads = {cpu: (0, cpu % 2, cpu // 2) for cpu in range(4)}
    assert cores_by_node(machine(threads)) == {0: (0, 1), 1: (2, 3)}


def test_threads_that_are_offline_are_not_counted(machine, tmp_path):
    system = machine({cpu: (0, 0, cpu) for cpu in range(3)})
    for name in ("thread_siblings_list", "physical_package_id"):
        (tmp_path / "cpu" / "cpu1" / "topology" / name).unlink()
    assert cores_by_node(system) == {0: (0, 1)}


def test_a_kernel_that_shows_no_nodes_names_no_cores(tmp_path):
    assert cores_by_node(str(tmp_path)) == {}


def test_this_host_has_each_core_once():
    found = [core for cores in cores_by_node().values() for core in cores]
    if not found:
        pytest.skip("needs a kernel that shows its NUMA nodes in /sys/devices/system/node")
    assert sorted(found) == list(range(len(found)))
    assert len(found) <= os.cpu_count()
