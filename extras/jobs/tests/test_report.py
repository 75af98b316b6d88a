"""anyaccel report and anyaccel metrics."""

import csv
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from xml.etree import ElementTree as ET

import pytest
from anyaccel.cli.sample import take_sample
from anyaccel.ledger import Ledger, journal
from anyaccel.ledger.journal import JournalEntry, Used
from anyaccel.model import Health, Stats, replace
from anyaccel_jobs import metrics_command as metrics
from anyaccel_jobs import report_command as report
from anyaccel_jobs.timeline import picture
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from waiting import until

NOW = 1_000_000.0


def use(user="alice", began=0.0, ended=3600.0, devices=("acme/0",), *, units=10_000, fared=None, **more):
    about = {"lease": "0" * 12, "held": ended - began, "waited": 0.0} | more
    kinds = tuple(
        Used(device=device, type="One" if device[-1] == "0" else "Two", units=units, **(fared or {}))
        for device in devices
    )
    return JournalEntry(user=user, began=began, ended=ended, devices=kinds, **about)


def fared(utilization, idle, memory=None, observed=100.0):
    return {"observed": observed, "utilization": utilization, "idle": idle, "memory_peak_bytes": memory}


def test_hours_are_added_up_by_each_thing():
    entries = [
        use(devices=("acme/0", "acme/1"), note="train", waited=60.0, fared=fared(0.5, 0.0)),
        use(user="bob", ended=7200.0, program="eval", fared=fared(0.01, 100.0)),
        use(user="bob", devices=("acme/1",), leases=3, waited=30.0),
    ]
    by_user = report.summarize(entries, "user")
    assert [(row.name, row.leases, row.device_seconds) for row in by_user] == [
        ("bob", 4, 10800.0),
        ("alice", 1, 7200.0),
    ]
    assert (by_user[1].utilization, by_user[1].idle_device_seconds, by_user[1].waited_mean_seconds) == (0.5, 0, 60.0)
    assert (by_user[0].utilization, by_user[0].idle_device_seconds, by_user[0].waited_mean_seconds) == (
        0.01,
        7200.0,
        7.5,
    )
    assert [(row.name, row.device_seconds) for row in report.summarize(entries, "device")] == [
        ("acme/0", 10800.0),
        ("acme/1", 7200.0),
    ]
    assert {row.name for row in report.summarize(entries, "type")} == {"One", "Two"}
    assert [row.name for row in report.summarize(entries, "job")] == ["alice: train", "bob: eval", "bob: -"]


def test_a_hold_is_idle_where_a_device_stood_idle_for_most_of_the_time():
    entries = [
        use(fared=fared(0.6, 40.0, 1 << 30)),  # idle for less than half of the time, though it was
        use(fared=fared(0.3, 60.0, 3 << 30)),
        use(ended=7200.0),  # unknown
    ]
    (row,) = report.summarize(entries, "user")
    assert (row.leases, row.idle_leases, row.idle_device_seconds) == (3, 1, 3600.0)
    assert (row.utilization, row.memory_peak_bytes) == (pytest.approx(0.45), 3 << 30)
    (row,) = report.summarize([use(), use(fared={"memory_peak_bytes": 5})], "user")
    assert (row.utilization, row.idle_device_seconds, row.memory_peak_bytes) == (None, None, 5)


def test_the_use_of_a_shared_device_is_nobodys_own():
    """By user and by job only whole devices count; that a device stood idle is true of each of its holders."""
    entries = [
        use(units=5000, fared=fared(0.9, 0.0, 7)),
        use(user="bob", units=2500, fared=fared(0.0, 100.0, 1)),
        use(user="carol", fared=fared(0.5, 0.0, 3)),
    ]
    rows = {row.name: row for row in report.summarize(entries, "user")}
    assert (rows["alice"].utilization, rows["alice"].memory_peak_bytes, rows["alice"].shares) == (None, None, True)
    assert (rows["bob"].utilization, rows["bob"].idle_device_seconds) == (None, 900.0)
    assert (rows["carol"].utilization, rows["carol"].shares) == (0.5, False)
    (row,) = report.summarize(entries, "device")
    assert row.utilization == pytest.approx((0.9 * 0.5 + 0.0 * 0.25 + 0.5) / 1.75)
    assert (row.memory_peak_bytes, row.shares) == (7, False)


FORKS = """
import os, sys
import anyaccel as aa

inventory = aa.detect("sim:A1:2")
hold = aa.acquire("APU", inventory=inventory, note="one of its own")
aa.open_scheduler(inventory, shared=True).allocate("APU", note="one of a scheduler")
if os.fork() == 0:
    sys.exit()
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_a_hold_ends_once_and_not_with_a_fork_of_its_process(anyaccel, acme):
    subprocess.run([sys.executable, "-c", FORKS], check=True)
    rows = json.loads(anyaccel("report", "--by", "job", "--json").stdout)["rows"]
    assert sorted((row["job"].partition(": ")[2], row["leases"]) for row in rows) == [
        ("one of a scheduler", 1),
        ("one of its own", 1),
    ]


def test_what_reaches_out_of_the_period_is_cut():
    assert report.clipped(use(began=0.0, ended=100.0), 50.0, 200.0).held == 50.0
    assert report.clipped(use(began=0.0, ended=100.0), 200.0, 300.0) is None
    assert report.clipped(use(began=10.0, ended=10.0), 0.0, 20.0).held == 0.0


@pytest.fixture
def written():
    now = time.time()
    for entry in (
        use(began=now - 7200, ended=now - 3600, note="=cmd()"),
        use(began=now - 30 * 86400, ended=now - 29 * 86400, note="old"),
    ):
        assert journal.write(entry, shared=False)


def test_the_table_json_and_csv_say_the_same(anyaccel, written):
    assert "1.00" in anyaccel("report").stdout
    (row,) = json.loads(anyaccel("report", "--by", "device", "--json").stdout)["rows"]
    assert (row["device"], row["device_seconds"], row["utilization"]) == ("acme/0", 3600.0, None)
    (row,) = csv.DictReader(io.StringIO(anyaccel("report", "--by", "job", "--csv").stdout))
    assert row["job"].endswith("=cmd()")
    assert "25.00" in anyaccel("report", "--since", "60d").stdout
    assert anyaccel("report", "--since", "1s").stdout.startswith("No lease was held between ")


def test_the_use_is_shown_in_the_table_json_csv_and_picture(anyaccel, tmp_path):
    now = time.time()
    assert journal.write(
        use(began=now - 3600, ended=now - 10, fared=fared(0.876, 10.0, 3 << 30), timeouts=1), shared=False
    )
    assert journal.write(
        use(began=now - 7210, ended=now - 3610, units=5000, fared=fared(0.0, 100.0, 1 << 30)), shared=False
    )
    done = anyaccel("report", "--plot", str(tmp_path / "t.svg"))
    period, _, row, total = done.stdout.splitlines()
    assert period.endswith(": 1.50 device hours were used.")  # of how many is unknown here
    assert row.split()[1:] == total.split()[1:]
    assert row.split()[2:] == ["1.50", "-", "0s", "0s", "88%", "0.50", "3.0", "GiB", "1"]
    assert "the load of shares is left out" in done.stderr
    drawn = (tmp_path / "t.svg").read_text()
    assert "3590 s, device 88% busy" in drawn
    assert sorted(set(re.findall(r'fill-opacity="([0-9.]+)"', drawn))) == ["0.3", "0.85"]
    (row,) = json.loads(anyaccel("report", "--json").stdout)["rows"]
    assert (row["utilization"], row["idle_leases"], row["idle_device_seconds"]) == (0.876, 1, 1800.0)
    assert (row["memory_peak_bytes"], row["timeouts"]) == (3 << 30, 1)
    (row,) = csv.DictReader(io.StringIO(anyaccel("report", "--by", "device", "--csv").stdout))
    assert (row["device"], row["idle_leases"], row["memory_peak_bytes"]) == ("acme/0", "1", str(3 << 30))
    assert float(row["utilization"]) == pytest.approx(0.876 * 3590 / (3590 + 1800), abs=1e-3)


def test_the_picture_is_well_formed_whatever_names_say(anyaccel, written, tmp_path):
    drawn = picture([use(user='<a href="x">&', note="\x1b]0;", devices=("acme/10", "acme/9"))], 0.0, 7200.0)
    root = ET.fromstring(drawn)
    assert "\x1b" not in drawn
    texts = [text.text for text in root.findall(".//{*}text")]
    assert '<a href="x">&' in texts
    assert texts.index("acme/9") < texts.index("acme/10")
    assert anyaccel("report", "--plot", str(tmp_path / "t.svg")).returncode == 0
    ET.parse(tmp_path / "t.svg")
    assert anyaccel("report", "--plot", str(tmp_path / "u.svg"), "--declare", "x").returncode == 2
    assert not (tmp_path / "u.svg").exists()  # a refusal changes nothing
    failed = anyaccel("report", "--plot", str(tmp_path / "no" / "t.svg"))
    assert failed.returncode == 1
    assert "cannot be written: No such file or directory" in failed.stderr
    assert "Nothing was held." in picture([], 0.0, 1.0)


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_metrics_are_openmetrics_with_what_the_vendor_tells(anyaccel, acme, record):
    machine = record({"memory": 1 << 34}, {"memory": 1 << 33})
    done = anyaccel("metrics", "--machine", machine)
    assert done.returncode == 0, done.stderr
    found = families(done.stdout)
    limits = {sample.labels["hw_id"]: sample.value for sample in found["hw_gpu_memory_limit_bytes"].samples}
    assert sorted(limits.values()) == [1 << 33, 1 << 34]
    assert found["anyaccel_device"].type == "info"
    assert len(found["anyaccel_device"].samples) == 2
    assert found["anyaccel_vendor_up"].samples[0].value == 1
    states = [sample for sample in found["hw_status"].samples if sample.value]
    assert len(states) == 2
    assert found["anyaccel_lease_active"].samples == []


def test_every_metric_is_read_back_by_the_reference_parser(acme):
    import anyaccel

    inventory = anyaccel.detect(machine="sim:A1:1")
    (device,) = inventory.devices
    seen = Stats(
        memory_used_bytes=1 << 30,
        utilization=0.25,
        temperature_celsius=61.5,
        power_watts=300.0,
        ecc_errors_corrected=7,
        health=Health.UNHEALTHY,
    )
    with anyaccel.acquire("APU:0.5", machine="sim:A1:1"):
        sample = replace(take_sample(inventory), observed={device.id: seen})
    found = families(metrics.render(metrics.families(sample)))
    value = {name: family.samples[0].value for name, family in found.items() if family.samples}
    assert value["hw_gpu_utilization_ratio"] == 0.25
    assert value["hw_temperature_celsius"] == 61.5
    assert value["hw_errors"] == 7
    (state,) = (sample.labels["hw_state"] for sample in found["hw_status"].samples if sample.value)
    assert state == "failed", "what was seen last counts"
    assert value["anyaccel_lease_fraction_ratio"] == 0.5
    labels = found["hw_power_watts"].samples[0].labels
    assert labels == {"hw_id": device.id, "hw_type": "accelerator", "hw_vendor": device.vendor, "hw_name": device.name}
    odd = metrics.Family(name="x", kind="gauge", unit="", help="X.", samples=(({"a": 'q"\\\n\x1b'}, 1.5),))
    (sample,) = families(metrics.render([odd]))["x"].samples
    assert sample.labels == {"a": 'q"\\ \ufffd'}


def test_it_serves_until_it_is_ended(acme, tmp_path):
    command = [sys.executable, "-m", "anyaccel", "metrics", "--machine", "sim:A1:2", "--serve", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stderr.readline().split()[-1]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
                assert len(families(answer.read().decode())["anyaccel_device"].samples) == 2
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(address.replace("/metrics", "/other"), timeout=60)
            refused.value.close()
        finally:
            server.terminate()


@pytest.mark.parametrize("address", ["9" * 5000, "\u0663", "..:80", f"{'a' * 70}:80", "\udcff:80", "70000"])
def test_an_address_that_cannot_be_served_is_told(address, acme, anyaccel):
    done = anyaccel("metrics", "--machine", "sim:A1:2", "--serve", address, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(("anyaccel: nothing can be served at ", "anyaccel: --serve takes HOST:PORT or PORT"))


def test_a_fault_is_served_in_the_letters_of_its_names(acme, tmp_path, record):
    machine = record({}, name="\u673a\u5668")
    command = [sys.executable, "-m", "anyaccel", "metrics", "--machine", machine, "--serve", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stderr.readline().split()[-1]
            (tmp_path / "\u673a\u5668" / "machine.json").write_text("{")
            with pytest.raises(urllib.error.HTTPError, match="500") as refused:
                urllib.request.urlopen(address, timeout=60)
            assert "\u673a\u5668/machine.json cannot be read" in refused.value.read().decode()
            refused.value.close()
        finally:
            server.terminate()
        assert server.stderr.read() == ""


def test_a_client_that_goes_is_not_told_of(acme):
    """Every user can be one: what a service says is kept on a disk."""
    command = [sys.executable, "-m", "anyaccel", "metrics", "--machine", "sim:A1:2", "--serve", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stderr.readline().rpartition(":")[2].partition("/")[0])
            opened = f"/proc/{server.pid}/fd"
            before = len(os.listdir(opened))
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /metrics")
                until(lambda: len(os.listdir(opened)) > before, "the server has the client")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset at the end
            until(lambda: len(os.listdir(opened)) == before, "the server has let the client go")
        finally:
            server.terminate()
        assert server.stderr.read() == ""


@pytest.mark.parametrize("address", ["nowhere", "1:2:x", ":99999", "127.0.0.1:"])
def test_a_wrong_address_is_told(anyaccel, address):
    done = anyaccel("metrics", "--serve", address)
    assert done.returncode == 2
    assert "--serve takes HOST:PORT or PORT" in done.stderr


def test_a_period_is_told_by_dates_and_shares_are_of_the_machine(anyaccel, acme, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    day = time.mktime((2025, 3, 4, 0, 0, 0, 0, 0, -1))
    journal.write(use(began=day, ended=day + 12 * 3600), shared=False)
    journal.write(use(devices=("acme/1",), began=day + 18 * 3600, ended=day + 30 * 3600), shared=False)
    period = ("report", "--by", "device", "--since", "2025-03-04", "--until", "2025-03-05")
    found = json.loads(anyaccel(*period, "--json").stdout)
    assert [(row["device"], row["device_seconds"], row["share"]) for row in found["rows"]] == [
        ("acme/0", 43200.0, 0.25),
        ("acme/1", 21600.0, 0.125),
    ]
    assert found["until"] > found["since"]
    done = anyaccel(*period, "--top", "1")
    period, *lines = done.stdout.splitlines()
    assert period == "From 2025-03-04 00:00 to 2025-03-05 00:00: 18.00 of 48.00 device hours were used."
    assert [line.split()[:4] for line in lines] == [
        ["DEVICE", "LEASES", "HOURS", "SHARE"],
        ["acme/0", "1", "12.00", "25%"],
        ["total", "2", "18.00", "38%"],
    ]
    assert "1 more row\n" in done.stderr
    assert anyaccel("report", "--since", "2025-03-05", "--until", "2025-03-04").returncode == 2
    assert anyaccel("report", "--since", "2025-03-01", "--until", "2025-03-02").stdout.startswith(
        "No lease was held between"
    )


def test_a_period_that_is_not_over_ends_now(anyaccel, acme, monkeypatch):
    """Else a month that has just begun would have the device hours of a whole one, and shares that are too small."""
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    now = time.time()
    journal.write(use(began=now - 3600, ended=now), shared=False)
    found = json.loads(anyaccel("report", "--since", "2h", "--until", "2100-01-01", "--json").stdout)
    assert found["until"][:4] != "2100"
    assert found["rows"][0]["share"] == pytest.approx(0.25, rel=0.1)


def test_examples_of_monitoring_name_what_is_served(anyaccel, acme, monkeypatch):
    """The dashboard has what Grafana requires of its JSON model, and asks for metrics that are served."""
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    board = json.loads(anyaccel("metrics", "--example", "grafana").stdout)
    required = {
        "title": str,
        "uid": str,
        "schemaVersion": int,
        "panels": list,
        "templating": dict,
        "time": dict,
        "tags": list,
    }
    assert {name: type(board[name]) for name in required} == required
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    served = set(re.findall(r"^# TYPE (\S+)", anyaccel("metrics").stdout, re.MULTILINE)) | {"anyaccel_device_info"}
    cells = set()
    for panel in board["panels"]:
        assert {"id", "title", "type", "datasource", "gridPos", "targets", "fieldConfig"} <= set(panel)
        place = panel["gridPos"]
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not mine & cells, "panels do not overlap"
        assert max(x for x, _ in mine) < 24, "Grafana has 24 columns"
        cells |= mine
        for target in panel["targets"]:
            names = set(re.findall(r"\b(?:hw|anyaccel)_\w+(?=\{)", target["expr"]))
            assert names, target
            assert names <= served, names - served
    unit = anyaccel("metrics", "--example", "systemd", "--serve", "127.0.0.1:9999").stdout
    assert f"ExecStart={sys.executable} -m anyaccel metrics --serve 127.0.0.1:9999\n" in unit
    assert {"[Unit]", "[Service]", "[Install]"} <= set(unit.splitlines())
    assert 'targets: ["127.0.0.1:9464"]' in anyaccel("metrics", "--example", "prometheus").stdout


def test_a_lease_that_is_still_held_counts_until_now_and_once_when_it_has_ended(anyaccel, acme, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")

    def rows(by="job"):
        return list(csv.DictReader(io.StringIO(anyaccel("report", "--by", by, "--csv").stdout)))

    lease = anyaccel("hold", "A1:0.5", "--note", "long").stdout.strip()
    began = next(record.since for record in Ledger.open().leases() if record.id == lease)
    before = time.time()
    (row,) = rows()
    assert (row["job"].partition(": ")[2], row["leases"]) == ("long", "1")
    assert (before - began) / 2 - 0.01 < float(row["device_seconds"]) < (time.time() - began) / 2 + 0.01
    (row,) = rows("device")
    assert row["device"] == "acme/0"
    assert anyaccel("release", lease).returncode == 0
    until(lambda: any(entry.lease == lease for entry in journal.read()), "the line of the lease")
    (row,) = rows()
    assert row["leases"] == "1"
