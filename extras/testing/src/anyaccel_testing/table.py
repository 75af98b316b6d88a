"""The checks: what anyaccel demands of a plug-in, in one table. ``docs/reference/conformance.md`` says why."""

from __future__ import annotations

from anyaccel_testing.check import Check, NotApplicable
from anyaccel_testing.checks import detection, environment, faults, loading, observation, placing, process
from anyaccel_testing.subject import Subject

VISIBLE = "anyaccel_visible"
VALIDATE = "anyaccel_validate"


def test_classes_only(subject: Subject) -> None:  # noqa: ARG001 - it is about the author's test class
    """C23: only a test class can override a check; AcceleratorPluginTests sees to it."""
    raise NotApplicable("it is about test classes; see anyaccel_testing.AcceleratorPluginTests")


CHECKS: tuple[Check, ...] = (
    Check(
        id="C01",
        name="entry-point",
        title="The entry point leads to the plug-in, and the plug-in's vendor has its name.",
        function=loading.entry_point,
    ),
    Check(
        id="C02",
        name="import",
        title="Importing the plug-in loads no vendor library and little else.",
        function=loading.cheap_import,
    ),
    Check(
        id="C03",
        name="hooks",
        title="Every function that looks like a hook is one, and the required ones are there.",
        function=loading.hooks,
    ),
    Check(
        id="C04",
        name="annotations",
        title="Annotations of the hooks, where there are any, agree with the contract's.",
        function=loading.annotated,
    ),
    Check(
        id="C05",
        name="info",
        title="The plug-in says who it is, the same each time, from nothing but its own code.",
        function=loading.pure_info,
    ),
    Check(
        id="C06",
        name="absent",
        title="On a machine without a trace of the vendor, the answer is None and nothing is loaded.",
        function=detection.absent,
    ),
    Check(
        id="C07",
        name="expected",
        title="A recorded machine gives the inventory that lies beside it.",
        function=detection.expected,
        per_machine=True,
    ),
    Check(
        id="C08",
        name="repeatable",
        title="Detecting twice gives the same.",
        function=detection.repeatable,
        per_machine=True,
    ),
    Check(
        id="C09",
        name="identity",
        title="Devices have ids that are unique, no indexes, and the same whatever the order of directories.",
        function=detection.identity,
        per_machine=True,
    ),
    Check(
        id="C10",
        name="unreadable",
        title="What cannot be opened makes the answer partial, failed, or a device unhealthy: none vanishes silently.",
        function=faults.unreadable,
        per_machine=True,
    ),
    Check(
        id="C11",
        name="missing",
        title="Without its tool or library, or when either fails, a vendor is not silently without devices.",
        function=faults.missing,
        per_machine=True,
    ),
    Check(
        id="C12",
        name="hanging",
        title="A tool that hangs is asked once, and its devices do not vanish silently.",
        function=faults.hanging,
        per_machine=True,
    ),
    Check(
        id="C13",
        name="unchanged",
        title="Hooks leave the process as it was: environment, directory, signals, files, threads, children, output.",
        function=process.unchanged,
        per_machine=True,
    ),
    Check(
        id="C14",
        name="fork",
        title="After detection the process may fork, and the hooks work in the child.",
        function=process.forked,
        per_machine=True,
    ),
    Check(
        id="C15",
        name="tags",
        title="Every device and every product has tags, the product's name first, and says whether it may be shared.",
        function=placing.named,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C16",
        name="env",
        title="There is an environment for each accepted set of usable devices and for shares, others for other slots.",
        function=environment.total,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C17",
        name="hide",
        title="The environment for no device hides every one.",
        function=environment.hides,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C18",
        name="owned",
        title="The environment touches only variables that the plug-in owns.",
        function=environment.owned,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C19",
        name="round-trip",
        title="What env wrote, visible reads: the same devices and slots, also over an outer launcher's variables.",
        function=environment.round_trip,
        hook=VISIBLE,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C20",
        name="odd-values",
        title="Any value of a variable gives ids, or a ValueError that names the variable.",
        function=environment.odd_values,
        hook=VISIBLE,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C21",
        name="validate",
        title="Refusals are sentences, and some set of devices is accepted.",
        function=placing.refusals,
        hook=VALIDATE,
        per_machine=True,
        simulated=True,
    ),
    Check(
        id="C22",
        name="context-only",
        title="Hooks touch the machine through ctx alone; those without ctx are pure, and none reads os.environ.",
        function=process.only_through_context,
    ),
    Check(
        id="C23",
        name="no-override",
        title="No test class overrides a check without a reason.",
        function=test_classes_only,
    ),
    Check(
        id="C24",
        name="together",
        title="Beside every other installed vendor, neither a device nor a name nor a variable is claimed by both.",
        function=placing.together,
    ),
    Check(
        id="C25",
        name="others",
        title="What products, stats, diagnose and container say keeps the contract.",
        function=process.observed,
        per_machine=True,
    ),
    Check(
        id="C26",
        name="answers",
        title="Stats and diagnose answer where there are devices: neither fails on every such machine.",
        function=observation.answering,
    ),
    Check(
        id="C27",
        name="deadline",
        title="Detection, stats and diagnose are done before their deadline.",
        function=observation.in_time,
        per_machine=True,
    ),
    Check(
        id="C28",
        name="presence",
        title="The data beside the plug-in is understood, names its resource, and rules out no machine that has it.",
        function=observation.present,
    ),
)
