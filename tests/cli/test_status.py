"""What ``status`` shows, at every width: pictures of it, and what real holders and processes look like.

The pictures lie in ``snapshots``. ``SNAPSHOTS=write pytest tests/cli/test_status.py`` writes them anew: look at the
difference before you keep it.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.cli import output
from anyaccel.cli.table import COLUMNS
from anyaccel.text import cells
from made_up import MACHINES, RUN
from terminals import assert_plain, run_on_terminal

SUPPORT = Path(__file__).parents[1] / "support"
SNAPSHOTS = Path(__file__).parent / "snapshots"
WIDTHS = (60, 80, 100, 120, 160, 200)
PATIENCE = 60.0


def picture(machine, *arguments, columns, **variables):
    """What a terminal shows of a made-up machine, colours included."""
    env = {"PYTHONPATH": str(SUPPORT), "PYTHONIOENCODING": "utf-8", **variables}
    status, data = run_on_terminal([sys.executable, "-c", RUN, machine, *arguments], columns=columns, env=env)
    assert status == 0, data.decode()
    return data.decode().replace("\r\n", "\n")


def settled(text):
    """Without the digits of a duration that a slow machine shows some seconds or a minute later."""
    return re.sub(r"\b[1-5]\ds\b", "..s", re.sub(r"\b(\d+[dh])\d\d([hm])\b", r"\1..\2", text))


@pytest.mark.parametrize("machine", MACHINES)
def test_it_looks_as_it_did(machine):
    parts = []
    for width in WIDTHS:
        shown = assert_plain(picture(machine, columns=width).encode())
        assert max(map(cells, shown.splitlines())) <= width, shown
        parts.append(f"--- {width} columns\n{shown}")
    file = SNAPSHOTS / f"{machine}.txt"
    if os.environ.get("SNAPSHOTS") == "write":
        file.write_text("".join(parts), encoding="utf-8")
    assert settled("".join(parts)) == settled(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("width", [1, 7, 20, 47])
@pytest.mark.parametrize("machine", ["eight", "mixed"])
def test_the_table_has_room_on_every_terminal(machine, width):
    shown = assert_plain(picture(machine, columns=width).encode())
    table = [line for line in shown.splitlines() if line.startswith(("DEV", "acme", "bolt"))]
    assert max(map(cells, table), default=0) <= width, shown


def test_colours_have_a_meaning():
    shown = picture("eight", columns=160)
    styles = {text.strip(): style for style, text in re.findall(r"\x1b\[(\d+)m([^\x1b]*)\x1b\[0m", shown)}
    named = output.STYLES
    assert styles["DEVICE"] == styles["acme/0"] == named["bold"]
    assert styles["held"] == named["accent"]
    assert styles["free"] == styles["0.25 free"] == named["good"]
    assert styles["busy"] == styles["kept"] == styles["84C"] == named["warn"]
    assert styles["unhealthy"] == styles["93C"] == named["bad"]
    assert assert_plain(shown.encode()) == picture("eight", columns=160, NO_COLOR="1")


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "unknown"}])
def test_there_are_no_colours_where_none_are_wanted(variables):
    assert "\x1b" not in picture("eight", columns=80, **variables)
    assert "\x1b[1m" in picture("eight", columns=80, NO_COLOR="")


def in_a_pipe(*arguments, machine="eight"):
    env = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTHONIOENCODING": "utf-8", "COLUMNS": "60"}
    command = [sys.executable, "-c", RUN, machine, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_pipe_gets_all_columns_and_no_colours():
    done = in_a_pipe()
    heading, first, *_ = done.stdout.splitlines()
    shown = [column.heading for column in COLUMNS if column.turn is not None]
    assert heading.split() == shown
    assert "\x1b" not in done.stdout
    assert "\u2588" not in done.stdout
    assert first.split() == [
        *("acme/0", "H100", "71.2/79.6", "98%", "66C", "650W", "held", "alice", "1", "python", "2h14m", "-"),
        *("a1b2c3d5000000000001", "4194306", "train", "7b", "acme-00000000-5f3a-4c1e-9d27-0000a8c09b11"),
    ]
    assert done.stderr.splitlines() == [
        "anyaccel: recorded machine made up",
        "anyaccel: acme/6 is unhealthy: it has fallen off the bus; reboot the machine",
        "anyaccel: * uses a device without a lease; --avoid-busy leaves such devices alone",
    ]


def test_columns_are_shown_in_the_order_in_which_they_are_asked_for():
    done = in_a_pipe("status", "--columns", "user, device,numa,user,ID")
    assert done.stdout.splitlines()[0].split() == ["USER", "DEVICE", "NUMA", "ID"]
    assert done.stdout.splitlines()[1].split()[:2] == ["alice", "acme/0"]
    assert in_a_pipe("--columns", "state").stdout.splitlines()[:2] == ["STATE", "held"]
    assert "" not in in_a_pipe("--columns", "state").stdout.splitlines()  # further holders have lines of their own
    headings = [column.heading for column in COLUMNS]
    for names in (headings, [heading.partition("/")[0].lower() for heading in headings]):  # MEM/GiB and mem
        assert in_a_pipe("--columns", ",".join(names)).stdout.splitlines()[0].split() == headings
    shown = picture("eight", "--columns=id,device,lease,model", columns=60)
    assert "the terminal is too narrow for lease\n" in assert_plain(shown.encode())


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("devcie", "there is no column 'devcie'; did you mean device"),
        ("x", "there is no column 'x'; there are device,"),
    ],
)
def test_a_column_that_is_none_is_told(names, told):
    done = in_a_pipe("--columns", names)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.endswith("anyaccel: see 'anyaccel status --help'\n")


def test_the_help_and_the_reference_name_every_column():
    told = in_a_pipe("status", "--help").stdout
    page = (Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text()
    section = page.partition("## The table of devices")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    assert rows == [column.name for column in COLUMNS]
    for name in rows:
        assert re.search(rf"\b{name}\b", told)


WATCHED = ("status", "--watch", "0.1")


def until(said, read, process):
    data = b""
    end = time.monotonic() + PATIENCE
    while not said(data):
        assert time.monotonic() < end, data
        data += read()
        assert process.poll() is None, data
    return data


def watch(*arguments, file, machine="one", **variables):
    env = {**os.environ, "PYTHONPATH": str(SUPPORT), "TERM": "xterm", **variables}
    env.pop("COLUMNS", None)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, machine, *arguments], env=env, stdin=file, stdout=file, stderr=file
    )


def test_a_terminal_is_redrawn_in_place_until_it_is_interrupted():
    main, side = pty.openpty()
    process = watch(*WATCHED, file=side)
    os.close(side)
    data = until(lambda data: data.count(b"1 device, 1 free") >= 3, lambda: os.read(main, 1 << 16), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == -signal.SIGINT
    os.close(main)
    text = data.decode()
    assert text.startswith("\x1b[2J\x1b[H")
    assert text.count("\x1b[2J") == 1
    assert text.count("\x1b[H") >= 3
    assert "Traceback" not in text
    for frame in text.split("\x1b[H")[1:3]:
        shown = assert_plain(frame.replace("\x1b[K", "").replace("\x1b[J", "").replace("\r", "").encode())
        assert [line.split()[0] for line in shown.splitlines()] == ["DEVICE", "acme/0", "1", "anyaccel:"]


@pytest.mark.parametrize("arguments", [("-w", "0.1"), ("--watch=0.1", "status"), ("status", "-w0.1", "--no-stats")])
def test_a_pipe_gets_one_block_after_the_other(arguments):
    read, write = os.pipe()
    process = watch(*arguments, file=write)
    os.close(write)
    data = until(lambda data: data.count(b"\n\n") >= 2, lambda: os.read(read, 1 << 16), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == -signal.SIGINT
    os.close(read)
    blocks = assert_plain(data).split("\n\n")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\nDEVICE.*\nacme/0.*\n1 device, 1 free\nanyaccel: recorded machine .*", blocks[0]
    )


def test_a_reader_that_goes_ends_it():
    read, write = os.pipe()
    process = watch("-w", "0.1", file=write)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    assert process.wait(PATIENCE) == 0


def test_json_is_one_document_a_line():
    read, write = os.pipe()
    process = watch("-w", "0.1", "--json", file=write)
    os.close(write)
    data = until(lambda data: data.count(b"\n") >= 2, lambda: os.read(read, 1 << 16), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == -signal.SIGINT
    os.close(read)
    assert [json.loads(line)["schema"] for line in data.splitlines()[:2]] == ["anyaccel.status/1"] * 2


def test_a_terminal_with_few_lines_is_told_how_many_there_are():
    main, side = pty.openpty()
    process = watch(*WATCHED, file=side, machine="sixty-four")
    os.close(side)
    data = until(lambda data: data.count(b"more lines") >= 1, lambda: os.read(main, 1 << 16), process)
    process.kill()
    process.wait()
    os.close(main)
    assert re.search(r"\d+ more lines", data.decode())


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "x", "99999"])
def test_how_often_must_make_sense(seconds):
    done = in_a_pipe(f"--watch={seconds}")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(rf"argument -w/--watch: must be .* \(got '{seconds}'\)", done.stderr)


HERE = """
from anyaccel.plugin import *

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="here", resource="APU", kind="apu", env_vars=("HERE_VISIBLE",))

@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=tuple(Device(id=f"here-{index}", index=index, model="Here") for index in range(3)))

@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED

@hookimpl
def anyaccel_tags(device):
    return ("Here",)

@hookimpl
def anyaccel_env(devices):
    return EnvEdits(set={"HERE_VISIBLE": ",".join(device.id for device in devices)})

@hookimpl
def anyaccel_stats(devices, ctx):
    pids = map(int, open(%r).read().split())
    return {"here-0": Stats(processes=tuple(DeviceProcess(pid=pid) for pid in pids))}
"""


@pytest.fixture
def on_device(install, tmp_path):
    """A plug-in that finds devices on this host, and processes that it says use the first."""
    pids = tmp_path / "pids"
    install("here", HERE % str(pids))
    started = []

    def on_device(**options):
        started.append(subprocess.Popen(["sleep", "1000"], **options))
        pids.write_text(" ".join(str(process.pid) for process in started))
        return started[-1]

    pids.write_text("")
    yield on_device
    for process in started:
        process.kill()
        process.wait()


def shown(anyaccel, columns):
    done = anyaccel("--columns", columns)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:-1]], done.stderr


def me():
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def test_a_process_without_a_lease_is_shown_by_user_and_program(on_device, anyaccel):
    process = on_device()
    rows, told = shown(anyaccel, "device,state,user,share,program,process,command")
    assert rows[0] == ["here/0", "busy", f"*{me()}", "sleep", str(process.pid), "sleep", "1000"]
    assert rows[1] == ["here/1", "free"]
    assert "* uses a device without a lease" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_of_other_users_only_the_programs_name_is_shown(on_device, anyaccel):
    on_device(user=65534)
    rows, _ = shown(anyaccel, "device,user,command")
    assert rows[0][0] == "here/0"
    assert rows[0][2:] == ["sleep"]


def test_holders_are_shown_by_user_share_and_program(on_device, anyaccel):
    process = on_device()  # it is of the user of the leases, so it counts as theirs
    with aa.acquire("APU:0.5", note="half") as half, aa.acquire("APU:0.25"), aa.acquire("APU:1") as whole:
        rows, told = shown(anyaccel, "device,state,user,share,program,lease,note")
        program = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
        assert rows[0][:3] == ["here/0", "0.25", "free"]
        on_first = sorted(" ".join(row) for row in (rows[0][3:], rows[1]))
        assert on_first[0].startswith(f"{me()} 0.25 {program} ")
        assert on_first[1] == f"{me()} 0.5 {program} {half.id} half"
        assert rows[2] == ["here/1", "held", me(), "1", program, whole.id, "APU:1"]
        assert "without a lease" not in told
        assert process.poll() is None
