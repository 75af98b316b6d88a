"""The suite as a pytest class, of which the author of a plug-in makes a subclass of a few lines.

from pathlib import Path
from anyaccel_testing import AcceleratorPluginTests

class TestAcme(AcceleratorPluginTests):
    vendor = "acme"
    recordings = Path(__file__).parent.parent / "recordings"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anyaccel_testing.check import Check, Result, State
from anyaccel_testing.suite import declaration_faults, declared_failures, list_recordings, machines_of, run_checks
from anyaccel_testing.table import CHECKS

SETTINGS = ("vendor", "recordings", "expected_failures")
NEEDS_RECORDINGS = "C07"
OVERRIDES = "C23"


class AcceleratorPluginTests:
    """All checks on one plug-in, as tests of its author.

    A subclass names the plug-in and its recordings, and may add tests of its own. It must not override anything else
    of this class; a check that the plug-in cannot pass is declared, with the reason, and then has to fail.

    Attributes:
        vendor: Key of the vendor, whose plug-in must be installed (``pip install -e .``).
        recordings: Directory whose sub-directories are recorded machines, each with the expected inventory.
        expected_failures: Why a check fails, by its id: ``{"C12": "the tool has no time-out, acme/tool#7"}``. What
            ``expected_failures.json`` in the directory of recordings says counts too, also for ``anyaccel check``.
    """

    vendor: ClassVar[str] = ""
    recordings: ClassVar[Path | str | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that makes the suite say less than it does: this is check C23."""
        super().__init_subclass__(**options)
        ours = {name for name in vars(AcceleratorPluginTests) if not name.startswith("__") and name not in SETTINGS}
        for name in [*sorted(ours & vars(cls).keys()), *(["__init_subclass__"] * ("__init_subclass__" in vars(cls)))]:
            if not _has_reason(vars(cls)[name]):
                raise TypeError(
                    f"{OVERRIDES}: {cls.__name__} overrides {name}, so the suite would no longer check what it says."
                    " Remove it; a check that the plug-in cannot pass is declared with its reason:"
                    ' expected_failures = {"C12": "why"}'
                )
        for fault in declaration_faults(cls.expected_failures):
            raise TypeError(f"{OVERRIDES}: {cls.__name__}: {fault}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test per check, and per recording where a check is about a machine."""
        if metafunc.function is not AcceleratorPluginTests.test_check:
            return
        owner = metafunc.cls
        assert owner is not None  # noqa: S101 - pytest calls this for the tests of a class
        recordings = list_recordings(owner.recordings)
        cases = [
            pytest.param(check, machine, id=f"{check.label}-{machine}" if machine else check.label)
            for check in CHECKS
            for machine in machines_of(check, recordings)
        ]
        metafunc.parametrize(("check", "machine"), cases)

    def test_check(self, check: Check, machine: str) -> None:
        """The plug-in does what the check demands."""
        cls = type(self)
        if check.id == OVERRIDES:
            return  # the class could be made, so it overrides nothing
        result = _results(cls)[check.id, machine]
        if check.id == NEEDS_RECORDINGS and not machine:
            pytest.fail(_without_recordings(cls), pytrace=False)
        if result.state is State.EXPECTED:
            pytest.xfail(result.message)
        if result.state is State.FAILED:
            details = f"\n\n{result.details}" if result.details else ""
            pytest.fail(f"{check.id} {check.title}\n{result.message}{details}", pytrace=False)
        if result.state is State.SKIPPED:
            pytest.skip(result.message)


def _results(cls: type[AcceleratorPluginTests]) -> dict[tuple[str, str], Result]:
    """How every check ends, by id and machine; all of them run at once, when the first is asked for."""
    known: dict[tuple[str, str], Result] | None = cls.__dict__.get("_known_results")
    if known is None:
        recordings = list_recordings(cls.recordings)
        known = {(result.check, result.machine): result for result in _run(cls)}
        for check in CHECKS:
            anywhere = known.get((check.id, ""))  # what is said of the plug-in as such is said of every machine
            for machine in machines_of(check, recordings):
                if anywhere is not None:
                    known.setdefault((check.id, machine), anywhere)
        cls._known_results = known  # type: ignore[attr-defined] # it is no setting of the author's
    return known


def _run(cls: type[AcceleratorPluginTests]) -> list[Result]:
    declared = {**declared_failures(cls.recordings), **cls.expected_failures}
    return run_checks(cls.vendor, cls.recordings, expected_failures=declared)


def _without_recordings(cls: type[AcceleratorPluginTests]) -> str:
    return (
        f"{cls.__name__}.recordings must be a directory with recorded machines (got {cls.recordings!r}), one"
        " sub-directory each: make one with 'anyaccel record DIR', or write its machine.json by hand"
    )


def _has_reason(override: object) -> bool:
    """Whether an override is marked as an expected failure, with the reason."""
    marks = getattr(override, "pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)
