"""Fetch vendors' packages of Debian 12 into a directory, and install nothing.

``python fetch_debian.py DIRECTORY COMPONENT PACKAGE=VERSION...``: apt-get downloads with a list of its own, dpkg-deb
unpacks below DIRECTORY/root.
"""

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = "deb [signed-by={}] http://deb.debian.org/debian bookworm {}\n"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def main(directory: Path, component: str, packages: list[str]) -> None:
    """Download and unpack the packages; nothing to do where they have been unpacked."""
    root = directory / "root"
    if root.exists():
        return
    if shutil.which("apt-get") is None or not Path(KEYS).exists():
        sys.exit("apt-get and Debian's keys are needed: run the tests on Debian")
    for name in ("lists/partial", "cache/archives/partial", "unpacked"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "list").write_text(SOURCE.format(KEYS, component))
    settings = {
        "Dir::Etc::sourcelist": directory / "list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": directory / "lists",
        "Dir::Cache": directory / "cache",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", *options, "update"], check=True)
    subprocess.run(["apt-get", *options, "download", *packages], check=True, cwd=directory)
    for package in directory.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, directory / "unpacked"], check=True)
    (directory / "unpacked").rename(root)  # an interrupted download begins anew


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3:])
