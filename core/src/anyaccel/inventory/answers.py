"""What the vendors' processes answered to detection: what it means, and how long to wait for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.errors import MachineError
from anyaccel.model import (
    Detected,
    Device,
    EnvEdits,
    PluginInfo,
    ProblemKind,
    Request,
    VendorReport,
    VendorState,
)
from anyaccel.model.wire import decode, prepare
from anyaccel.probe.guard import Outcome
from anyaccel.probe.machine import Machine
from anyaccel.vendors import contract
from anyaccel.vendors.discovery import Source, problem_of
from anyaccel.vendors.presence import Presence
from anyaccel.vendors.process import Answers, Enough, problem_in, process_of, qualified

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRACE_SECONDS = 0.8
"""How long a request that others can serve waits for a vendor that it does not name."""

for kind in (PluginInfo, EnvEdits, Detected):  # while whoever imports this waits for what has begun
    prepare(kind)


def enough_for(request: Request, present: Mapping[str, Presence | None], sources: Sequence[Source]) -> Enough:
    """What says how long a request waits for vendors that have not answered, given those that have."""
    named = {name.casefold() for term in request.terms for name in term.names}
    own: dict[str, set[str]] = {}
    for source in sources:
        declared = present.get(source.vendor)
        if declared is not None and declared.resource:
            own[source.vendor] = {source.vendor.casefold(), declared.resource.casefold()}

    def enough(outcomes: Mapping[str, Outcome]) -> float | None:
        for vendor in present:
            if vendor not in outcomes and not own.get(vendor, named).isdisjoint(named):
                return None
        offered = [names for vendor, outcome in outcomes.items() for names in _offered(vendor, outcome)]
        served = all(any(_asks_for(term.names, names) for names in offered) for term in request.terms)
        return GRACE_SECONDS if served else None

    return enough


def _offered(vendor: str, outcome: Outcome) -> list[set[str]]:
    """The names of each device in an answer that has not been looked at yet."""
    try:
        info, detected = outcome.value["info"], outcome.value["detected"]
        return [
            {name.casefold() for name in (vendor, info["resource"], *device.get("tags", ()))}
            for device in detected["devices"]
        ]
    except (AttributeError, LookupError, TypeError):
        return []


def _asks_for(names: Iterable[str], offered: set[str]) -> bool:
    return any(name.casefold() in offered for name in names)


def interpret(source: Source, outcome: Outcome) -> tuple[VendorReport, list[Device]]:
    """How a vendor fared, and its devices: none where something is wrong with what it answered."""
    answer: dict[str, Any] = outcome.value if isinstance(outcome.value, dict) else {}
    problem = problem_in(source, outcome, "anyaccel_detect")
    info = detected = hidden = None
    try:
        info = decode(PluginInfo, answer["info"]) if "info" in answer else None
        hidden = decode(EnvEdits, answer["hidden"]) if "hidden" in answer else None
        data = answer.get("detected")
        detected = decode(Detected, data) if data is not None else None
        faults = [*contract.info_faults(info, source.vendor)] if info else []
        faults += contract.device_faults(detected.devices) if detected else []
        faults += [
            f"Device.id must not begin with the vendor and a slash (got {device.id!r})"
            for device in (detected.devices if detected else ())
            if device.id.startswith(f"{source.vendor}/")
        ]
        faults += contract.env_faults(hidden, info.env_vars) if hidden and info else []
    except ValueError as error:
        faults = [str(error)]
    if faults and problem is None:
        problem = problem_of(source, ProblemKind.CONTRACT, f"{'; '.join(faults)}.", "anyaccel_detect")
    if problem is not None:
        detected = None
    state = VendorState.FAILED if problem else VendorState.OK if detected else VendorState.ABSENT
    seconds = answer.get("seconds", 0.0)
    report = VendorReport(
        vendor=source.vendor,
        state=state,
        resource=info.resource if info else "",
        kind=info.kind if info else "",
        env_vars=info.env_vars if info else (),
        runtimes=info.runtimes if info else (),
        maskable=info.maskable if info else True,
        borrowed=info.borrowed if info else (),
        cleared=info.cleared if info else (),
        ray_switch=info.ray_switch if info else "",
        distribution=source.distribution,
        version=source.version,
        driver_version=detected.driver_version if detected else "",
        partial=detected.partial if detected else False,
        notes=detected.notes if detected else (),
        problem=problem,
        hidden=None if faults else hidden,
        seconds=seconds if isinstance(seconds, float) and seconds >= 0 else 0.0,
    )
    if detected is None:
        return report, []
    process_of(source).learn(outcome, detected.devices)
    return report, list(detected.devices)


def told_apart(found: Mapping[str, list[Device]]) -> list[Device]:
    """The devices of all vendors. An id is its vendor's: where two use the same one, theirs begin with the vendor."""
    uses = Counter(device.id for devices in found.values() for device in devices)
    return [
        qualified(device) if any(uses[each.id] > 1 for each in devices) else device
        for devices in found.values()
        for device in devices
    ]


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def check_products(machine: Machine, answers: Answers) -> None:
    """Refuse a simulation of something that no plug-in knows, or that several know under one name."""
    known = {
        vendor: _texts(outcome.value.get("products")) if isinstance(outcome.value, dict) else []
        for vendor, (_, outcome) in answers.items()
    }
    for name in (item.product for item in machine.products):
        makers = [vendor for vendor, names in known.items() if name.casefold() in map(str.casefold, names)]
        if len(makers) > 1:
            raise MachineError(f"{name!r} is a product of {' and '.join(makers)}: set ANYACCEL_PLUGINS to one of them")
        if not makers:
            import difflib

            names = sorted({name for listed in known.values() for name in listed})
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            way_out = f"did you mean {', '.join(close)}?" if close else "see 'anyaccel plugins' for what is installed"
            failed = [problem for source, outcome in answers.values() if (problem := problem_in(source, outcome, ""))]
            if failed:
                way_out = f"perhaps one that failed does: {failed[0]}"
            raise MachineError(f"no installed plug-in knows the product {name!r} in {machine.text!r}; {way_out}")
