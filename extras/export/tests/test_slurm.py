import sys
from pathlib import Path

import pytest
import slurm_cluster
from anyaccel import detect
from anyaccel.errors import UsageError
from anyaccel.model import Fractional, Health
from anyaccel_export.slurm import gres_conf, node_line
from export_machines import device, machines, source
from hypothesis import HealthCheck, given, settings

LINKED = (
    device(0, tags=("H100",), links={"acme-1": 18}),
    device(1, tags=("H100",), links={"acme-0": 18}),
    device(2, tags=("A100-80G",)),
)
FOUR = "null", "zero", "full", "random"
CORES = tuple(
    device(index, id=f"core-{index}", nodes=("/dev/tty",), resource="neuron_cores", kind="neuron", vendor="other")
    for index in range(4)
)


@pytest.fixture
def slurmd(needs):
    needs("slurmd", packages="apt-get install slurmd")


@pytest.fixture
def slurm(needs):
    needs("slurmd", "slurmctld", "srun", packages="apt-get install slurmctld slurmd slurm-client")


def test_lines_for_gres_conf():
    exported = gres_conf(source(*LINKED, *CORES))
    assert exported.text.splitlines()[1:] == [
        "NodeName=node-1 Name=gpu Type=h100 File=/dev/null Links=-1,18,0",
        "NodeName=node-1 Name=gpu Type=h100 File=/dev/zero Links=18,-1,0",
        "NodeName=node-1 Name=gpu Type=a100-80g File=/dev/full",
        "NodeName=node-1 Name=neuron_cores Type=acme-one Count=4",
    ]
    [note] = exported.notes
    assert "neuron_cores is counted without device files, because core-0 has none of its own" in note


def test_lines_for_slurm_conf():
    assert node_line(source(*LINKED, *CORES)).text == (
        "GresTypes=gpu,neuron_cores\nNodeName=node-1 Gres=gpu:h100:2,gpu:a100-80g:1,neuron_cores:acme-one:4\n"
    )


def test_a_node_that_all_devices_share_is_nobodys_file():
    """A cgroup that denied it to others would take every device from them."""
    devices = [device(index, nodes=("/dev/tty", path)) for index, path in enumerate(("/dev/null", "/dev/zero"))]
    assert "File=/dev/null\n" in gres_conf(source(*devices)).text
    assert "/dev/tty" not in gres_conf(source(*devices)).text


def test_hidden_and_unhealthy_devices_are_not_exported():
    devices = (LINKED[0], device(1, visible=False), device(2, health=Health.UNHEALTHY), device(3))
    assert node_line(source(*devices)).text.endswith("Gres=gpu:h100:1,gpu:acme-one:1\n")
    assert gres_conf(source(*devices)).text.count("Name=gpu") == 2
    assert "Links" not in gres_conf(source(*devices)).text


def test_cores_near_a_device_are_named():
    devices = (device(0), device(1, numa_node=1), device(2, numa_node=None), device(3, numa_node=7))
    lines = gres_conf(source(*devices, cores={0: (0, 1, 2, 3), 1: (4, 6, 7)})).text.splitlines()[1:]
    assert [line.partition("File=")[2] for line in lines] == [
        "/dev/null Cores=0-3",
        "/dev/zero Cores=4,6-7",
        "/dev/full",
        "/dev/random",
    ]


def test_slurmd_reads_the_cores(slurmd, tmp_path):
    exported = source(device(0), device(1, numa_node=1), cores={0: (0,), 1: (1,)})
    configuration = slurm_cluster.write(tmp_path / "s", gres_conf(exported).text, node_line(exported).text)
    found, complaints = slurm_cluster.read_back(configuration)
    assert complaints == []
    assert [(entry["File"], entry["Cores"]) for entry in found] == [("/dev/null", "0"), ("/dev/zero", "1")]


def test_without_devices_both_files_are_valid():
    assert node_line(source()).text == "NodeName=node-1\n"
    assert gres_conf(source()).text.startswith("# ")
    assert gres_conf(source()).text.count("\n") == 1


def test_shards_need_devices_that_can_be_shared():
    with pytest.raises(UsageError, match="can be shared and have one device file each"):
        gres_conf(source(device(0, fractional=Fractional.NO), shards=4))
    with pytest.raises(UsageError, match="leave --shards out"):
        gres_conf(source(device(0, nodes=("/dev/null", "/dev/zero")), shards=4))


def test_slurmd_reads_the_file(slurmd, tmp_path):
    exported = source(*LINKED, *CORES, shards=4)
    configuration = slurm_cluster.write(tmp_path / "s", gres_conf(exported).text, node_line(exported).text)
    found, complaints = slurm_cluster.read_back(configuration)
    assert complaints == []
    gpus = [(entry["Type"], entry["File"], entry.get("Links")) for entry in found if entry["Name"] == "gpu"]
    assert sorted(gpus, key=str) == [
        ("a100-80g", "/dev/full", None),
        ("h100", "/dev/null", "-1,18,0"),
        ("h100", "/dev/zero", "18,-1,0"),
    ]
    shards = [(entry["File"], entry["Count"]) for entry in found if entry["Name"] == "shard"]
    assert sorted(shards) == [("/dev/full", "4"), ("/dev/null", "4"), ("/dev/zero", "4")]
    assert [entry["Count"] for entry in found if entry["Name"] == "neuron_cores"] == ["4"]


def test_a_device_with_several_nodes_is_one_device(slurmd, tmp_path):
    exported = source(device(0, nodes=("/dev/null", "/dev/zero")), device(1, nodes=("/dev/full", "/dev/random")))
    configuration = slurm_cluster.write(tmp_path / "s", gres_conf(exported).text, node_line(exported).text)
    found, complaints = slurm_cluster.read_back(configuration)
    assert complaints == []
    assert sorted((entry["Count"], entry["File"]) for entry in found) == [
        ("1", "/dev/full,/dev/random"),
        ("1", "/dev/null,/dev/zero"),
    ]


def test_slurmd_complains_about_a_wrong_file(slurmd, tmp_path):
    """What the test above looks for is there to be found."""
    exported = source(*LINKED)
    wrong = gres_conf(exported).text.replace("/dev/full", "/etc/passwd")
    configuration = slurm_cluster.write(tmp_path / "s", wrong, node_line(exported).text)
    assert "not a valid character or block device" in str(slurm_cluster.read_back(configuration)[1])


@pytest.mark.timeout(300)
def test_a_cluster_hands_the_devices_out(slurm, tmp_path):
    """The node registers with what the controller was told, and two jobs at once get different devices."""
    exported = source(*LINKED, *CORES)
    configuration = slurm_cluster.write(tmp_path / "s", gres_conf(exported).text, node_line(exported).text)
    with slurm_cluster.running(configuration) as cluster:
        assert cluster.node()["Gres"].replace("(S:0)", "") == "gpu:h100:2,gpu:a100-80g:1,neuron_cores:acme-one:4"
        meet = (
            f"echo $SLURM_STEP_GPUS; cd {tmp_path}; touch met.$$; until [ $(ls met.* | wc -l) = 2 ]; do sleep .1; done"
        )
        job = f"timeout 40 srun -n1 -c1 --gres=gpu:h100:1 sh -c '{meet}'"
        both = cluster.call("sh", "-c", f"{job} & {job} & wait")
        assert sorted(both.stdout.split()) == ["0", "1"], both.stderr
        assert cluster.call("srun", "--gres=neuron_cores:acme-one:4", "echo", "ran").stdout == "ran\n"
        refused = cluster.call("srun", "--gres=neuron_cores:5", "true")
        assert "Requested node configuration is not available" in refused.stderr


@pytest.mark.timeout(300)
def test_a_job_divides_what_slurm_gave_it(slurm, tmp_path):
    """Two jobs of two devices each, at once: inside of each there are two, whatever the machine has."""
    pytest.importorskip("anyaccel_nvidia", reason="needs the plug-in nvidia, for a machine to simulate")
    exported = source(*(device(n, tags=("H100",), nodes=(f"/dev/{name}",)) for n, name in enumerate(FOUR)))
    configuration = slurm_cluster.write(tmp_path / "s", gres_conf(exported).text, node_line(exported).text)
    given = [each.id for each in detect("sim:H100:4").devices]
    look = "anyaccel run GPU:2 -- printenv CUDA_VISIBLE_DEVICES; anyaccel why GPU:3"
    meet = f"cd {tmp_path}; touch met.$$; until [ $(ls met.* | wc -l) = 2 ]; do sleep .1; done"
    with slurm_cluster.running(configuration) as cluster:
        cluster.environ |= {
            "PATH": f"{Path(sys.executable).parent}:{cluster.environ['PATH']}",
            "ANYACCEL_MACHINE": "sim:H100:4",
            "ANYACCEL_STATE_DIR": str(tmp_path / "state"),
        }
        job = f"timeout 90 srun -n1 -c1 --gres=gpu:2 sh -c '{look}; {meet}'"
        both = cluster.call("sh", "-c", f"{job} & {job} & wait")
    lines = both.stdout.splitlines()
    masks = sorted((line.split(",") for line in lines if line.startswith("GPU-")), key=lambda ids: given.index(ids[0]))
    assert masks == [given[:2], given[2:]], both.stderr
    assert lines.count("nearest that fits: GPU:2") == 2


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(devices=machines())
def test_slurmd_reads_whatever_plugins_may_report(slurmd, tmp_path_factory, devices):
    exported = source(*devices)
    folder = tmp_path_factory.mktemp("slurm") / "s"
    configuration = slurm_cluster.write(folder, gres_conf(exported).text, node_line(exported).text)
    found, complaints = slurm_cluster.read_back(configuration)
    assert complaints == []
    assert sum(int(entry["Count"]) for entry in found) == len(devices)
