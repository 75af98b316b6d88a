"""The table of checks. ``docs/reference/conformance.md`` gives the reason for each."""

from __future__ import annotations

from anyaccel_testing.check import Check, NotApplicable
from anyaccel_testing.checks import (
    catalog,
    detection,
    environment,
    faults,
    handover,
    loading,
    observation,
    placing,
    process,
)
from anyaccel_testing.subject import Subject

VISIBLE = "anyaccel_visible"
VALIDATE = "anyaccel_validate"


def check_overrides(subject: Subject) -> None:  # noqa: ARG001 - AcceleratorPluginTests reports it
    """C23: No test class overrides a check without a reason."""
    raise NotApplicable("it is about test classes; see anyaccel_testing.AcceleratorPluginTests")


CHECKS: tuple[Check, ...] = (
    Check(id="C01", name="entry-point", function=loading.check_entry_point),
    Check(id="C02", name="import", function=loading.check_import),
    Check(id="C03", name="hooks", function=loading.check_hooks),
    Check(id="C04", name="annotations", function=loading.check_annotations),
    Check(id="C05", name="info", function=loading.check_info),
    Check(id="C06", name="absent", function=detection.check_absent),
    Check(id="C07", name="expected", function=detection.check_expected, per_machine=True),
    Check(id="C08", name="repeatable", function=detection.check_repeatable, per_machine=True),
    Check(id="C09", name="identity", function=detection.check_identity, per_machine=True),
    Check(id="C10", name="unreadable", function=faults.check_unreadable, per_machine=True),
    Check(id="C11", name="missing", function=faults.check_missing, per_machine=True),
    Check(id="C12", name="hanging", function=faults.check_hanging, per_machine=True),
    Check(id="C13", name="unchanged", function=process.check_unchanged, per_machine=True),
    Check(id="C14", name="fork", function=process.check_fork, per_machine=True),
    Check(id="C15", name="tags", function=placing.check_tags, per_machine=True, simulated=True),
    Check(id="C16", name="env", function=environment.check_env, per_machine=True, simulated=True),
    Check(id="C17", name="hide", function=environment.check_hiding, per_machine=True, simulated=True),
    Check(id="C18", name="owned", function=environment.check_ownership, per_machine=True, simulated=True),
    Check(
        id="C19",
        name="round-trip",
        function=environment.check_round_trip,
        hook=VISIBLE,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C20",
        name="odd-values",
        function=environment.check_odd_values,
        hook=VISIBLE,
        per_machine=True,
        simulated=True,
    ),
    Check(id="C21", name="validate", function=placing.check_refusals, hook=VALIDATE, per_machine=True, simulated=True),
    Check(id="C22", name="context-only", function=process.check_context_only),
    Check(id="C23", name="no-override", function=check_overrides),
    Check(id="C24", name="together", function=placing.check_together),
    Check(id="C25", name="others", function=process.check_observations, per_machine=True),
    Check(id="C26", name="answers", function=observation.check_answers),
    Check(id="C27", name="deadline", function=observation.check_deadlines, per_machine=True),
    Check(id="C28", name="presence", function=observation.check_presence),
    Check(id="C29", name="catalog", function=catalog.check_catalog),
    Check(id="C30", name="handover", function=handover.check_handover, hook=handover.HOOK, per_machine=True),
)
