"""A directory for leases, jobs and the journal of a script, which lasts as long as what the script started."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from anyaccel.linux import process
from anyaccel.vendors import close


@contextlib.contextmanager
def temporary_state() -> Iterator[str]:
    """Make a directory; at the end, wait until all descendants of this process have exited, and remove the directory.

    The body must end its leases and jobs. Their monitors exit a moment later, and write the journal before.
    """
    process.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="anyaccel-") as state:
        try:
            yield state
        finally:
            close()  # the processes of vendors, which would stay
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
