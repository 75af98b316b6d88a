"""PBS is on neither PyPI nor Debian: the lines are read by the grammar of version 2 in its administrator's guide.

The first line is ``$configversion 2``, each other one ``VNODE: ATTRIBUTE=VALUE``. Names of resources begin with a
letter and go on with letters, digits, ``_`` and ``-``.
"""

import re

from anyaccel.model import Health
from anyaccel_export.pbs import export
from export_machines import device, machines, source
from hypothesis import given, settings
from lengths import length

LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*): resources_available\.([A-Za-z][A-Za-z0-9_-]*)=([A-Za-z0-9_-]+)")


def read(text):
    first, *lines = text.splitlines()
    assert first == "$configversion 2"
    found = {}
    for line in lines:
        vnode, name, value = LINE.fullmatch(line).groups()
        assert vnode == "node-1"
        assert name not in found
        found[name] = value
    return found


def test_resources_are_counted():
    devices = (device(0, tags=("H100",)), device(1, tags=("H100",)), device(2, health=Health.UNHEALTHY))
    exported = export(source(*devices))
    assert read(exported.text) == {"ngpus": "2", "accelerator_type": "h100"}
    [note] = exported.notes
    assert 'qmgr -c "create resource ngpus type=long,flag=nh"' in note


def test_no_single_type_is_promised_where_there_are_several():
    assert read(export(source(device(0), device(1, model="Acme Two", tags=()))).text)["accelerator_type"] == "mixed"


def test_no_resource_has_a_name_of_pbs_itself():
    assert "ncpus" not in read(export(source(device(0, resource="CPU"))).text)


def test_without_devices_the_file_is_valid():
    assert export(source()).text == "$configversion 2\n"


@settings(max_examples=length(20, 60), deadline=None)
@given(machines())
def test_the_grammar_allows_whatever_plugins_may_report(devices):
    found = read(export(source(*devices)).text)
    assert sum(int(value) for name, value in found.items() if name != "accelerator_type") == len(devices)
