"""Atomic writes of files."""

from __future__ import annotations

import contextlib
import os


def write_whole(path: str, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically and durably: readers see the old content or the new content.

    Of several processes that write at once, the last one wins. A link is replaced, not followed. A process that is
    killed in between leaves a file ``PATH.*.new``.

    Args:
        path: The file.
        text: The new content.
        mode: Permission bits, whatever the umask is.

    Raises:
        OSError: When the file cannot be written; the old file stays.
    """
    new = f"{path}.{os.urandom(4).hex()}.new"  # a name of its own: another process may write at the same time
    try:
        # Inside: an interrupt may come between the opening and the next statement.
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)  # the umask does not count
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # not opened, or an interrupt just after the replacement
            os.unlink(new)
        raise
