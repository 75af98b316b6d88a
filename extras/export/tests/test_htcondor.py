"""HTCondor: its own parser of ClassAds reads what we print, and its own reader of configuration what the notes say."""

import re
import subprocess
import sys

import pytest
from anyaccel.model import Health
from anyaccel_export.htcondor import export
from export_machines import device, machines, source
from hypothesis import HealthCheck, given, settings
from lengths import length

PAIR = (device(0, tags=("H100",)), device(1, tags=("H100",), numa_node=None, memory_bytes=None, pci_bus_id=None))


@pytest.fixture(scope="module")
def classads():
    module = pytest.importorskip("classad2", reason="needs HTCondor's ClassAds (try: pip install htcondor)")

    def read(text):
        ad = module.parseOne(text, module.ParserType.Old)
        return {name: dict(value) if name.startswith("Device") else value for name, value in ad.items()}

    return read


def test_lines():
    assert export(source(*PAIR)).text == (
        'DetectedGPUs="acme-0, acme-1"\n'
        'Device0=[ id="acme-0"; DeviceName="Acme One"; DeviceType="H100"; DeviceVendor="acme"; DeviceIndex=0;'
        ' GlobalMemoryMb=16384; DevicePciBusId="0000:00:00.0"; DeviceNumaNode=0; ]\n'
        'Device1=[ id="acme-1"; DeviceName="Acme One"; DeviceType="H100"; DeviceVendor="acme"; DeviceIndex=1; ]\n'
    )


def test_its_parser_reads_them(classads):
    ad = classads(export(source(*PAIR)).text)
    assert ad["DetectedGPUs"] == "acme-0, acme-1"
    assert ad["Device0"]["GlobalMemoryMb"] == 16384
    assert ad["Device1"] == {
        "id": "acme-1", "DeviceName": "Acme One", "DeviceType": "H100", "DeviceVendor": "acme", "DeviceIndex": 1,
    }  # fmt: skip


def test_each_resource_has_a_name_in_the_plural():
    devices = (device(0), device(1, resource="neuron_cores"), device(2, resource="TPU"), device(3, resource="CPU"))
    text = export(source(*devices)).text
    assert re.findall(r"^Detected(\w+)=", text, re.MULTILINE) == ["GPUs", "neuron_cores", "TPUs", "AcceleratorCPUs"]


def test_devices_that_may_not_be_given_out_are_not_there():
    text = export(source(device(0), device(1, visible=False), device(2, health=Health.UNHEALTHY))).text
    assert text.startswith('DetectedGPUs="acme-0"\n')
    assert export(source()).text == ""


@pytest.mark.parametrize("name", ["7", "0-3", "-1", "true", "inf", "nan", "0000:03:00.0"])
def test_an_id_that_is_a_number_to_htcondor_is_no_quantity(name):
    """A list of one number would say how many devices there are."""
    [listed] = re.findall(r'^Detected\w+="(.*)"$', export(source(device(0, id=name))).text, re.MULTILINE)
    assert re.fullmatch(rf"acme-{name.strip('-')}", listed)


def test_its_configuration_takes_the_line_that_the_note_says(classads, tmp_path):
    [note] = export(source(*PAIR)).notes
    (tmp_path / "configuration").write_text(f"{note.partition(': ')[2]}\n")
    program = "import htcondor2; print(htcondor2.param['MACHINE_RESOURCE_INVENTORY_GPUs'])"
    environ = {"CONDOR_CONFIG": str(tmp_path / "configuration"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "anyaccel export htcondor\n", done.stderr


@settings(max_examples=length(20, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(devices=machines())
def test_its_parser_reads_whatever_plugins_may_report(classads, devices):
    ad = classads(export(source(*devices)).text)
    listed = [name for key, ids in ad.items() if key.startswith("Detected") for name in ids.split(", ")]
    found = [value["id"] for key, value in ad.items() if re.fullmatch(r"Device\d+", key)]
    assert sorted(listed) == sorted(found)
    assert len(set(found)) == len(devices)
