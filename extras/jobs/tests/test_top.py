"""The live view: driven by Textual's pilot, and as a person has it, on a terminal."""

import asyncio
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import anyaccel as aa
import made_up
import pytest
from anyaccel.ledger import Ledger
from anyaccel.model import DeviceProcess, replace
from terminals import assert_plain, run_on_terminal

pytest.importorskip("textual", reason="needs Textual: pip install 'anyaccel[top]'")

from anyaccel.cli.sample import take_sample
from anyaccel_jobs.jobs import active_jobs
from anyaccel_jobs.top_app import Ask, Confirm, Details, Lines, Top, device_details, sparkline
from anyaccel_jobs.top_command import Looks

HOSTILE = (
    "lr [/data] see [docs] [bold red]x[/] :warning: [link=a] \\[x be\nforged\r\x1b]0;t\x07\x1b[2J\x9b31m"
    "\t\u202etxt\u200b\udcff"
)
PATIENCE = 60.0
NEVER = 3600
"""Seconds between two looks at what stays as it is."""
MACHINE = "sim:A1:4"


def screen(app):
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


async def until(pilot, seen):
    end = time.monotonic() + PATIENCE
    while not seen():
        assert time.monotonic() < end, "\n".join(screen(pilot.app))
        await pilot.pause(0.05)


def drive(act, source, size=(80, 24), interval=0.2, look_for_jobs=tuple):
    """Run an application, and let a user act on it."""

    async def main():
        app = Top(source, look_for_jobs, interval=interval)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app._sample is not None)
            await act(pilot, app)

    asyncio.run(main())


def looks(**more):
    return Looks(aa.detect(MACHINE), {"machine": MACHINE}, **more)


def shows(app, text):
    return lambda: text in "\n".join(screen(app))


@pytest.mark.parametrize("machine", made_up.MACHINES)
def test_everything_has_room(machine):
    sample = replace(made_up.MACHINES[machine](), tickets=())

    async def act(pilot, app):
        for width in (40, 60, 80, 120, 200):
            await pilot.resize_terminal(width, 24)
            shown = app.query_one("#devices", Lines)
            await until(pilot, lambda: max(map(len, shown.text.splitlines())) <= width)  # noqa: B023 - awaited here
            assert any(line.startswith("DEVICE") for line in screen(app))

    drive(act, lambda: sample, interval=NEVER, size=(200, 24))


def test_devices_holders_and_waiters_are_shown(acme, anyaccel):
    async def act(pilot, app):
        await until(pilot, shows(app, "4 devices, 2.5 free, 0 waiting"))
        assert shows(app, "no request waits")()
        waiter = threading.Thread(target=lambda: aa.acquire("APU:4", machine=MACHINE, note="all of it").release())
        waiter.start()
        await until(pilot, shows(app, "1 waiting"))
        await until(pilot, shows(app, "you have 1.5"))
        assert any(re.match(r"1 +\w+ +APU:4 +\d+s", line) for line in screen(app)), screen(app)
        half.release()
        whole.release()
        await until(pilot, shows(app, "4 devices, 4 free, 0 waiting"))
        await asyncio.to_thread(waiter.join)

    with aa.acquire("APU:0.5", machine=MACHINE) as half, aa.acquire("APU:1", machine=MACHINE) as whole:
        drive(act, looks())


def test_the_history_is_a_line():
    loads = iter([0.0, 0.25, 0.5, 0.75, 1.0])
    last = []

    def source():
        sample = made_up.one()
        (device,) = sample.inventory.devices
        last.append(next(loads, 1.0))
        return replace(sample, observed={device.id: made_up.seen(load=last[-1])})

    async def act(pilot, app):
        await until(pilot, lambda: len(last) >= 5)
        await until(pilot, shows(app, "\u2581\u2583\u2585\u2587\u2588"))

    drive(act, source, interval=0.1)
    assert sparkline([None, 0.0, 1.0, 7.0, -1.0], 6) == "  \u2581\u2588\u2588\u2581"
    assert sparkline([], 3) == "   "


def order(app):
    return [line.split()[0] for line in app.query_one("#devices", Lines).text.splitlines() if line.startswith("acme")]


def test_keys_sort_and_filter():
    sample = replace(made_up.eight(), tickets=())

    async def act(pilot, app):
        usual = order(app)
        assert usual == [f"acme/{number}" for number in range(8)]
        await pilot.press("s")
        await until(pilot, lambda: order(app)[:2] == ["acme/5", "acme/0"])
        await pilot.press("s")
        await until(pilot, lambda: order(app)[0] == "acme/7")
        await pilot.press("s")
        await until(pilot, lambda: order(app)[0] in ("acme/3", "acme/4"))
        await pilot.press("s")
        await until(pilot, lambda: order(app) == usual)
        await pilot.press("slash")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press(*"dave", "enter")
        await until(pilot, lambda: order(app) == ["acme/5"])
        await pilot.press("slash")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press("ctrl+u", "enter")
        await until(pilot, lambda: order(app) == usual)

    drive(act, lambda: sample, interval=NEVER)


def test_one_can_look_into_a_device():
    sample = replace(made_up.eight(), tickets=())

    async def act(pilot, app):
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, Details))
        await until(pilot, shows(app, "acme/2  H100  Acme H100"))
        assert "carol-ann.longname" in "\n".join(screen(app))
        await pilot.press("escape")
        await pilot.press("end", "up", "enter")
        await until(pilot, shows(app, "it has fallen off the bus -> reboot the machine"))
        await pilot.press("q")
        await until(pilot, lambda: not isinstance(app.screen, Details))

    drive(act, lambda: sample, interval=NEVER)


def test_why_is_asked(acme):
    async def act(pilot, app):
        await pilot.press("w")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press("ctrl+u", *"APU:9", "enter")
        await until(pilot, shows(app, "APU:9 can never fit: this machine has 4 APU"))
        assert shows(app, "nearest that fits: APU:4")()
        await pilot.press("escape", "w")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press("ctrl+u", *"APU:x", "enter")
        await until(pilot, lambda: isinstance(app.screen, Details))

    drive(act, looks())


def test_escape_leaves_a_question_without_an_answer(acme):
    async def act(pilot, app):
        for key in ("w", "/"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, Ask))
            await pilot.press(*"none", "escape")
            await until(pilot, lambda: not isinstance(app.screen, Ask))
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert not isinstance(app.screen, Details)
        assert shows(app, "acme/0")()

    drive(act, looks(), interval=NEVER)


def test_a_lease_of_ones_own_is_released_after_a_question(acme, anyaccel):
    held = anyaccel("--machine", MACHINE, "hold", "APU:1")
    assert held.returncode == 0, held.stderr
    lease = held.stdout.strip()

    async def act(pilot, app):
        await until(pilot, shows(app, "3 free"))
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await until(pilot, shows(app, lease))
        await pilot.press("n")
        await pilot.pause(0.3)
        assert [each.id for each in Ledger.open().leases()] == [lease]
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await until(pilot, shows(app, lease))
        await pilot.press("y")
        await until(pilot, shows(app, f"{lease} is released"))
        await until(pilot, shows(app, "4 free"))

    try:
        drive(act, looks())
        assert Ledger.open().leases() == ()
    finally:
        for each in Ledger.open().leases():
            Ledger.open().end_lease(each.id)


def test_a_wait_of_ones_own_is_cancelled_after_a_question(acme, anyaccel):
    lease = anyaccel("--machine", MACHINE, "hold", "APU:4").stdout.strip()
    command = [sys.executable, "-m", "anyaccel", "--machine", MACHINE, "run", "APU:2", "--", "true"]
    waiter = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    async def act(pilot, app):
        await until(pilot, shows(app, "1 waiting"))
        await pilot.press("tab", "x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await until(pilot, shows(app, f"process {waiter.pid}"))
        await pilot.press("y")
        await until(pilot, shows(app, f"process {waiter.pid} no longer waits with ticket"))
        await until(pilot, shows(app, "0 waiting"))

    try:
        drive(act, looks())
        _, told = waiter.communicate(timeout=PATIENCE)
        assert waiter.returncode == 1
        assert "cancelled" in told
    finally:
        waiter.kill()
        anyaccel("release", lease)


def test_a_job_is_shown_and_cancelled_after_a_question(acme, anyaccel):
    job = anyaccel("--machine", MACHINE, "run", "--detach", "--note", "first", "APU:1", "--", "sleep", "600")
    assert job.returncode == 0, job.stderr

    async def act(pilot, app):
        await until(pilot, shows(app, "[first] sleep 600"))
        await pilot.press("tab", "tab", "enter")
        await until(pilot, shows(app, "command    sleep 600"))
        await pilot.press("escape", "x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, shows(app, f"job {job.stdout.strip()} is cancelled"))
        await until(pilot, lambda: "[first]" not in "\n".join(screen(app)))

    try:
        drive(act, looks(), look_for_jobs=active_jobs)
        assert Ledger.open().leases() == ()
    finally:
        anyaccel("cancel", "--all")


def test_what_belongs_to_others_is_left_alone():
    sample = replace(
        made_up.eight(),
        tickets=(made_up.ticket(1, "frank", "GPU:2", responsive=False, reason="its process is stopped"),),
    )

    async def act(pilot, app):
        await pilot.press("x")
        await until(pilot, shows(app, "none of the leases here is yours"))
        await until(pilot, shows(app, "its process is stopped"))
        await pilot.press("tab", "x")
        await until(pilot, shows(app, "none of the waits here is yours"))
        await pilot.press("enter")
        await until(pilot, shows(app, "request    GPU:2"))
        assert shows(app, "waited     2m05s")()
        assert shows(app, "starts by  unknown")()
        assert shows(app, "reason     its process is stopped")(), "in the table it may be cut"

    drive(act, lambda: sample, interval=NEVER)


def test_texts_of_others_are_text():
    sample = made_up.eight()
    devices = [replace(device, model=HOSTILE, tags=(HOSTILE,)) for device in sample.inventory.devices]
    leases = {
        key: [replace(record, user=HOSTILE, note=HOSTILE, command=HOSTILE) for record in records]
        for key, records in sample.leases.items()
    }
    tickets = (made_up.ticket(1, HOSTILE, HOSTILE, note=HOSTILE, responsive=False, reason="its process is stopped"),)
    sample = replace(
        sample,
        inventory=replace(sample.inventory, devices=tuple(devices), machine=HOSTILE),
        leases=leases,
        tickets=tickets,
    )

    async def act(pilot, app):
        await until(pilot, shows(app, "its process is stopped"))
        assert all(line.isprintable() for line in screen(app))
        assert "lr [/data] see [d" in app.query_one("#devices", Lines).text
        for keys in (("enter",), ("escape", "tab", "enter"), ("escape", "w")):
            await pilot.press(*keys)
            await pilot.pause(0.2)
            assert all(line.isprintable() for line in screen(app))

    drive(act, lambda: sample, interval=NEVER, size=(200, 24))


def test_the_details_of_a_device_name_the_processes_that_use_it(acme):
    sample = take_sample(aa.detect(MACHINE))
    device = sample.inventory.devices[0]
    seen = aa.Stats(processes=(DeviceProcess(pid=os.getpid(), memory_bytes=1 << 30),))
    lines = device_details(device, replace(sample, observed={device.id: seen}), 80)
    name = Path("/proc/self/comm").read_text().strip()
    assert [f"  {os.getpid()}  ", f"1.0 GiB  {name}"] in [[text for text, _ in line] for line in lines]


def test_a_ledger_that_cannot_be_read_is_told(acme, monkeypatch, tmp_path):
    sample = take_sample(aa.detect(MACHINE))
    calls = []

    def source():
        calls.append(1)
        if len(calls) > 1:
            raise aa.AnyaccelError("the machine has gone")
        return sample

    async def act(pilot, app):
        await until(pilot, shows(app, "the machine has gone"))

    drive(act, source)


def on_terminal(*arguments, size=(24, 80), **variables):
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    environ = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "anyaccel", *arguments],
        stdin=side, stdout=side, stderr=side, env={**environ, "TERM": "xterm-256color", **variables},
        start_new_session=True,
    )  # fmt: skip
    os.close(side)
    return process, main


def read_until(main, process, *wanted, press=b""):
    """What is written until all that is wanted is, while a person presses a key now and then."""
    data = b""
    end = time.monotonic() + PATIENCE
    pressed = 0.0
    while not all(each in data for each in wanted):
        if press and time.monotonic() - pressed > 2:
            os.write(main, press)
            pressed = time.monotonic()
        assert time.monotonic() < end, data[-2000:]
        if select.select([main], [], [], 0.2)[0]:
            try:
                data += os.read(main, 1 << 16)
            except OSError:
                assert all(each in data for each in wanted), data[-3000:]
    return data


@pytest.mark.parametrize("way", ["q", "interrupt"])
def test_a_person_at_a_terminal_sees_it_and_leaves(acme, way):
    process, main = on_terminal("top", "--machine", MACHINE)
    try:
        data = read_until(main, process, b"4 devices, 4 free, 0 waiting", b"acme/3")
        data += read_until(main, process, b"\x1b[?1049l", press=b"q" if way == "q" else b"\x11")  # ctrl+q
        assert process.wait(PATIENCE) == 0
        assert b"Traceback" not in data
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_it_ends_when_its_terminal_has_gone(acme):
    """It has no controlling terminal here, so no signal tells it."""
    process, main = on_terminal("top", "--machine", MACHINE)
    try:
        read_until(main, process, b"4 devices, 4 free, 0 waiting")
    finally:
        os.close(main)
    try:
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("top",), "'anyaccel top' needs a terminal"),
        (("top", "--json"), "'anyaccel top' needs a terminal"),
        (("top", "-w", "0"), "must be more than 0 and at most 366d (got '0')"),
    ],
)
def test_without_a_terminal_it_says_what_does(arguments, told, anyaccel):
    done = anyaccel(*arguments)
    assert done.returncode == 2
    assert told in done.stdout + done.stderr


def test_a_terminal_that_cannot_be_steered_is_told_what_does(acme):
    status, data = run_on_terminal([sys.executable, "-m", "anyaccel", "top"], env={"TERM": "dumb"})
    assert status == 2
    assert "needs a terminal whose cursor can be moved (TERM is 'dumb')" in " ".join(assert_plain(data).split())
    assert "'anyaccel --watch' shows one table below the other" in assert_plain(data)


def test_without_textual_it_says_how_to_get_it(acme):
    code = (
        "import sys; sys.modules['textual'] = None; from anyaccel.cli import program; sys.argv[1:] = ['top']; program()"
    )
    main, side = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=side, stdout=side, stderr=side)
    os.close(side)
    data = read_until(main, process, b"anyaccel[top]'")
    assert process.wait(PATIENCE) == 1
    os.close(main)
    assert b"'anyaccel top' needs Textual" in data
