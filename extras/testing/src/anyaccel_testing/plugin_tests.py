"""The suite as a pytest class; an author writes a subclass of a few lines.

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
from anyaccel_testing.suite import (
    find_declaration_faults,
    list_recordings,
    read_declared_failures,
    run_checks,
)
from anyaccel_testing.table import CHECKS

SETTINGS = ("vendor", "recordings", "expected_failures")
NEEDS_RECORDINGS = "C07"
OVERRIDES = "C23"


class AcceleratorPluginTests:
    """The checks of a plug-in as pytest tests.

    A subclass names the plug-in and its recordings, and may add tests. It must not override any other attribute of this
    class. A check that the plug-in cannot pass is declared with the reason; the declared check must then fail.

    Attributes:
        vendor: Key of the vendor, whose plug-in must be installed (``pip install -e .``).
        recordings: Directory whose sub-directories are recorded machines, each with the expected inventory.
        expected_failures: Reasons by ids of checks: ``{"C12": "the tool has no time-out, acme/tool#7"}``. Entries of
            ``expected_failures.json`` in the directory of recordings count too, also for ``anyaccel check``.
    """

    vendor: ClassVar[str] = ""
    recordings: ClassVar[Path | str | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that overrides a check without a reason (check C23)."""
        super().__init_subclass__(**options)
        ours = {name for name in vars(AcceleratorPluginTests) if not name.startswith("__") and name not in SETTINGS}
        # vars(), not getattr(): inherited attributes are no overrides.
        for name in [*sorted(ours & vars(cls).keys()), *(["__init_subclass__"] * ("__init_subclass__" in vars(cls)))]:
            if not _has_reason(vars(cls)[name]):
                raise TypeError(
                    f"{OVERRIDES}: {cls.__name__} overrides {name}, so the suite would no longer check what it says."
                    " Remove it; a check that the plug-in cannot pass is declared with its reason:"
                    ' expected_failures = {"C12": "why"}'
                )
        for fault in find_declaration_faults(cls.expected_failures):
            raise TypeError(f"{OVERRIDES}: {cls.__name__}: {fault}")

    @pytest.mark.parametrize("check", CHECKS, ids=[check.label for check in CHECKS])
    def test_check(self, check: Check) -> None:
        """Report the results of a check on all machines as one test."""
        cls = type(self)
        if check.id == OVERRIDES:
            return  # __init_subclass__ has refused every override by now
        results = _get_results(cls)[check.id]
        if check.id == NEEDS_RECORDINGS and not list_recordings(cls.recordings):
            pytest.fail(_explain_recordings(cls), pytrace=False)
        if failed := [_describe(result) for result in results if result.state is State.FAILED]:
            pytest.fail("\n".join([f"{check.id} {check.title}", *failed]), pytrace=False)
        if expected := [_describe(result) for result in results if result.state is State.EXPECTED]:
            pytest.xfail("\n".join(expected))
        if all(result.state is State.SKIPPED for result in results):
            pytest.skip(results[0].message)


def _describe(result: Result) -> str:
    details = f"\n\n{result.details}" if result.details else ""
    return (f"{result.machine}: " if result.machine else "") + result.message + details


def _get_results(cls: type[AcceleratorPluginTests]) -> dict[str, list[Result]]:
    """Run the checks in parallel on the first call, and return the results by check id."""
    known: dict[str, list[Result]] | None = cls.__dict__.get("_known_results")
    if known is None:
        known = {check.id: [] for check in CHECKS}
        for result in _run_suite(cls):
            known[result.check].append(result)
        cls._known_results = known  # type: ignore[attr-defined] # on the class: pytest makes an instance per test
    return known


def _run_suite(cls: type[AcceleratorPluginTests]) -> list[Result]:
    declared = {**read_declared_failures(cls.recordings), **cls.expected_failures}
    return run_checks(cls.vendor, cls.recordings, expected_failures=declared)


def _explain_recordings(cls: type[AcceleratorPluginTests]) -> str:
    return (
        f"{cls.__name__}.recordings must be a directory with recorded machines (got {cls.recordings!r}), one"
        " sub-directory each: make one with 'anyaccel record DIR', or write its machine.json by hand"
    )


def _has_reason(override: object) -> bool:
    """Return True if an override is marked as an expected failure with a reason."""
    marks = getattr(override, "pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)
