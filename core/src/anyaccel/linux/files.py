"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os


def write_whole(path: str, text: str, mode: int = 0o644) -> None:
    """Write a file so that readers see what was there before, or all of it, also when the machine fails.

    Args:
        path: The file.
        text: What is in it.
        mode: Who may do what with it; as it is, everybody may read it, and its owner write.

    Raises:
        OSError: When it cannot be written.
    """
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise
