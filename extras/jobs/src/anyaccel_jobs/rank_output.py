"""Mark the output of ranks at a terminal: each line begins with the rank that wrote it.

A rank gets a terminal of its own for each stream that leads to one. With a pipe, Python and C would keep its output
back until 4 KiB have come together, and progress bars would vanish.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
import threading

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is printed in parts."""
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")


class RankOutput:
    """Prints the output of ranks with marks; streams that lead to no terminal go to the ranks as they are."""

    def __init__(self) -> None:
        self._streams = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._lines: dict[int, tuple[bytes, int]] = {}
        self._rest: dict[int, bytes] = {}
        self._sides: list[int] = []
        self._thread: threading.Thread | None = None
        self._reader, self._writer = os.pipe()

    def open(self, rank: int) -> list[tuple[int, int, int]]:
        """Open terminals for a rank, for each stream of this process at a terminal.

        Returns:
            The file actions of ``posix_spawn`` that make the terminals the rank's streams.
        """
        mark = f"[{rank}] ".encode()
        actions = []
        for stream in self._streams:
            main, side = os.openpty()
            rows, columns = os.get_terminal_size(stream)[::-1]
            fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, max(1, columns - len(mark)), 0, 0))
            attributes = termios.tcgetattr(side)
            attributes[1] &= ~termios.OPOST  # the terminal behind turns line feeds into new lines
            termios.tcsetattr(side, termios.TCSANOW, attributes)
            os.set_blocking(main, False)
            self._lines[main], self._rest[main] = (mark, stream), b""
            self._sides.append(side)
            actions.append((os.POSIX_SPAWN_DUP2, side, stream))
        return actions

    def start(self) -> None:
        """Close this process's ends of the ranks' terminals, and print in a thread.

        Call this method after the start of all ranks.
        """
        for side in self._sides:
            os.close(side)
        if self._lines:
            self._thread = threading.Thread(target=self._run, name="anyaccel-ranks", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Print the output that the ranks have written by now, end the thread, and close the terminals.

        Output that comes later, such as that of a child left behind, is lost.
        """
        os.close(self._writer)
        if self._thread is not None:
            self._thread.join()
        for main in self._lines:
            os.close(main)
        os.close(self._reader)

    def _run(self) -> None:
        """Print lines as they come, until :meth:`finish`; then print the rest, also without an end of line."""
        poll = select.poll()
        for descriptor in (*self._lines, self._reader):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            finished = self._reader in ready  # the ranks have exited, and a child of theirs may keep a terminal open
            for main in self._lines if finished else ready:
                if not self._copy(main) and not finished:
                    poll.unregister(main)
            if finished:
                for main, rest in self._rest.items():
                    self._print(main, [rest] if rest else [], end=b"\n")
                return

    def _copy(self, main: int) -> bool:
        """Print the complete lines on a terminal, and keep the unfinished line, unless too long.

        Returns:
            Whether the terminal can have more; False once each process with the terminal has exited.
        """
        while True:
            try:
                data = os.read(main, _CHUNK)
            except BlockingIOError:
                return True
            except OSError:  # EIO: each process with the terminal has exited
                return False
            # A carriage return at the very end may be the first half of a line's end: it waits for the next byte.
            lines = _LINE.findall(self._rest[main] + data)
            rest = lines.pop() if lines and lines[-1][-1:] != b"\n" else b""
            self._print(main, lines)
            if len(rest) > _LONGEST_LINE:
                self._print(main, [rest], end=b"\n")
                rest = b""
            self._rest[main] = rest

    def _print(self, main: int, lines: list[bytes], *, end: bytes = b"") -> None:
        """Write lines with the rank's mark and ``end`` to the stream of a terminal; an error is ignored."""
        mark, stream = self._lines[main]
        data = b"".join(mark + line + end for line in lines)
        try:
            while data:
                data = data[os.write(stream, data) :]
        except OSError:  # the terminal is gone; the ranks go on, as they would without marks
            return
