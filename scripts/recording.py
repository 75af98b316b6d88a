"""Record a terminal as an animated SVG, for the landing page of the site.

A shell runs on a pseudo-terminal, commands are typed into it, and its screen is drawn: nothing is written by hand.
The machine is simulated. Pauses are shortened to the time that reading takes.

    python scripts/recording.py [FILE]
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyte
from pyte.screens import Char
from temporary_state import temporary_state

FILE = Path(__file__).parent.parent / "docs" / "images" / "recording.svg"
MACHINE = "sim:H100:4"
COMMANDS = (
    "anyaccel",
    "anyaccel run GPU:2 -- sh -c 'echo sees $CUDA_VISIBLE_DEVICES'",
    "anyaccel run --detach GPU:3 --note training -- sleep 1000",
    "anyaccel",
    "anyaccel why GPU:2",
    "anyaccel cancel 1",
)
COLUMNS, ROWS = 88, 28
PROMPT = "$ "
PATIENCE = 60.0
KEYS = 2
"""Number of keys that are typed from one picture to the next."""
KEY_SECONDS, READ_SECONDS, END_SECONDS = 0.05, 2.0, 4.0
WIDTH, HEIGHT, MARGIN = 8.4, 19.0, 14.0
"""Width of a character, height of a line, margin around all, in pixels."""
FONTS = "ui-monospace,'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace"
COLOURS = {"default": "#c9d1d9", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "cyan": "#76e3ea"}

Run = tuple[int, str, str, bool]
"""Column, text, colour and weight."""
Line = tuple[Run, ...]


class Frame(NamedTuple):
    """A screen of the terminal, and its duration in seconds."""

    lines: tuple[Line, ...]
    seconds: float


def main(file: Path) -> None:
    """Record the commands into a file."""
    with temporary_state() as state:
        environ = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
        environ |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
            "PS1": PROMPT,
        }
        environ |= {"ANYACCEL_MACHINE": MACHINE, "ANYACCEL_STATE_DIR": state, "XDG_STATE_HOME": state, "HOME": state}
        try:
            file.write_text(drawn(list(record(environ))), encoding="utf-8")
        finally:
            ended = [sys.executable, "-m", "anyaccel", "cancel", "--all"]
            subprocess.run(ended, env=environ, check=True, stderr=subprocess.DEVNULL)


def record(environ: dict[str, str]) -> Iterator[Frame]:
    """Type the commands into a shell; yield its screens."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting"], environ)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        until_prompt(terminal, stream, screen)
        for command in COMMANDS:
            yield Frame(shown(screen), 0.4)
            for start in range(0, len(command), KEYS):
                keys = command[start : start + KEYS]
                os.write(terminal, keys.encode())
                until_shown(terminal, stream, screen, len(keys))
                yield Frame(shown(screen), KEYS * KEY_SECONDS)
            os.write(terminal, b"\n")
            until_prompt(terminal, stream, screen)
            yield Frame(shown(screen), END_SECONDS if command == COMMANDS[-1] else READ_SECONDS)
    finally:
        os.close(terminal)  # which ends the shell
        os.waitpid(pid, 0)


def until_prompt(terminal: int, stream: pyte.ByteStream, screen: pyte.Screen) -> None:
    """Read until the shell prints its prompt."""
    end = time.monotonic() + PATIENCE
    while not (screen.cursor.x == len(PROMPT) and screen.display[screen.cursor.y].rstrip() == PROMPT.rstrip()):
        read(terminal, stream, end)


def until_shown(terminal: int, stream: pyte.ByteStream, screen: pyte.Screen, keys: int) -> None:
    """Read until the typed keys are on the screen; commands are shorter than a line."""
    wanted, end = screen.cursor.x + keys, time.monotonic() + PATIENCE
    while screen.cursor.x < wanted:
        read(terminal, stream, end)


def read(terminal: int, stream: pyte.ByteStream, end: float) -> None:
    """Read output of the shell.

    Raises:
        TimeoutError: When the shell writes nothing until the end.
    """
    if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
        raise TimeoutError(f"the shell has written nothing for {PATIENCE:.0f} s")
    stream.feed(os.read(terminal, 1 << 16))


def shown(screen: pyte.Screen) -> tuple[Line, ...]:
    """Return the lines of the screen."""
    return tuple(tuple(runs(screen, row)) for row in range(ROWS))


def runs(screen: pyte.Screen, row: int) -> Iterator[Run]:
    """Split a line into pieces of one style each; the cursor is a block."""
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    if row == screen.cursor.y and screen.cursor.x < COLUMNS:
        cells[screen.cursor.x] = Char("\N{FULL BLOCK}")
    for (colour, bold), group in groupby(enumerate(cells), lambda cell: (cell[1].fg, cell[1].bold)):
        found = list(group)
        text = "".join(cell.data for _, cell in found).rstrip()
        if text:
            column = found[0][0] + len(text) - len(text.lstrip())
            yield column, text.lstrip(), COLOURS.get(colour, COLOURS["default"]), bold


def drawn(frames: list[Frame]) -> str:
    """Draw the frames: each state of a line once, visible during its frames."""
    total = sum(frame.seconds for frame in frames)
    spans: dict[tuple[int, Line], list[tuple[float, float]]] = {}
    now = 0.0
    for frame in frames:
        for row, line in enumerate(frame.lines):
            if line:
                times = spans.setdefault((row, line), [])
                if times and times[-1][1] == now:
                    times[-1] = (times[-1][0], now + frame.seconds)
                else:
                    times.append((now, now + frame.seconds))
        now += frame.seconds
    styles, texts = [], []
    for number, ((row, line), times) in enumerate(spans.items()):
        steps = {0.0: "hidden"}
        for begin, end in times:
            steps |= {begin: "visible", end: "hidden"}
        keys = "".join(f"{100 * at / total:.3f}%{{visibility:{state}}}" for at, state in steps.items() if at < total)
        styles.append(f"@keyframes l{number}{{{keys}}}#l{number}{{animation-name:l{number}}}")
        last = " class='last'" if times[-1][1] == now else ""
        pieces = "".join(piece(row, run) for run in line)
        texts.append(f"<g id='l{number}'{last}>{pieces}</g>")
    used = max(row for row, _ in spans) + 1
    width, height = COLUMNS * WIDTH + 2 * MARGIN, used * HEIGHT + 2 * MARGIN
    size = f"width='{width:.0f}' height='{height:.0f}'"
    return "\n".join(
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' {size}>",
            f"<title>A terminal: {escape('; '.join(COMMANDS))}</title>",
            f"<style>text{{font:14px {FONTS};white-space:pre}}",
            f"g{{visibility:hidden;animation:{total:.2f}s step-end infinite}}",
            *styles,
            "@media (prefers-reduced-motion:reduce),print{g{animation:none!important}.last{visibility:visible}}",
            "</style>",
            f"<rect {size} rx='8' fill='#161b22'/>",
            *texts,
            "</svg>\n",
        )
    )


def piece(row: int, run: Run) -> str:
    """Draw a piece of a line, with its width on the terminal for any font."""
    column, text, colour, bold = run
    x, y = MARGIN + column * WIDTH, MARGIN + row * HEIGHT + 14
    weight = " font-weight='bold'" if bold else ""
    length = f" textLength='{len(text) * WIDTH:.1f}' lengthAdjust='spacingAndGlyphs'"
    return f"<text x='{x:.1f}' y='{y:.0f}' fill='{colour}'{weight}{length}>{escape(text)}</text>"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
