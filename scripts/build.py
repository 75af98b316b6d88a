"""Build the sdist of every distribution of this workspace, and its wheel from that; then check them all.

    python scripts/build.py [--out DIR] [NAME ...]

Without names it builds the core, all plug-ins and all extras. It needs ``build``, ``hatchling`` and ``twine``, which
``tox -e build`` brings.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {"core": ROOT / "core"} | {
    path.parent.name: path.parent
    for kind in ("plugins", "extras")
    for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))
}
"""The folder of each distribution."""
VERSION_FILE = ROOT / "core" / "src" / "anyaccel" / "_version.py"


def build(name: str, out: Path) -> None:
    """Build an sdist, and a wheel from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, FOLDERS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} cannot be built:\n{done.stdout}{done.stderr}")


def faults(out: Path, names: Sequence[str]) -> Iterator[str]:
    """Return the faults of built files, a clause each."""
    version = re.findall(r'^__version__ = "(.+)"', VERSION_FILE.read_text(encoding="utf-8"), re.MULTILINE)[0]
    for name in names:
        package = "anyaccel" if name == "core" else f"anyaccel_{name}"
        wheels, sdists = list(out.glob(f"{package}-[0-9]*.whl")), list(out.glob(f"{package}-[0-9]*.tar.gz"))
        if len(wheels) != 1 or len(sdists) != 1:
            yield f"{package}: there must be one wheel and one sdist (got {len(wheels)} and {len(sdists)})"
            continue
        with zipfile.ZipFile(wheels[0]) as archive:
            inside = archive.namelist()
            metadata = archive.read(next(part for part in inside if part.endswith(".dist-info/METADATA"))).decode()
        if f"\nVersion: {version}\n" not in metadata:
            yield f"{wheels[0].name}: its version must be that of the core, {version}"
        if f"{package}/py.typed" not in inside:
            yield f"{wheels[0].name}: it must hold py.typed, by which type checkers know that it is typed"
        if not any(part.endswith(".dist-info/licenses/LICENSE") for part in inside):
            yield f"{wheels[0].name}: it must hold its licence"
        if "License-Expression: Apache-2.0" not in metadata:
            yield f"{wheels[0].name}: its metadata must name the licence"
        # The template of a project, which 'anyaccel new' writes, has tests of its own.
        if wrong := [part for part in inside if "tests/" in part and "/scaffold/" not in part]:
            yield f"{wheels[0].name}: it must hold no tests (got {', '.join(wrong[:3])})"
        with tarfile.open(sdists[0]) as archive:
            if not any(part.endswith("/LICENSE") for part in archive.getnames()):
                yield f"{sdists[0].name}: it must hold its licence"


def main() -> None:
    """Build, check, and print the built files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to build instead of all, such as 'core'")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to put it (default: dist)")
    args = parser.parse_args()
    names = args.names or list(FOLDERS)
    if unknown := set(names) - FOLDERS.keys():
        parser.error(f"there is no distribution {', '.join(sorted(unknown))}; there are {', '.join(FOLDERS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        package = "anyaccel" if name == "core" else f"anyaccel_{name}"
        for old in (*args.out.glob(f"{package}-[0-9]*.whl"), *args.out.glob(f"{package}-[0-9]*.tar.gz")):
            old.unlink()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: build(name, args.out), names))
    files = sorted(path for path in args.out.iterdir() if path.suffix in {".whl", ".gz"})
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    wrong = list(faults(args.out, names))
    if checked.returncode:
        wrong.append(checked.stdout + checked.stderr)
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"{len(files)} files in {args.out}")


if __name__ == "__main__":
    main()
