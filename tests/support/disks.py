"""A file system of a test's own."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def mounted(path, options):
    """Have a tmpfs at a directory for the length of a context, or skip the test.

    Args:
        path: The directory, which exists.
        options: Options of the mount, such as ``size=64k,mode=700``.
    """
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", path]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root that may mount file systems")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
