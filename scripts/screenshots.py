"""Draw the screens of ``status``, ``queue``, ``jobs`` and ``top``, at 80 and at 120 columns, as SVG for the pages.

The machine is simulated, and commands hold its devices. A simulation has no load, temperature or power, and one user
holds all devices here: loads and names of users are invented.

    python scripts/screenshots.py [DIRECTORY]
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import anyaccel
from anyaccel.cli import lay_out, parse, queue
from anyaccel.cli import sample as samples
from anyaccel.cli.sample import Sample
from anyaccel.ledger import Ledger, TicketRecord
from anyaccel.ledger.record import describe_obstacles
from anyaccel.model import Device, Stats, replace
from rich.console import Console
from rich.text import Text
from temporary_state import temporary_state

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MACHINE = "sim:H100:8"
HELD = (
    ("GPU:2,linked", "alice: train 7b", "8h"),
    ("GPU:0.5", "bob: eval", "90m"),
    ("GPU:0.5", "carol: notebook", "4h"),
    ("GPU:1", "bob: sweep", "2h"),
    ("GPU:1", "carol: render", "7h"),
    ("GPU:0.25", "alice: debug", "30m"),
)
"""Request, user and note, and time limit of each holder."""
DRAINED = ("nvidia/7", "--note", "new fan on Monday")
RESERVED = ("GPU:1", "--from", "2030-12-02 09:00", "--to", "4h", "--for", "0", "--note", "course")
WAITS = (("GPU:4", "carol: pretrain"), ("GPU:2", "alice: fine-tune"))
"""Requests in the order of arrival. The second would fit without the first."""
JOBS = (
    (("GPU:1", "--time", "10m", "--note", "prepare"), "python prepare.py --part 1"),
    (("GPU:2", "--time", "2h", "--note", "train"), "python train.py --config base.toml --epochs 30"),
    (("GPU:1", "--time", "1h", "--after-ok", "2"), "python evaluate.py"),
)
WIDTHS = (80, 120)
STYLES = {"": "", "bold": "bold", "dim": "dim", "bad": "red", "good": "green", "warn": "yellow", "accent": "cyan"}
LOOKS = 40
PATIENCE = 60.0


def main(directory: Path) -> None:
    """Draw all pictures into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with temporary_state() as state:
        os.environ["ANYACCEL_STATE_DIR"] = state
        os.environ["ANYACCEL_MACHINE"] = MACHINE
        inventory = anyaccel.detect()
        os.environ["XDG_STATE_HOME"] = state
        leases = [anyaccel_says("hold", request, "--note", note, "--for", time) for request, note, time in HELD]
        anyaccel_says("drain", *DRAINED)
        anyaccel_says("reserve", *RESERVED)
        waiting: list[subprocess.Popen[bytes]] = []
        try:
            for request, note in WAITS:
                command = [sys.executable, "-m", "anyaccel", "run", request, "--note", note, "--", "true"]
                waiting.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
                stand_in_line(len(waiting))
            for width in WIDTHS:
                draw_status(directory / f"status-{width}.svg", made_up(samples.take_sample(inventory), LOOKS), width)
                draw_top(directory / f"top-{width}.svg", inventory, width)
                draw_queue(directory / f"queue-{width}.svg", width)
                draw_jobs(directory / f"jobs-{width}.svg", width, tempfile.mkdtemp(dir=state))
        finally:
            for process in waiting:
                process.terminate()
                process.wait()
            for lease in leases:
                Ledger.open().end_lease(lease)


def anyaccel_says(*arguments: str) -> str:
    """Return the output of a command of anyaccel."""
    command = [sys.executable, "-m", "anyaccel", *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


def stand_in_line(count: int) -> None:
    """Wait until a number of requests is queued.

    Raises:
        TimeoutError: When fewer are queued after a minute.
    """
    end = time.monotonic() + PATIENCE
    while len(tickets := Ledger.open().tickets()) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{count} must wait for devices (got {len(tickets)}): see what holds and waits ask for")
        time.sleep(0.05)


def made_up(sample: Sample, moment: int) -> Sample:
    """Return a sample with users from the notes, and with loads that change with time."""
    leases = {device: [named(record) for record in found] for device, found in (sample.leases or {}).items()}
    tickets = tuple(map(named_ticket, sample.tickets))
    observed = {device.id: load(device, moment, held=device.id in leases) for device in sample.inventory.devices}
    return replace(sample, leases=leases, tickets=tickets, observed=observed)


def named(record: Any, **more: Any) -> Any:
    """Return the record of a lease or ticket with the user that its note names."""
    user, found, note = record.note.partition(": ")
    return replace(record, user=user, uid=None, note=note, **more) if found else record


def named_ticket(ticket: TicketRecord) -> TicketRecord:
    """Return a ticket with the user that its note names, which waits for ten minutes, for users of the same kind."""
    reason = ticket.reason if ticket.behind else describe_obstacles(map(named, Ledger.open().leases()), {})
    return named(ticket, waited=ticket.waited + 754, reason=reason)


def load(device: Device, moment: int, *, held: bool) -> Stats:
    """Invent load, memory, temperature and power of a device."""
    wave = 0.5 + 0.5 * math.sin(moment / (3 + device.index) + device.index)
    ratio = (0.35 + 0.63 * wave) if held else 0.0
    size = device.memory_bytes or 0
    return Stats(
        utilization=ratio,
        memory_used_bytes=int(size * (0.15 + 0.1 * device.index if held else 0.006)),
        temperature_celsius=34 + 50 * ratio,
        power_watts=68 + 600 * ratio,
    )


def draw_status(file: Path, sample: Sample, width: int) -> None:
    """Draw the table of devices."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    heading, rows, _ = lay_out(sample.states(), width)
    for line in [heading, *(line for lines in rows for line in lines)]:
        console.print(Text.assemble(*((text, STYLES[style]) for text, style in line)), no_wrap=True, soft_wrap=True)
    file.write_text(console.export_svg(title="anyaccel", unique_id=file.stem), encoding="utf-8")


def draw_queue(file: Path, width: int) -> None:
    """Draw the waiting requests, with users from their notes."""
    ledger = Ledger.open()
    tickets = [named_ticket(ticket) for ticket in ledger.tickets()]
    screen = Terminal()
    with (
        mock.patch.object(Ledger, "tickets", return_value=tickets),
        mock.patch.dict(os.environ, {"COLUMNS": str(width), "ANYACCEL_MACHINE": MACHINE}),
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(screen),
    ):
        queue.main(parse("queue", queue, []))
    draw_text(file, "anyaccel queue", screen.getvalue(), width)


class Terminal(io.StringIO):
    """What a command prints, which it believes to go to a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def draw_jobs(file: Path, width: int, state: str) -> None:
    """Draw the jobs of a user, on a machine where nothing else runs: with an empty directory for leases and jobs."""
    environ = {**os.environ, "ANYACCEL_STATE_DIR": state, "XDG_STATE_HOME": state, "COLUMNS": str(width)}
    anyaccel = [sys.executable, "-m", "anyaccel"]
    os.mkdir(f"{state}/bin")
    python = Path(state, "bin", "python")
    python.write_text("#!/bin/sh\ncase $1 in prepare.py) ;; *) exec sleep 1000;; esac\n")
    python.chmod(0o755)
    environ["PATH"] = f"{state}/bin:{environ['PATH']}"

    def call(*arguments: str, output: int = subprocess.DEVNULL) -> None:
        subprocess.run([*anyaccel, *arguments], env=environ, check=True, stdout=output, stderr=subprocess.DEVNULL)

    for options, command in JOBS:
        call("run", "--detach", *options, "--", *command.split())
        if "prepare.py" in command:
            call("wait", "1")
    main_end, end = pty.openpty()
    call("jobs", output=end)
    os.close(end)
    printed = b""
    with contextlib.suppress(OSError):  # raised at the end, when no process has the terminal open
        while data := os.read(main_end, 1 << 16):
            printed += data
    os.close(main_end)
    call("cancel", "--all")
    draw_text(file, "anyaccel jobs", printed.decode().replace("\r", ""), width)


def draw_text(file: Path, title: str, text: str, width: int) -> None:
    """Draw the output of a command."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.from_ansi(text), no_wrap=True, soft_wrap=True)
    file.write_text(console.export_svg(title=title, unique_id=file.stem), encoding="utf-8")


def draw_top(file: Path, inventory: anyaccel.Inventory, width: int) -> None:
    """Draw the live view, with a history."""
    from anyaccel_jobs.top_app import Top

    looks = iter(range(1 << 30))

    async def draw() -> str:
        app = Top(lambda: made_up(samples.take_sample(inventory), next(looks)), interval=0.1)
        async with app.run_test(size=(width, 24)) as pilot:
            end = time.monotonic() + PATIENCE
            while next(looks) < LOOKS and time.monotonic() < end:
                await pilot.pause(0.1)
            return app.export_screenshot(title="anyaccel top")

    file.write_text(asyncio.run(draw()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
