"""Fetch NVIDIA's MPS daemon, libcuda and NVML of Debian 12 (non-free) into a directory, and install nothing.

``python fetch_nvidia.py DIRECTORY``: apt-get downloads with a list of its own, dpkg-deb unpacks.
"""

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "535.261.03-1"
PACKAGES = ("nvidia-cuda-mps", "libcuda1", "libnvidia-ml1")
SOURCE = "deb [signed-by={}] http://deb.debian.org/debian bookworm non-free\n"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def main(directory: Path) -> None:
    """Download and unpack the packages; nothing to do where they are."""
    root = directory / "root"
    if (root / "usr" / "bin" / "nvidia-cuda-mps-control").exists():
        return
    if shutil.which("apt-get") is None or not Path(KEYS).exists():
        sys.exit("apt-get and Debian's keys are needed: run the tests on Debian")
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "list").write_text(SOURCE.format(KEYS))
    settings = {
        "Dir::Etc::sourcelist": directory / "list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": directory / "lists",
        "Dir::Cache": directory / "cache",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", *options, "update"], check=True)
    names = [f"{package}={VERSION}" for package in PACKAGES]
    subprocess.run(["apt-get", *options, "download", *names], check=True, cwd=directory)
    for package in directory.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
