"""Look for what is wrong with Neuron on a machine, one way out each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from anyaccel.plugin import Detected, Device, Finding, Health, ProbeContext, QueryError, Severity

from anyaccel_neuron import environment, sysfs
from anyaccel_neuron.detection import detect
from anyaccel_neuron.health import REPLACE

_HARDWARE_ERROR = re.compile(r"NEURON_HW_ERR=(\w+)[^\n]*?\bnd-id=(\d+)")


def diagnose(ctx: ProbeContext) -> list[Finding]:
    """List findings; none where there is no Neuron device and no driver."""
    try:
        detected = detect(ctx)
    except (RuntimeError, ValueError) as error:
        return [Finding(severity=Severity.FAIL, reason=str(error), remedy="install the package aws-neuronx-tools")]
    if detected is None:
        return []
    findings = [*_unfit(detected), *_notes(detected), *_variables(ctx, detected.devices), *_kernel_log(ctx)]
    if findings:
        return findings
    chips = len({device.parent for device in detected.devices})
    message = (
        f"{chips} Neuron devices with {len(detected.devices)} cores, driver {detected.driver_version or 'unknown'}"
    )
    return [Finding(severity=Severity.OK, reason=message)]


def _unfit(detected: Detected) -> Iterator[Finding]:
    """One finding for each reason, with the chips that it holds for."""
    chips: dict[str, list[str]] = {}
    for device in detected.devices:
        if device.health is Health.UNHEALTHY:
            named = chips.setdefault(device.health_reason, [])
            if device.parent and device.parent not in named:
                named.append(device.parent)
    for reason, named in chips.items():
        what, _, fix = reason.partition(": ")
        yield Finding(severity=Severity.FAIL, reason=f"{', '.join(named)}: {what}", remedy=fix)
    if not (detected.devices or detected.notes):
        fix = "use an inf or trn instance, or remove the package aws-neuronx-dkms"
        yield Finding(severity=Severity.WARN, reason="the Neuron driver is here and no device is", remedy=fix)


def _notes(detected: Detected) -> Iterator[Finding]:
    for note in detected.notes:
        tool = note.startswith("neuron-ls")
        fix = "install or update the package aws-neuronx-tools" if tool else "pass the device nodes into the container"
        yield Finding(severity=Severity.WARN, reason=note.partition(": install")[0], remedy=fix)


def _variables(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    environ = ctx.environ
    try:
        environment.visible(environ, devices)
    except ValueError as error:
        yield Finding(
            severity=Severity.FAIL, reason=str(error), remedy=f"unset {environment.VISIBLE_CORES} or correct it"
        )
    if environment.VISIBLE_CORES in environ and environment.NUM_CORES in environ:
        yield Finding(
            severity=Severity.WARN,
            reason=f"{environment.NUM_CORES} is ignored beside {environment.VISIBLE_CORES}",
            remedy=f"unset {environment.NUM_CORES}",
        )
    found = {str(device.attributes["lnc"]) for device in devices if "lnc" in device.attributes}
    for name in (environment.LNC_CONFIG, environment.LNC_CONFIG_OLD):
        value = environ.get(name, "").strip()
        if value and found and value not in found:
            yield Finding(
                severity=Severity.WARN,
                reason=f"{name}={value} and the cores here are of size {', '.join(sorted(found))}, so ids differ",
                remedy=f"unset {name}, or configure the machine in {sysfs.LNC_FILE}",
            )


def _kernel_log(ctx: ProbeContext) -> Iterator[Finding]:
    """Hardware errors that the driver reported, where this user may read the kernel's log."""
    path, left = ctx.environ.get("PATH", os.defpath), ctx.remaining()
    try:
        errors = ctx.query("kernel/neuron-errors", lambda: _logged_errors(path, min(2.0, left / 2)))
    except QueryError:
        return
    for kind, chip in errors:
        message = f"the driver reported {kind} on device {chip}"
        yield Finding(severity=Severity.FAIL, reason=message, remedy=REPLACE)


def _logged_errors(path: str, seconds: float) -> list[list[str]]:
    """Kind and chip of each error. Nothing else of the log may get into a recording: it names hosts and serials."""
    program = shutil.which("dmesg", path=path)
    if program is None:
        raise FileNotFoundError("dmesg is not installed")
    result = subprocess.run(
        [program], stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=seconds, errors="replace"
    )
    return [list(error) for error in dict.fromkeys(_HARDWARE_ERROR.findall(result.stdout))]
