"""Fixtures for the tests of programs that use accelerators; pytest loads this module wherever anyaccel is installed.

``accel`` gives each test worker devices of its own and makes its process see exactly those. ``accel_machine`` makes a
test see a simulated or recorded machine. Nothing else of anyaccel is imported before a test asks for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anyaccel.model import Allocation, Inventory

GIVEN = ("ANYACCEL_ALLOCATION", "ANYACCEL_DEVICES", "ANYACCEL_LEASE", "ANYACCEL_MEMORY_LIMIT")
"""What a launcher tells a worker of its devices: nothing about another machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("anyaccel", "accelerators")
    group.addoption(
        "--accel",
        metavar="REQUEST",
        help="what the fixture 'accel' gives each test worker: GPU:2, GPU:0.5 ... (default: 1 device of any kind)",
    )
    group.addoption(
        "--accel-required",
        action="store_true",
        help="fail the tests for which there is no accelerator, instead of skipping them",
    )


@pytest.fixture(scope="session")
def accel(request: pytest.FixtureRequest) -> Iterator[Allocation]:
    """Devices of this test worker alone: the process and what it starts see exactly these, until the session ends.

    They are held as by ``anyaccel run``: with pytest-xdist every worker gets others, and nobody else on the machine
    gets them. A test that uses the fixture is skipped where none are free, with the reason, or fails with
    ``--accel-required``. Masks only count until a vendor's runtime starts: use the fixture, or one that uses it, before
    the first call into such a runtime. A runtime that is loaded by then is a reason to skip, too.
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
    """Make the test, and what it starts, see another machine: ``accel_machine("sim:H100:8")``, or a recording's path.

    The fixture is a function that takes what ``--machine`` takes and returns the machine's inventory. Masks that this
    process was started with do not count on it.
    """
    from anyaccel import detect
    from anyaccel.probe import MACHINE_VARIABLE

    def use(machine: Any) -> Inventory:
        for name in GIVEN:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(MACHINE_VARIABLE, str(machine))
        for report in detect().vendors:
            for name in report.env_vars:
                monkeypatch.delenv(name, raising=False)
        return detect()

    return use
