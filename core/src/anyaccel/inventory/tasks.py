"""The child side of detection: what runs in the guarded process, for one vendor at a time.

Every function takes and returns JSON data; ``payload`` holds ``source`` and, where the machine is touched, ``machine``,
``environ`` and ``seconds``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from anyaccel import plugin as author  # noqa: F401 - what every plug-in imports
from anyaccel.errors import PluginError
from anyaccel.inventory.machine import Machine
from anyaccel.model import Detected, Device, PluginInfo, Product
from anyaccel.model.wire import decode, encode, hints
from anyaccel.plugins.discovery import Source
from anyaccel.plugins.vendor import VendorPlugin
from anyaccel.probe.context import Facts, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel.probe.loading import load
from anyaccel.probe.recording import RecordedFacts, Recorder

Payload = Mapping[str, Any]
RECORDED = ("anyaccel_detect", "anyaccel_stats", "anyaccel_diagnose")
"""Hooks that a recording can answer."""

# What every task needs is made ready once, in the process that all of them are forked from.
for kind in (Source, Machine, PluginInfo, Detected, Device):
    hints(kind)


def detect(payload: Payload) -> dict[str, Any]:
    """Load a plug-in and find its devices: ``{"info", "detected", "products", "seconds"}``."""
    return _guard(payload, _detect)


def nodes(payload: Payload) -> dict[str, Any]:
    """Find the devices and what is opened to use them: ``{"devices": [{"name", "nodes"}]}``."""
    return _guard(payload, _nodes)


def stats(payload: Payload) -> dict[str, Any]:
    """Observe the devices in ``payload["devices"]``: ``{"stats": {id: ...}}``."""
    return _guard(payload, _stats)


def diagnose(payload: Payload) -> dict[str, Any]:
    """Look for what is wrong: ``{"findings": [...]}``."""
    return _guard(payload, _diagnose)


def describe(payload: Payload) -> dict[str, Any]:
    """Load a plug-in and ask what it knows without a machine: ``{"info", "products"}``."""
    return _guard(payload, lambda plugin, _: {"products": encode(plugin.products())})


def record(payload: Payload) -> dict[str, Any]:
    """Write down what the hooks ask of the machine: ``{"info", "recording", "detected", "failed"}``."""
    return _guard(payload, _record)


def _guard(payload: Payload, answer: Callable[[VendorPlugin, Payload], dict[str, Any]]) -> dict[str, Any]:
    """Answer, or report the plug-in's fault as ``{"problem": ...}``, with what was known by then."""
    known: dict[str, Any] = {}
    try:
        plugin = VendorPlugin(decode(Source, payload["source"]))
        known["info"] = encode(plugin.info)
        return {**known, **answer(plugin, payload)}
    except PluginError as error:
        import traceback

        cause = error.__cause__
        details = "".join(traceback.format_exception(cause)) if cause else ""
        return {**known, "problem": encode(replace(error.problem, details=details))}


def _detect(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    start = time.monotonic()
    machine = decode(Machine, payload["machine"])
    if machine.simulated:
        from anyaccel.inventory.simulate import matching, simulate

        products = plugin.products()
        wanted = [(found[0], item.count) for item in machine.products if (found := matching(item.product, products))]
        detected = simulate(plugin.info.vendor, wanted) if wanted else None
        answer: dict[str, Any] = {"products": encode(_names(products))}
        environ = payload["environ"]
    else:
        facts = _facts(machine, payload)
        detected = plugin.detect(ProbeContext(facts, start + payload["seconds"]))
        answer = {}
        environ = {**facts.environ, **_own_variables(plugin, payload["environ"])}
    if detected is not None:
        detected = _complete(plugin, detected, environ)
    return {**answer, "detected": encode(detected), "seconds": time.monotonic() - start}


def _complete(plugin: VendorPlugin, detected: Detected, environ: Mapping[str, str]) -> Detected:
    """Fill in what the plug-in's pure hooks say about the devices it found."""
    info = plugin.info
    devices = [
        replace(
            device,
            vendor=info.vendor,
            resource=info.resource,
            kind=info.kind,
            tags=plugin.tags(device),
            fractional=plugin.fractional(device),
            visible=True,
            declared=False,
        )
        for device in sorted(detected.devices, key=lambda device: device.index)
    ]
    ids, notes = _visible(plugin, environ, devices)
    place = {device_id: position for position, device_id in enumerate(ids)}
    ordered = sorted(devices, key=lambda device: place.get(device.id, len(place) + device.index))
    completed = tuple(replace(device, visible=device.id in place, order=order) for order, device in enumerate(ordered))
    return replace(detected, devices=completed, notes=(*detected.notes, *notes))


def _visible(plugin: VendorPlugin, environ: Mapping[str, str], devices: list[Device]) -> tuple[list[str], list[str]]:
    """Ids that the environment leaves to us, in order. When its value makes no sense, none: only ever narrow."""
    try:
        ids, notes = plugin.visible(environ, devices)
    except PluginError as error:
        return [], [f"The environment hides every device of {plugin.info.vendor}: {error.problem.reason}"]
    return [device.id for device in devices] if ids is None else list(ids), notes


def _nodes(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    detected = plugin.detect(_context(payload))
    devices = detected.devices if detected is not None else ()
    found: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"devices": found}
    for device in devices:
        nodes = dict.fromkeys(device.nodes)
        try:
            nodes |= dict.fromkeys(plugin.container([device]).nodes)  # what all devices share is named for each
        except PluginError as error:
            answer["problem"] = encode(error.problem)
        found.append({"name": f"{plugin.info.vendor}:{device.index} ({device.id})", "nodes": list(nodes)})
    return answer


def _stats(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    devices = [decode(Device, device) for device in payload["devices"]]
    return {"stats": encode(plugin.stats(devices, _context(payload)))}


def _diagnose(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    return {"findings": encode(plugin.diagnose(_context(payload)))}


def _record(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    """Call the hooks that touch the machine, each with its part of the time. Their faults show again in the replay."""
    facts = _facts(decode(Machine, payload["machine"]), payload)
    recorder = Recorder(facts)
    recorder.environ.asked.update(_own_variables(plugin, facts.environ))

    def ctx() -> ProbeContext:
        return ProbeContext(recorder, time.monotonic() + payload["seconds"] / len(RECORDED))

    detected, failed = None, ""
    try:
        detected = plugin.detect(ctx())
        if detected is not None:
            detected = _complete(plugin, detected, recorder.environ)
    except PluginError as error:
        failed = f"{error.problem.hook}: {error.problem.reason}"
    if detected is not None:
        with contextlib.suppress(PluginError):
            plugin.stats(detected.devices, ctx())
    with contextlib.suppress(PluginError):
        plugin.diagnose(ctx())
    return {"recording": recorder.recording(), "detected": encode(detected), "failed": failed}


def _context(payload: Payload) -> ProbeContext:
    return ProbeContext(_facts(decode(Machine, payload["machine"]), payload), time.monotonic() + payload["seconds"])


def _facts(machine: Machine, payload: Payload) -> Facts:
    if machine.recording is None:
        return HostFacts(payload["environ"])
    return RecordedFacts(load(machine.recording))


def _own_variables(plugin: VendorPlugin, environ: Mapping[str, str]) -> dict[str, str]:
    """The vendor's variables of an environment: ours narrow a recorded machine as they would a real one."""
    return {name: environ[name] for name in plugin.info.env_vars if name in environ}


def _names(products: tuple[Product, ...]) -> list[str]:
    return [name for product in products for name in (product.name, *product.aliases)]
