"""What a person sees: commands on a real terminal, and a check that nothing in their output steers it."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import unicodedata

import preloaded

COLOURS = re.compile(r"\x1b\[(?:1|2|31|32|33|36)m([^\x1b]*)\x1b\[0m")
"""What our own colours and bold letters look like."""


def read_to_end(terminal):
    """What is written on a terminal until the last process that has it open has gone."""
    data = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            data += chunk
    except OSError:  # EIO
        pass
    return data


def run_on_terminal(argv, *, columns=80, env=None, seconds=60, **options):
    """Run a command with a terminal as its standard streams.

    Returns:
        Its exit status, and what it wrote there.
    """
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environ |= {"TERM": "xterm", **(env or {})}
    streams = {"stdin": side, "stdout": side, "stderr": side, "env": environ}
    if argv[:3] == [sys.executable, "-m", "anyaccel"]:
        process = preloaded.start(argv[3:], **streams, **options)
    else:
        process = subprocess.Popen(argv, **streams, **options)
    os.close(side)
    data = read_to_end(main)
    os.close(main)
    return process.wait(seconds), data


def assert_plain(data, encoding="utf-8"):
    """Check that output is lines of printable text, and our colours, and return it."""
    # A line in place begins at the start of its line again: each state of it is a line here.
    text = COLOURS.sub(r"\1", data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n"))
    found = {char: unicodedata.name(char, hex(ord(char))) for char in text if char != "\n" and not char.isprintable()}
    assert found == {}, text
    assert not re.search("^Traceback", text, re.MULTILINE), text
    return text
