"""Fixtures that build real things: installed distributions, recordings, processes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any

import preloaded
import pytest
from anyaccel.accelerators import _installed
from anyaccel.cli import main
from anyaccel.cli.commands import COMMANDS
from anyaccel.inventory.find import _detect_excluded
from anyaccel.ledger.entries import boot
from anyaccel.vendors import guarded
from anyaccel.vendors.process import forget

# As in the background of a shell, and under nohup: what we start would ignore them, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

NOTHING_HERE = Path(__file__).parent / "nothing_here"
"""A recorded machine without accelerators, which a test sees that names none."""
PLUGINS = Path(__file__).parents[2] / "plugins"
PATH, PYTHONPATH = [*sys.path], os.environ.get("PYTHONPATH")
"""Where modules are looked for while no test has plug-ins of its own."""
VENDORS = Path(__file__).parents[1] / "vendors"
ACME = (VENDORS / "acme.py").read_text()

_numbers = count()

Install = Callable[..., Path]
Anyaccel = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for a test, as pytest's own fixture does.

    That lists the folders of all tests before for a free number: 4 ms for each of thousands of tests.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def clean_environment(
    request: pytest.FixtureRequest, chosen_machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """No lease of another test is seen, and no plug-in of a test stays loaded.

    The directory of leases says that it was tested in this boot. In a new one, each process of the machine is looked at
    for the lock of a lost lease, which takes 16 ms in each test that takes a device.
    """
    state = tmp_path.with_name(f"{tmp_path.name}.leases")
    state.mkdir(mode=0o700)
    (state / f"checked.{boot()}.{os.geteuid()}").touch(mode=0o644)
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(state))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config-home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    _forget_answers()
    before = set(sys.modules)
    yield
    _forget_vendors(request.node.path)
    for name in set(sys.modules) - before:
        if name.startswith(("plug_", "acme")):
            del sys.modules[name]


def _forget_answers() -> None:
    """Forget what is kept of the vendors of another test."""
    _detect_excluded.cache_clear()
    _installed.cache_clear()


def end_vendors():
    """End the processes of all vendors, and wait for that; their fork server lives on, which takes longest to start."""
    for process in list(guarded._processes):
        process.close()
    forget()


def _forget_vendors(test: Path) -> None:
    """End the processes of vendors, but for those of installed plug-ins that have seen recorded machines alone.

    It takes a third of a second to start those of all vendors. Tests of a plug-in let it load libraries.
    """
    machine = os.environ.get("ANYACCEL_MACHINE", "host")
    if machine == "host" or sys.path != PATH or PLUGINS in test.parents:
        end_vendors()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a plug-in as pip would: a module and a dist-info with an entry point, on the module path.

    These plug-ins are all that is asked, and of the machine that the tests run on, as with the mark ``host``, unless
    the test names another one.
    """
    if os.environ.get("ANYACCEL_MACHINE") == str(NOTHING_HERE):
        monkeypatch.delenv("ANYACCEL_MACHINE")
    monkeypatch.setenv("ANYACCEL_PLUGINS", "none")
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    vendors: list[str] = []

    def install(vendor: str, source: str, *, distribution: str = "", entry: str = "", version: str = "1.2.3") -> Path:
        name = distribution or f"anyaccel-{vendor}"
        module = f"plug_{name.replace('-', '_')}"
        (site / f"{module}.py").write_text(source)
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[anyaccel]\n{vendor} = {entry or module}\n")
        vendors.append(vendor)
        monkeypatch.setenv("ANYACCEL_PLUGINS", ",".join(vendors))  # what else is installed here does not matter
        return site / f"{module}.py"

    return install


@pytest.fixture
def acme(install: Install) -> Path:
    """The well-behaved vendor, installed."""
    return install("acme", ACME)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., str]:
    """Write a recording of a machine with Acme devices, and return its directory."""

    def record(*devices: dict[str, Any], name: str = "machine", **extra: Any) -> str:
        directory = tmp_path / name
        directory.mkdir()
        facts = {"model": "Acme One", "memory": 1 << 34}
        paths = {
            f"/sys/class/acme/{index}/facts": {"text": json.dumps(facts | {"serial": f"s{index}"} | device)}
            for index, device in enumerate(devices)
        }
        paths["/sys/class/acme/version"] = {"text": "7.1\n"}
        recording = {"schema": "anyaccel.recording/1", "paths": paths} | extra
        (directory / "machine.json").write_text(json.dumps(recording))
        return str(directory)

    return record


LOOKING = {"status", "select", "why", "env", "plugins", "doctor", "export", "config", "queue", "record", "check"}
"""Commands that start, end and become no process."""
OTHERS = {*COMMANDS, "--"} - LOOKING
HERE = ("ANYACCEL_", "ACME_")
"""How variables begin that the interpreter does not read when it starts."""


@pytest.fixture
def anyaccel() -> Anyaccel:
    """Run the command line: in a process of its own, or in this one where the command only looks and prints.

    A process takes longer than what is tested, and a new interpreter longer still: see preloaded.py. With options of
    :func:`subprocess.run`, it is a process in any case. With ``here``, any command runs in this one: a command that is
    refused before it starts anything.
    """

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        more = options.pop("env", {})
        here = options.pop("here", False) or OTHERS.isdisjoint(arguments)
        path = os.environ.get("PYTHONPATH")
        looks_alike = path in (PYTHONPATH, sys.path[0]) and all(name.startswith(HERE) for name in more)
        if looks_alike and not options and here:
            return _run_here(arguments, more)
        environ = {name: value for name, value in {**os.environ, **more}.items() if value is not None}
        return preloaded.run(arguments, env=environ, **options)

    return run


def _run_here(arguments: Sequence[str], more: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which then knows as little of the vendors of a test as a new one."""
    if sys.path != PATH:
        end_vendors()
    _forget_answers()
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        for name, value in more.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        try:
            status = main([os.fspath(each) for each in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    for stream in streams:
        stream.seek(0)
    return subprocess.CompletedProcess(arguments, status, streams[0].read(), streams[1].read())
