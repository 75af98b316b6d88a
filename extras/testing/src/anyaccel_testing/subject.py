"""The plug-in under test and its machines, inside the process of a check."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.inventory import interpret
from anyaccel.model import Detected, Device, Problem, VendorReport, VendorState, encode
from anyaccel.probe import FILE_NAME, SCHEMA, Facts, HostFacts, Machine, ProbeContext, RecordedFacts, Simulated, load
from anyaccel.vendors import Outcome, Source, VendorPlugin, tasks

from anyaccel_testing.check import NotApplicable

SECONDS = 10.0
"""Time limit of a detection in seconds, as for users."""
PRODUCTS = "products"
"""Name under which the simulated machines are reported."""
LIVE = "live.json"
"""Beside the recording of this host: what was detected on the host itself."""
HOST = "host"
"""Name under which this host is reported."""


class Subject:
    """The plug-in under test.

    Args:
        source: Entry point and distribution of the plug-in.
        recordings: Directories of recorded machines.
        live: True if the recordings were just made of this host, so that detection may run on the host too.
        timeout: Time limit in seconds of each hook that touches the machine.

    Attributes:
        too_slow: Name of the machine on which a hook exceeded the limit; empty if none did.
        tried_shapes: Shapes of the machines that were tried; see :attr:`TestedMachine.first_of_shape`.
    """

    def __init__(
        self, source: Source, recordings: tuple[str, ...], *, live: bool = False, timeout: float = SECONDS
    ) -> None:
        self.source = source
        self.live = live
        self.timeout = timeout
        self.too_slow = ""
        self.tried_shapes: set[object] = set()
        self._recordings = recordings

    @cached_property
    def loaded(self) -> VendorPlugin | PluginError:
        """The loaded plug-in, or the error from loading."""
        try:
            return VendorPlugin(self.source)
        except PluginError as error:
            return error

    @property
    def plugin(self) -> VendorPlugin:
        """The plug-in.

        Raises:
            NotApplicable: When it cannot be loaded, which other checks report.
        """
        if isinstance(self.loaded, PluginError):
            raise NotApplicable("the plug-in cannot be loaded; see C01, C03 and C05")
        return self.loaded

    @cached_property
    def sizes(self) -> dict[str, list[int]]:
        """The memory in bytes of each product by name; several products may have one name."""
        sizes: dict[str, list[int]] = {}
        for product in self.plugin.products():
            if product.memory_bytes:
                sizes.setdefault(product.name, []).append(product.memory_bytes)
        return sizes

    @cached_property
    def machines(self) -> tuple[TestedMachine, ...]:
        """The recorded machines."""
        return tuple(TestedMachine(self, path) for path in self._recordings)

    @cached_property
    def simulated(self) -> tuple[TestedMachine, ...]:
        """A machine for each product of the plug-in, with the largest count of devices."""
        machines = []
        for product in self.plugin.products():
            count = max(product.counts, default=1)
            machine = Machine(
                text=f"sim:{product.name}:{count}", products=(Simulated(product=product.name, count=count),)
            )
            machines.append(TestedMachine(self, machine=machine))
        return tuple(machines)


def payload(source: Source, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments common to all tasks of a vendor's process."""
    return {"load": {"source": encode(source), "path": sys.path}, "environ": dict(environ), "seconds": SECONDS}


def interpret_here(source: Source, machine: Machine, environ: Mapping[str, str]) -> tuple[VendorReport, list[Device]]:
    """Detect a machine in this process, with all checks and steps of the core; return the report and the devices."""
    answer = tasks.detect({**payload(source, environ), "machine": encode(machine)})
    return interpret(source, Outcome(value=answer))


class TimelessContext(ProbeContext):
    """A context with a constant time left, so that a busy machine does not change answers."""

    def remaining(self) -> float:
        """Return the full time limit."""
        return SECONDS


class TestedMachine:
    """A recorded, simulated or real machine for the plug-in under test.

    Args:
        subject: The plug-in.
        path: Directory of the recording.
        machine: A simulated machine instead.

    Attributes:
        machine: Source of the facts, as for a detection task.
        name: Name of the machine in reports.
    """

    __test__ = False  # the name begins with 'Test': pytest would collect it

    def __init__(self, subject: Subject, path: str = "", machine: Machine | None = None) -> None:
        self.subject = subject
        self.path = path
        self.machine = machine or Machine(text=path, recording=os.path.join(path, FILE_NAME))
        self.name = HOST if subject.live and path else os.path.basename(path) or self.machine.text

    @property
    def product(self) -> str | None:
        """Name of the simulated product; None for a recorded machine."""
        return self.machine.products[0].product if self.machine.products else None

    @property
    def facts(self) -> Facts:
        """The facts of the machine and environment variables: of this host if live, otherwise of the recording."""
        return HostFacts(os.environ) if self.subject.live else RecordedFacts(self.recording)

    @cached_property
    def recording(self) -> dict[str, Any]:
        """The content of ``machine.json``; of a simulated machine, a recording of nothing."""
        if not self.path:
            return {"schema": SCHEMA}
        return load(os.path.join(self.path, FILE_NAME))

    def context(self, facts: Facts | None = None) -> ProbeContext:
        """Return a context for a hook: on `facts` if given, on this host if live, otherwise on the recording."""
        if facts is None and self.subject.live:
            return ProbeContext(HostFacts(os.environ), time.monotonic() + SECONDS)
        return TimelessContext(facts or RecordedFacts(self.recording), time.monotonic() + SECONDS)

    def replay(self, environ: Mapping[str, str] | None = None) -> ProbeContext:
        """Return a context that replays the recording, also if live."""
        return self.context(RecordedFacts(self.recording, environ))

    def call(self, hook: str, **makers: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function calling a hook with fresh arguments.

        Args:
            hook: Name of the hook without ``anyaccel_``.
            makers: By name of the argument, a function that makes the argument for each call.
        """
        plugin = self.subject.plugin
        return lambda: getattr(plugin, hook)(*(makers[each]() for each in plugin.arguments(hook)))

    @cached_property
    def interpreted(self) -> tuple[VendorReport, list[Device]]:
        """The vendor's report and the devices, after all checks and steps of the core."""
        # A recording brings its own environment; a mask of the author's shell must not hide its devices.
        return interpret_here(self.subject.source, self.machine, os.environ if self.subject.live else {})

    @property
    def problem(self) -> Problem | None:
        """The problem of a hook between detection and the inventory; None if there is none."""
        problem = self.interpreted[0].problem
        return None if problem is not None and problem.hook == "anyaccel_env" else problem  # see C16 to C18

    @property
    def detected(self) -> Detected | None:
        """The detected devices after all steps of the core; None when the vendor is absent.

        Raises:
            NotApplicable: When detection fails, which other checks report.
        """
        self.subject.plugin  # noqa: B018 - raises NotApplicable if it cannot be loaded
        if self.problem is not None:
            raise NotApplicable("detection fails here; see C07, C09 and C15")
        report, devices = self.interpreted
        return Detected(devices=tuple(devices), partial=report.partial) if report.state is VendorState.OK else None

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices by index; empty when there are none."""
        found = self.detected
        return tuple(sorted(found.devices, key=lambda device: device.index)) if found else ()

    @cached_property
    def first_of_shape(self) -> bool:
        """Whether no machine of this shape was tried before in this process.

        Machines of one shape differ in names and sizes, on which neither the form of a mask nor the choice of devices
        depends. So each set of devices is tried on one product of a shape, and what names no device on one machine.
        """
        shape = tuple(
            (device.slots, device.fractional, device.parent is None, len(device.links), tuple(device.attributes))
            for device in self.devices
        )
        new = shape not in self.subject.tried_shapes
        self.subject.tried_shapes.add(shape)
        return new

    @property
    def known_devices(self) -> tuple[Device, ...]:
        """The devices; empty also when detection fails, which other checks report."""
        try:
            return self.devices
        except NotApplicable:
            return ()
