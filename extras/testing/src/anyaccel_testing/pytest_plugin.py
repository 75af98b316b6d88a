"""Fixtures for tests of programs on accelerators. pytest loads this module wherever anyaccel-testing is installed.

``accel`` leases devices for each test worker and masks all other devices in its process. ``accel_machine`` replaces the
machine by a simulated or recorded one for a test. ``accel_testbed`` runs a command on a recorded machine. The rest of
anyaccel is imported when a test requests a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from anyaccel.model import Allocation, Inventory

GIVEN = ("ANYACCEL_ALLOCATION", "ANYACCEL_DEVICES", "ANYACCEL_LEASE", "ANYACCEL_MEMORY_LIMIT")
"""Variables that a launcher sets for a worker; they do not apply to another machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("anyaccel", "accelerators")
    group.addoption(
        "--accel",
        metavar="REQUEST",
        help="request of each test worker for the fixture 'accel': GPU:2, GPU:0.5 ... (default: 1 device of any kind)",
    )
    group.addoption(
        "--accel-required",
        action="store_true",
        help="fail tests instead of skipping them when no accelerator is free",
    )


@pytest.fixture(scope="session")
def accel(request: pytest.FixtureRequest) -> Iterator[Allocation]:
    """Lease devices for this test worker until the session ends; the process and its children see only these devices.

    The lease is one as of ``anyaccel run``: workers of pytest-xdist, and other processes on the machine, get other
    devices. If no device is free, the test is skipped with the reason, or fails with ``--accel-required``. A vendor's
    runtime reads its mask when it starts, so use the fixture before the first call into the runtime. If a runtime is
    loaded already, the test is skipped as well.
    """
    from anyaccel.errors import AnyaccelError, UsageError

    from anyaccel_testing.holding import hold_devices

    wanted: str | None = request.config.getoption("accel")
    try:
        hold = hold_devices(wanted)
    except UsageError as error:
        pytest.fail(f"--accel {wanted}: {error}", pytrace=False)
    except AnyaccelError as error:
        end = pytest.fail if request.config.getoption("accel_required") else pytest.skip
        end(f"no accelerator for this test worker: {error}")
    environment = hold.launch.environment
    with hold, pytest.MonkeyPatch.context() as patch:
        for name in environment.unset:
            patch.delenv(name)
        for name, value in environment.set.items():
            patch.setenv(name, value)
        yield hold.allocation


@pytest.fixture
def accel_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Inventory]:
    """Replace the machine for one test and its child processes: ``accel_machine("sim:H100:8")``, or a recording's path.

    The fixture is a function: its argument is a value of ``--machine``, its result the machine's inventory. It removes
    masks from the environment, since they name devices of the real machine.
    """
    from anyaccel import detect
    from anyaccel.probe import MACHINE_VARIABLE

    def use(machine: Any) -> Inventory:
        for name in GIVEN:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(MACHINE_VARIABLE, str(machine))
        # A mask of the real machine would hide simulated devices; only detection tells the names of the masks.
        for report in detect().vendors:
            for name in report.env_vars:
                monkeypatch.delenv(name, raising=False)
        return detect()

    return use


@pytest.fixture(scope="session")
def accel_testbed() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command on the machine of a recording: ``accel_testbed("recordings/pair", "acme-smi", "-L")``.

    Keyword arguments go to :func:`subprocess.run`. Without root and user namespaces, the test is skipped.
    """
    from anyaccel_testing.testbed import TestbedError, run_in_testbed

    def run(recording: str | Path, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        try:
            return run_in_testbed(recording, argv, **options)
        except TestbedError as error:
            pytest.skip(f"{error}; {error.hint}")

    return run
