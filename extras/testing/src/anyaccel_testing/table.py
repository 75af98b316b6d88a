"""The checks: what anyaccel demands of a plug-in, in one table. ``docs/reference/conformance.md`` says why."""

from __future__ import annotations

from anyaccel_testing.check import Check, NotApplicable
from anyaccel_testing.checks import detection, environment, faults, loading, observation, placing, process
from anyaccel_testing.subject import Subject

VISIBLE = "anyaccel_visible"
VALIDATE = "anyaccel_validate"


def test_classes_only(subject: Subject) -> None:  # noqa: ARG001 - it is about the author's test class
    """C23: No test class overrides a check without a reason."""
    raise NotApplicable("it is about test classes; see anyaccel_testing.AcceleratorPluginTests")


CHECKS: tuple[Check, ...] = (
    Check(id="C01", name="entry-point", function=loading.entry_point),
    Check(id="C02", name="import", function=loading.cheap_import),
    Check(id="C03", name="hooks", function=loading.hooks),
    Check(id="C04", name="annotations", function=loading.annotated),
    Check(id="C05", name="info", function=loading.pure_info),
    Check(id="C06", name="absent", function=detection.absent),
    Check(id="C07", name="expected", function=detection.expected, per_machine=True),
    Check(id="C08", name="repeatable", function=detection.repeatable, per_machine=True),
    Check(id="C09", name="identity", function=detection.identity, per_machine=True),
    Check(id="C10", name="unreadable", function=faults.unreadable, per_machine=True),
    Check(id="C11", name="missing", function=faults.missing, per_machine=True),
    Check(id="C12", name="hanging", function=faults.hanging, per_machine=True),
    Check(id="C13", name="unchanged", function=process.unchanged, per_machine=True),
    Check(id="C14", name="fork", function=process.forked, per_machine=True),
    Check(id="C15", name="tags", function=placing.named, per_machine=True, simulated=True),
    Check(id="C16", name="env", function=environment.total, per_machine=True, simulated=True),
    Check(id="C17", name="hide", function=environment.hides, per_machine=True, simulated=True),
    Check(id="C18", name="owned", function=environment.owned, per_machine=True, simulated=True),
    Check(id="C19", name="round-trip", function=environment.round_trip, hook=VISIBLE, per_machine=True, simulated=True),
    Check(id="C20", name="odd-values", function=environment.odd_values, hook=VISIBLE, per_machine=True, simulated=True),
    Check(id="C21", name="validate", function=placing.refusals, hook=VALIDATE, per_machine=True, simulated=True),
    Check(id="C22", name="context-only", function=process.only_through_context),
    Check(id="C23", name="no-override", function=test_classes_only),
    Check(id="C24", name="together", function=placing.together),
    Check(id="C25", name="others", function=process.observed, per_machine=True),
    Check(id="C26", name="answers", function=observation.answering),
    Check(id="C27", name="deadline", function=observation.in_time, per_machine=True),
    Check(id="C28", name="presence", function=observation.present),
)
