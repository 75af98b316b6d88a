"""How busy devices are while they are held: asked of vendors that tell, that do not, that fail and that hang."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.launcher import monitor
from anyaccel.launcher.monitor import LIMIT_SECONDS, make_sampler
from anyaccel.linux import process
from anyaccel.model import Stats
from waiting import PATIENCE, until

STATS = """
@hookimpl
def anyaccel_stats(devices, ctx):
    import os, time
    told = json.loads(open(%(told)r).read())
    with open(%(asked)r, "a") as file:
        file.write(f"{os.getpid()}\\n")
    while told == "hang":
        time.sleep(1)
    if told == "fail":
        raise OSError("the driver does not answer")
    return {device.id: Stats(**told[device.index]) for device in devices}
"""


class Vendor:
    """A vendor whose word is in a file, and who writes down each question."""

    def __init__(self, directory):
        self._told = directory / "told"
        self._asked = directory / "asked"
        self.tell({"utilization": 0.5}, {"utilization": 0.5})

    @property
    def source(self):
        return STATS % {"asked": str(self._asked), "told": str(self._told)}

    def tell(self, *words):
        new = self._told.with_suffix(".new")
        new.write_text(json.dumps(words[0] if isinstance(words[0], str) else words))
        new.rename(self._told)

    @property
    def asked(self):
        """The processes that were asked."""
        return list(map(int, self._asked.read_text().split())) if self._asked.exists() else []

    def wait(self, more):
        """Wait until it was asked so many times more."""
        wanted = len(self.asked) + more
        until(lambda: len(self.asked) >= wanted, "the next question")


def lines():
    file = Path(os.environ["XDG_STATE_HOME"]) / "anyaccel" / "journal.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def line():
    return until(lines, "the journal")[-1]


def configure(text):
    file = Path(os.environ["XDG_CONFIG_HOME"]) / "anyaccel" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"[journal]\n{text}\n")
    file.chmod(0o600)


@pytest.fixture
def vendor(acme, tmp_path):
    found, source = Vendor(tmp_path), acme.read_text()
    at = source.index("@hookimpl\ndef anyaccel_stats")
    acme.write_text(source[:at] + found.source + "\n\n" + source[source.index("@hookimpl", at + 1) :])
    configure('sample_every = "1s"')
    return found


@pytest.fixture
def machine(record):
    return record({}, {})


@pytest.fixture
def started(machine, tmp_path):
    """Start commands that run until the test ends them."""
    running = []

    def start(*arguments):
        stop = tmp_path / f"stop{len(running)}"
        command = ["sh", "-c", f"while [ ! -e {stop} ]; do sleep 0.05; done"]
        run = subprocess.Popen([sys.executable, "-m", "anyaccel", "--machine", machine, *arguments, "--", *command])
        running.append(run)

        def end():
            stop.touch()
            assert run.wait(PATIENCE) == 0

        return end

    yield start
    for each in running:
        each.kill()
        each.wait()


@pytest.mark.needs("jobs")
def test_means_and_peaks_of_what_the_vendor_tells_go_to_the_journal(vendor, started, anyaccel):
    vendor.tell({"utilization": 1.0, "memory_used_bytes": 7 << 30}, {"utilization": 0.02, "memory_used_bytes": 5})
    end = started("run", "APU:2")
    vendor.wait(1)
    vendor.tell({"utilization": 0.0, "memory_used_bytes": 1 << 30}, {"memory_used_bytes": 9})
    vendor.wait(3)  # the first of them may have been answered with what was told before
    end()
    entry = line()
    (*_, observed, busy, idle, peak), (*_, observed1, busy1, idle1, peak1) = entry["devices"]
    assert 1 < observed1 < observed <= entry["held"]  # from some time on, no vendor reported the second
    assert 0 < busy < 1
    assert idle == pytest.approx(
        observed * (1 - busy), abs=0.01 * observed
    )  # it was busy all of the time or not at all
    assert (busy1, idle1) == (0.02, observed1)
    assert (peak, peak1) == (7 << 30, 9)
    (row,) = json.loads(anyaccel("report", "--json").stdout)["rows"]
    assert (row["idle_leases"], row["memory_peak_bytes"]) == (1, 7 << 30)


@pytest.mark.needs("jobs")
def test_devices_that_are_held_idle_are_told(vendor, started, anyaccel):
    vendor.tell({"utilization": 0.0}, {"utilization": 0.9})
    end = started("run", "acme/0")
    vendor.wait(2)
    end()
    entry = line()
    assert entry["devices"][0][4] == 0
    (row,) = json.loads(anyaccel("report", "--json").stdout)["rows"]
    assert (row["utilization"], row["idle_leases"]) == (0, 1)
    assert row["idle_device_seconds"] == pytest.approx(entry["held"], abs=0.01)


@pytest.mark.needs("jobs")
def test_the_line_of_a_job_has_its_use_and_its_status(vendor, machine, anyaccel, tmp_path):
    stop = tmp_path / "stop"
    wait = f"while [ ! -e {stop} ]; do sleep 0.05; done; exit 3"
    done = anyaccel("--machine", machine, "run", "--detach", "APU:1", "--time", "1h", "--", "sh", "-c", wait)
    vendor.wait(1)
    vendor.wait(1)
    stop.touch()
    assert anyaccel("wait", done.stdout.strip()).returncode == 3
    entry = line()
    assert (entry["exit"], entry["program"], entry["devices"][0][4]) == (3, "sh", 0.5)
    assert len(lines()) == 1


def test_a_vendor_that_hangs_delays_no_end_and_is_left_nowhere(vendor, started):
    vendor.tell("hang")
    end = started("run", "APU:1")
    vendor.wait(1)
    began = time.monotonic()
    end()
    entry = line()
    assert time.monotonic() - began < LIMIT_SECONDS - 5  # it has only just been asked
    assert entry["devices"][0][3:] == [0.0, None, 0.0, None]  # nothing was observed
    until(lambda: all(process.gone(pid, 0) for pid in vendor.asked), "the end of who was asked")


def test_a_lease_ends_in_time_while_a_vendor_hangs(vendor, machine, anyaccel):
    vendor.tell("hang")
    for seconds in (2, 10, 30):  # until it is asked, which takes a while on a machine that does much else
        done = anyaccel("--machine", machine, "run", "APU:1", "--time", f"{seconds}s", "--", "sleep", "1000")
        assert done.returncode == -15
        if vendor.asked:
            break
    # The limit runs from the lease's entry in the ledger, some milliseconds before the journal counts it as held.
    entry = until(lambda: [each for each in lines() if each["held"] > seconds - 1], "the journal")[-1]
    assert entry["held"] < LIMIT_SECONDS
    until(lambda: all(process.gone(pid, 0) for pid in vendor.asked), "the end of who was asked")


def ask(vendor, machine, words):
    """Ask until no vendor is asked any more; return the answers."""
    vendor.tell(*words)
    told = []
    with aa.acquire("APU:2", machine=machine) as hold:
        asking = make_sampler(hold.launch.inventory, hold.allocation.shares, told.append)
        deadline = time.monotonic() + PATIENCE
        while (asking.answer >= 0 or asking.seconds < float("inf")) and len(told) < 2:
            assert time.monotonic() < deadline
            poll = select.poll()
            if asking.answer >= 0:
                poll.register(asking.answer, select.POLLIN)
            poll.poll(min(asking.seconds, PATIENCE) * 1000 + 1)
            asking.step()
        asking.stop()
    assert asking.seconds == float("inf")
    return told


def test_who_fails_again_and_again_or_tells_nothing_is_asked_no_more(vendor, machine, monkeypatch):
    monkeypatch.setattr(monitor, "FIRST_SECONDS", 0.05)
    assert ask(vendor, machine, ["fail"]) == []
    failed = len(vendor.asked)
    assert failed == 3
    assert ask(vendor, machine, [{}, {}]) == []
    assert len(vendor.asked) == failed + 1
    both = ask(vendor, machine, [{"utilization": 0.25}, {}])
    assert [seen for told in both for seen in told.values() if seen != Stats()] == [Stats(utilization=0.25)] * 2


def test_no_vendor_is_asked_where_none_would_answer(acme, machine):
    shown = aa.detect("sim:A1:1")
    with aa.acquire("APU:1", inventory=shown) as hold:
        assert make_sampler(shown, hold.allocation.shares, print).seconds == float("inf")
    with aa.acquire("APU:1", machine=machine) as hold:
        inventory, shares = hold.launch.inventory, hold.allocation.shares
        assert make_sampler(inventory, shares, print).seconds < float("inf")
        configure("sample_every = 0")
        assert make_sampler(inventory, shares, print).seconds == float("inf")


def monitors():
    """Monitors of leases of this test."""
    mine = f"ANYACCEL_STATE_DIR={os.environ['ANYACCEL_STATE_DIR']}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            comm, environ = Path(f"/proc/{name}/comm").read_text(), Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if comm == "anyaccel-mon\n" and mine in environ.split(b"\0"):
            found.append(int(name))
    return found


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("keep", "options", "count"), [("true", (), 1), ("false", (), 0), ("false", ("--time", "1h"), 1)]
)
def test_a_monitor_is_there_only_where_it_has_something_to_do(machine, anyaccel, keep, options, count):
    configure(f"keep = {keep}")
    assert anyaccel("--machine", machine, "hold", "APU:1", *options).returncode == 0
    (record,) = aa.leases(aa.detect(machine))
    assert len(monitors()) == count
    assert anyaccel("release", record.id).returncode == 0
    until(lambda: not monitors(), "the end of the monitor")


@pytest.mark.parametrize("value", ['"0.5s"', "1", '"x"', "-1"])
def test_how_often_must_make_sense(acme, anyaccel, value):
    configure(f"sample_every = {value}")
    done = anyaccel("config")
    assert done.returncode == 2
    assert "journal.sample_every must be 0 for never, or a duration of 1s or more" in done.stderr
