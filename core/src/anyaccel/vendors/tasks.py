"""The tasks of a vendor's process: load the plug-in, detect devices, call hooks.

Every function takes and returns JSON data. A payload may hold ``load``, the origin of the plug-in, in the first call of
a process; ``introduce``, devices that later calls name by id; ``devices``, the ids of the devices of the call;
``machine``, ``environ`` and ``seconds`` for a hook that touches the machine. An answer holds ``value``, or ``problem``
with the facts up to then. The caller compares answers with the contract.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from anyaccel import plugin as author  # noqa: F401 - what every plug-in imports
from anyaccel.errors import PluginError
from anyaccel.hookspecs import HOOKS
from anyaccel.model import (
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    PluginInfo,
    Product,
    Share,
    Term,
    replace,
)
from anyaccel.model.wire import decode, encode, hints
from anyaccel.probe.context import ProbeContext
from anyaccel.probe.machine import Machine
from anyaccel.probe.recording import Recorder
from anyaccel.vendors import contract
from anyaccel.vendors.discovery import Source
from anyaccel.vendors.plugin import VendorPlugin

Payload = Mapping[str, Any]

# This runs in the fork server, so that the processes of all vendors inherit the builders and checks of these classes.
for kind in (Source, Machine, PluginInfo, Detected, Device):
    hints(kind)


_last: list[VendorPlugin | PluginError] = []
"""The plug-in that was loaded last."""
_devices: dict[str, Device] = {}
"""The devices that calls name by id."""


def hello(payload: Payload) -> dict[str, Any]:
    """Load the plug-in: ``{"info", "hooks"}``."""
    return _guard(payload, lambda _: {"value": None})


def detect(payload: Payload) -> dict[str, Any]:
    """Find the devices: ``{"info", "hooks", "detected", "visible", "hidden", "products", "seconds"}``."""
    return _guard(payload, lambda plugin: _detect(plugin, payload))


def __getattr__(name: str) -> Callable[[Payload], dict[str, Any]]:
    """Return the task of a hook of the contract: ``{"value"}``, which the caller compares with the contract."""
    if name not in contract.HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda payload: _guard(payload, lambda plugin: _ask(plugin, name, payload))


def record(payload: Payload) -> dict[str, Any]:
    """Record which facts the hooks read: ``{"info", "recording"}``, and the answer of :func:`detect`."""
    return _guard(payload, lambda plugin: _record(plugin, payload))


def _guard(payload: Payload, answer: Callable[[VendorPlugin], dict[str, Any]]) -> dict[str, Any]:
    """Return an answer, or the plug-in's fault as ``{"problem": ...}`` with the facts up to then."""
    known: dict[str, Any] = {}
    try:
        plugin = _load(payload)
        if "load" in payload or "machine" in payload:  # a caller of a pure hook has got both before
            known["info"] = encode(plugin.info)
            known["hooks"] = [name for name in HOOKS if plugin.implements(name)]
        for data in payload.get("introduce", ()):
            device = decode(Device, data)
            _devices[device.id] = device
        return {**known, **answer(plugin)}
    except PluginError as error:
        return {**known, **_problem(error)}


def _ask(plugin: VendorPlugin, name: str, payload: Payload) -> dict[str, Any]:
    devices = [_devices[each] for each in payload.get("devices", ())]
    told: dict[str, Callable[[], Any]] = {
        "devices": lambda: devices,
        "device": lambda: devices[0],
        "request": lambda: decode(Term, payload["request"]),
        "given": lambda: payload["given"],
        "ctx": lambda: _env_context(payload) if "shares" in payload else _context(payload),
    }
    return {"value": encode(plugin.ask(name, *(told[each]() for each in plugin.arguments(name))))}


def _env_context(payload: Payload) -> EnvContext:
    shares = [decode(Share, share) for share in payload["shares"]]
    return EnvContext(
        devices=tuple(_devices[each] for each in payload["everything"]),
        shares={each.device.id: replace(each, device=_devices[each.device.id]) for each in shares},
        environ=payload["environ"],
        mask=payload["mask"],
    )


def _problem(error: PluginError) -> dict[str, Any]:
    import traceback

    cause = error.__cause__
    details = "".join(traceback.format_exception(cause)) if cause else ""
    return {"problem": encode(replace(error.problem, details=details))}


@cache
def _import(source: Source) -> VendorPlugin | PluginError:
    """Return a plug-in, or the error of its import: a second import would find half-initialised modules."""
    try:
        return VendorPlugin(source, rules=False)
    except PluginError as error:
        return error


def _load(payload: Payload) -> VendorPlugin:
    """Return the plug-in; the first call imports it.

    Raises:
        PluginError: When the plug-in cannot be loaded.
    """
    if payload.get("adopt") and dict(os.environ) != payload["environ"]:
        os.environ.clear()  # libraries read the variables of the caller
        os.environ.update(payload["environ"])
    if "load" in payload:
        sys.path[:] = payload["load"]["path"]  # the fork server may be older than changes of the path
        _last[:] = [_import(decode(Source, payload["load"]["source"]))]
    if isinstance(_last[0], PluginError):
        raise _last[0]
    return _last[0]


def _detect(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    start = time.monotonic()
    machine = decode(Machine, payload["machine"])
    answer: dict[str, Any] = {}
    if payload.get("names"):  # presence.json does not list the products
        with contextlib.suppress(PluginError):  # 'anyaccel plugins' and 'anyaccel check' report the fault
            answer["products"] = _names(plugin.products())
    if machine.simulated or payload.get("simulate"):
        from anyaccel.vendors.simulate import find_cards, simulate

        # Devices are made of the products here, before the calling process can compare these with the rules.
        products = plugin.ask("products", rules=True)
        wanted = [cards for item in machine.products if (cards := find_cards(item.product, item.count, products))]
        detected = simulate(plugin.info.vendor, wanted) if wanted else None
        answer["products"] = _names(products)
        environ = payload["environ"]
    else:
        facts = machine.facts(payload["environ"])
        # On a recording, masks of the caller count like on the recorded machine.
        environ = {**facts.environ, **_own_variables(plugin, payload["environ"])}
        try:
            detected = plugin.detect(ProbeContext(facts, start + payload["seconds"]))
        except PluginError as error:
            answer |= _problem(error)
            with contextlib.suppress(PluginError):  # then the launcher warns that the devices are not hidden
                answer["hidden"] = encode(_hidden(plugin, (), payload["environ"]))
            return answer
    if detected is not None:
        try:
            detected, answer["visible"] = _describe(plugin, detected, environ)
            answer["hidden"] = encode(_hidden(plugin, detected.devices, payload["environ"]))
        except PluginError as error:
            return answer | {"detected": encode(detected)} | _problem(error)
        _devices.clear()  # those of an earlier detection; the caller introduces what it asks about
    return {**answer, "detected": encode(detected), "seconds": time.monotonic() - start}


def _hidden(plugin: VendorPlugin, devices: tuple[Device, ...], environ: Mapping[str, str]) -> EnvEdits:
    """Return the edits by which a worker sees none of the vendor's devices."""
    edits: EnvEdits = plugin.env((), EnvContext(devices=devices, environ=environ))
    return edits


def _describe(plugin: VendorPlugin, detected: Detected, environ: Mapping[str, str]) -> tuple[Detected, dict[str, Any]]:
    """Ask the pure hooks about the devices of a detection.

    Returns:
        The devices with their vendor, tags and sharing, and the answer of ``anyaccel_visible``, or the problem with it.
    """
    devices = tuple(
        replace(plugin.info.describe(device), tags=plugin.tags(device), fractional=plugin.fractional(device))
        for device in sorted(detected.devices, key=lambda device: device.index)
    )
    detected = replace(detected, devices=devices)
    try:
        visible, notes = plugin.visible(environ, devices)
    except PluginError as error:
        return detected, _problem(error)
    return replace(detected, notes=(*detected.notes, *notes)), {"value": encode(visible)}


def _record(plugin: VendorPlugin, payload: Payload) -> dict[str, Any]:
    """Call the hooks that touch the machine. A fault of a hook shows again in the replay."""
    facts = decode(Machine, payload["machine"]).facts(payload["environ"])
    recorder = Recorder(facts)
    recorder.environ.asked.update(_own_variables(plugin, facts.environ))

    def ctx() -> ProbeContext:
        return ProbeContext(recorder, time.monotonic() + payload["seconds"] / len(contract.RECORDED))

    detected = None
    answer: dict[str, Any] = {}
    try:
        detected = plugin.detect(ctx())
        if detected is not None:
            detected, answer["visible"] = _describe(plugin, detected, recorder.environ)
    except PluginError as error:
        answer = _problem(error)
    if detected is not None:
        with contextlib.suppress(PluginError):
            plugin.stats(detected.devices, ctx())
    with contextlib.suppress(PluginError):
        plugin.diagnose(ctx())
    return {**answer, "recording": recorder.recording(), "detected": encode(detected)}


def _context(payload: Payload) -> ProbeContext:
    facts = decode(Machine, payload["machine"]).facts(payload["environ"])
    return ProbeContext(facts, time.monotonic() + payload["seconds"])


def _own_variables(plugin: VendorPlugin, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the vendor's variables of an environment, which narrow a recorded machine as well."""
    return {name: environ[name] for name in plugin.info.env_vars if name in environ}


def _names(products: Sequence[Product]) -> list[str]:
    names = [(product, name) for product in products for name in (product.name, *product.aliases)]
    divided = [f"{name}/{part}" for product, name in names for part in product.parts]
    return [name for _, name in names] + divided
