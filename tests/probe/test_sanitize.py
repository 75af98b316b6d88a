"""Private data does not survive; other data does, distinct and in order."""

from __future__ import annotations

import json
import re
import string

import pytest
from anyaccel.probe.recording import SCHEMA
from anyaccel.probe.sanitize import PrivateNames, replace_in, sanitize
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lengths import length

UUIDS = st.uuids(version=4).map(str)
MACS = st.binary(min_size=6, max_size=6).filter(lambda octets: octets[0] > 2).map(lambda octets: octets.hex(":"))
IPV4 = st.tuples(st.integers(11, 126), *[st.integers(0, 255)] * 3).map(lambda parts: ".".join(map(str, parts)))
IPV6 = st.integers(0xFD00 << 112, (0xFE00 << 112) - 1).map(
    lambda n: ":".join(f"{n:032x}"[i : i + 4] for i in range(0, 32, 4))
)
SERIALS = st.text(string.ascii_uppercase + string.digits, min_size=6, max_size=20).filter(
    lambda text: (
        any(map(str.isdigit, text.strip("0")))
        and any(map(str.isalpha, text))
        and not re.fullmatch(r"S0.*|(0X)?0*A0*1", text)
    )  # those look like what they are replaced with
)
NAMES = st.text(string.ascii_lowercase, min_size=6, max_size=12).map(lambda text: f"{text}qz")


def recording(**parts):
    return {"schema": SCHEMA, "environ": {}, "paths": {}, "commands": [], "queries": {}, **parts}


def cleaned(names=None, **parts):
    return sanitize(recording(**parts), names)[0]


def planted(*, uuid, mac, ipv4, ipv6, serial, user, host):
    """A recording in which every secret stands in several places and dresses."""
    return recording(
        environ={
            "ACME_VISIBLE": f"GPU-{uuid},MIG-{uuid}/1",
            "ACME_HOSTS": f"{ipv4},{ipv6}",
            "PATH": f"/home/{user}/bin:/usr/bin",
            "ACME_TOKEN": "hunter2-hunter2",
            "ACME_PROXY": f"http://{user}:hunter2-hunter2@proxy:3128",
        },
        paths={
            "/sys/class/acme/a0/serial_number": {"text": f"{serial}\n"},
            f"/sys/bus/mdev/devices/{uuid}": {"link": f"../../devices/{uuid}"},
            "/sys/class/net/eth0/address": {"text": mac.upper()},
            "/proc/sys/kernel/hostname": {"text": host},
            "/sys/module/acme/version": {"text": "2.16.7.0\n"},
            f"/home/{user}/.acme": {"dir": True},
        },
        commands=[
            {
                "argv": ["acme-smi", "-q", "-u", uuid],
                "returncode": 0,
                "stdout": f"Serial Number : {serial}\nUser: {user}\n",
            },
            {
                "argv": ["acme-smi", "--query=index,serial,name"],
                "stdout": f"0, {serial}, Acme 1\n",
                "stderr": f"from {mac}",
            },
            {
                "argv": ["acme-ls", "-j"],
                "stdout": json.dumps({"chips": [{"serial": serial, "ip": ipv4, "host": host}]}),
            },
            {"argv": ["dmesg"], "stdout": f"acme: a0 lost\nusb 1-1: SerialNumber: {serial}\nsda: {user}'s disk\n"},
        ],
        queries={
            f"acme/device/{uuid}": {"value": {"uuid": f"GPU-{uuid}", "serial": serial, "owner": user, "memory": 4096}},
            "acme/peer": {
                "error": {"kind": "E", "message": f"{host} ({ipv6}) does not answer {user}@{host}.example.com"}
            },
        },
    )


SECRETS = {
    "uuid": "6ba7b810-9dad-4d1b-80b4-00c04fd430c8",
    "mac": "3c:22:fb:01:02:03",
    "ipv4": "11.2.3.4",
    "ipv6": "fd00:0000:0000:0000:0000:0000:0000:0001",
    "serial": "ES1234567",
    "user": "aliceqz",
    "host": "aliceqz",
}


@settings(max_examples=length(20, 60), deadline=None)
@example(SECRETS)
@example(SECRETS | {"user": "acmectlqz", "host": "acmectlqz"})  # they begin like the driver
@example(SECRETS | {"serial": "ACME12345"})
@example(SECRETS | {"serial": "0X000000000002"})  # which is 2, and the version is 2.16.7.0
@given(
    st.fixed_dictionaries(
        {"uuid": UUIDS, "mac": MACS, "ipv4": IPV4, "ipv6": IPV6, "serial": SERIALS, "user": NAMES, "host": NAMES}
    )
)
def test_no_secret_survives_anywhere(secrets):
    uuid, host = secrets["uuid"], secrets["host"]
    after, replacements = sanitize(planted(**secrets), PrivateNames(hosts=(host,)))
    text = json.dumps(after).lower()
    for secret in (*secrets.values(), "hunter2"):
        assert secret.lower() not in text
    assert after["paths"]["/sys/module/acme/version"] == {"text": "2.16.7.0\n"}
    assert after["queries"][f"acme/device/{replacements[uuid]}"]["value"]["memory"] == 4096
    assert sanitize(after, PrivateNames(hosts=(host,)))[0] == after


@settings(max_examples=length(20, 60), deadline=None)
@given(st.lists(UUIDS, min_size=2, max_size=6, unique=True), st.lists(SERIALS, min_size=2, max_size=6, unique=True))
def test_ids_stay_distinct_and_in_order(uuids, serials):
    paths = {f"/d/{n}/uuid": {"text": uuid} for n, uuid in enumerate(uuids)}
    paths |= {f"/d/{n}/serial": {"text": serial} for n, serial in enumerate(serials)}
    after = cleaned(paths=paths)["paths"]
    new = [after[f"/d/{n}/uuid"]["text"] for n in range(len(uuids))]
    assert len(set(new)) == len(uuids)
    assert sorted(range(len(new)), key=new.__getitem__) == sorted(range(len(uuids)), key=uuids.__getitem__)
    assert len({after[f"/d/{n}/serial"]["text"] for n in range(len(serials))}) == len(serials)


@pytest.mark.parametrize(
    ("number", "notation"),
    [
        (0x93BB3629C01AEA1C, "{:016x}"),
        (0x084CAFEAE17E7696, "{:016x}"),
        (0x084CAFEAE17E7696, "0x{:x}"),
        (0x1234567890123456, "{:x}"),
    ],
)
def test_one_number_in_two_notations_stays_one(number, notation):
    after = cleaned(
        paths={
            "/kfd/properties": {"text": f"vendor_id 4098\nunique_id {number}\n"},
            "/drm/unique_id": {"text": notation.format(number)},
        },
        queries={"acme/chip": {"value": {"unique_id": number, "size": number}}},
    )
    text = after["paths"]["/kfd/properties"]["text"]
    assert text.startswith("vendor_id 4098\nunique_id ")
    new = int(text.split()[-1])
    assert new != number
    assert int(after["paths"]["/drm/unique_id"]["text"], 16) == new
    assert after["queries"]["acme/chip"]["value"] == {"unique_id": new, "size": number}


def test_the_beginning_of_an_id_in_a_mask_still_means_the_same_device():
    uuids = ["8932f937-d72c-4106-c12f-20bd9faed9f6", "8932aaaa-d72c-4106-c12f-20bd9faed9f6"]
    after = cleaned(
        environ={"ONE": "GPU-8932f9,1", "BOTH": "GPU-8932", "NONE": "GPU-1234,-1", "WHOLE": f"GPU-{uuids[0].upper()}"},
        queries={f"acme/{n}": {"value": f"GPU-{uuid}"} for n, uuid in enumerate(uuids)},
    )
    first, second = (after["queries"][f"acme/{n}"]["value"] for n in range(2))
    assert after["environ"]["ONE"] == f"{first},1"
    assert after["environ"]["WHOLE"] == first
    assert after["environ"]["NONE"] == "GPU-1234,-1"
    assert first.startswith(after["environ"]["BOTH"])
    assert second.startswith(after["environ"]["BOTH"])


@pytest.mark.parametrize(
    "text",
    [
        "0000:3b:00.0", "00000000:3B:00.0", "driver 2.16.7.0", "Firmware version : 1.22.0.10", "std::string",
        "127.0.0.1", "169.254.169.254", "::1", "serial: N/A", "serial: 0", "Serial Number : 00000000", "uuid: none",
        "96.00.74.00.01", "libfoo.so.1.2.3.4", "user: root", "index, serial\n0, N/A", "wwid",
    ],
)  # fmt: skip
def test_what_tells_nothing_stays(text):
    before = {"/sys/x": {"text": text}}
    assert cleaned(paths=before)["paths"] == before


def test_an_address_of_this_machine_goes_also_where_it_looks_like_a_version():
    paths = {"/run/version": {"text": "10.11.12.13"}}
    assert cleaned(paths=paths)["paths"] == paths
    assert cleaned(PrivateNames(addresses=("10.11.12.13",)), paths=paths)["paths"] == {
        "/run/version": {"text": "10.0.0.1"}
    }


def test_a_user_who_is_called_like_the_driver_goes_from_home_directories_only():
    after = cleaned(
        PrivateNames(users=("acme", "alice"), hosts=("h100",)),
        paths={
            "/sys/module/acme/version": {"text": "acme of alice on h100"},
            "/home/acme/x": {"text": "ACME H100, Alice"},
        },
    )
    assert after["paths"] == {
        "/sys/module/acme/version": {"text": "acme of user-2 on host-1"},
        "/home/user-1/x": {"text": "ACME host-1, user-2"},
    }


def test_a_document_of_one_line_stays_a_document():
    """Commas of JSON are no columns."""
    stdout = '[{"type":"a1.large","instance_id":"i-0","serial":"0X77AB12","cores":4},{"serial":"0X77AB13"}]'
    after = cleaned(commands=[{"argv": ["acme-ls", "--json"], "stdout": stdout}])["commands"][0]["stdout"]
    first, second = json.loads(after)
    assert (first["type"], first["instance_id"], first["cores"]) == ("a1.large", "i-0", 4)
    assert {"0X77AB12", "0X77AB13"}.isdisjoint({first["serial"], second["serial"]})
    assert first["serial"] < second["serial"]


def test_the_log_of_the_machine_is_left_out():
    log = "[1] audit: alice logged in\n[2] ACME: Xid (PCI:0000:3b:00): 79\n"
    after = cleaned(commands=[{"argv": ["/bin/dmesg"], "stdout": log}, {"argv": ["journalctl", "-k"], "timeout": True}])
    assert after["commands"] == [
        {"argv": ["/bin/dmesg"], "stdout": ""},
        {"argv": ["journalctl", "-k"], "timeout": True},
    ]


def test_the_same_replacements_can_be_made_in_an_inventory():
    before = recording(paths={"/d/uuid": {"text": "8932f937-d72c-4106-c12f-20bd9faed9f6"}})
    _, replacements = sanitize(before)
    device = {"id": "acme-8932F937-D72C-4106-C12F-20BD9FAED9F6", "memory_bytes": 5, "links": {}, "nodes": ["/dev/a"]}
    assert replace_in(device, replacements) == {**device, "id": "acme-00000001-0000-4000-8000-000000000001"}


def test_a_recording_without_any_part_and_with_more_parts_is_understood():
    after, replacements = sanitize({"schema": SCHEMA, "comment": "of alice@example.org"})
    assert (after["comment"], replacements) == ("of user@example.com", {})
