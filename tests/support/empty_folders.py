"""Folders of the machine that are empty for a command: run by root with ``unshare --mount``.

Its arguments are the folders, ``--`` and the command.
What has to be seen there nevertheless, since the tests or their Python lie there, stays where it is.
"""

import ctypes
import os
import sys
from pathlib import Path

MODES = {"/dev/shm": 0o1777, "/tmp": 0o1777}
BIND = 4096 | 16384  # MS_BIND, MS_REC
NEEDED = sorted({str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix})
"""Where the tests and the Python that runs them are."""
_libc = ctypes.CDLL(None, use_errno=True)


def mount(what: str, where: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount a file system, or with flags a directory that is there."""
    given = (what.encode(), where.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())
    if _libc.mount(*given):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), where)


def empty(folders: list[str], keep: list[str]) -> None:
    """Mount something empty over each folder; what is to be kept stays where it is."""
    kept = {path: os.open(path, os.O_PATH) for path in sorted(keep)}
    for path in sorted(folders):
        if any(path.startswith(f"{each}/") for each in folders):
            continue  # it is not there any more: the folder above is empty
        mount("none", path, "tmpfs", options=f"mode={MODES.get(path, 0o755):o}")
    for path, fd in kept.items():
        if any(path.startswith(f"{each}/") for each in folders) and not os.path.exists(path):
            os.makedirs(path)
            mount(f"/proc/self/fd/{fd}", path, flags=BIND)
        os.close(fd)


def main() -> None:
    """Run the command."""
    at = sys.argv.index("--")
    try:
        empty(sys.argv[1:at], NEEDED)
    except OSError as error:
        raise SystemExit(f"mount: {error}") from error
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
