"""A plug-in under test, in the process that tests it, and the machines that it is tested on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.inventory import interpret
from anyaccel.model import Detected, Device, Problem, VendorReport, VendorState, encode
from anyaccel.probe import FILE_NAME, SCHEMA, Facts, HostFacts, Machine, ProbeContext, RecordedFacts, Simulated, load
from anyaccel.vendors import Outcome, Source, VendorPlugin, tasks

from anyaccel_testing.check import NotApplicable

SECONDS = 10.0
"""Time for one detection, as users give it."""
PRODUCTS = "products"
"""Name under which the simulated machines are reported."""
LIVE = "live.json"
"""Beside the recording of this host: what was detected on the host itself."""
HOST = "host"
"""Name under which this host is reported."""


class Subject:
    """A plug-in under test.

    Args:
        source: Where it comes from.
        recordings: Directories of recorded machines.
        live: Whether the recordings are of this host, just made, so that detection may be tried on it as well.
        timeout: Seconds that a hook may take that touches the machine.

    Attributes:
        too_slow: The machine on which a hook has taken longer; empty while none has.
        tried_sizes: Numbers of devices of the simulated machines on which every odd value was tried.
    """

    def __init__(
        self, source: Source, recordings: tuple[str, ...], *, live: bool = False, timeout: float = SECONDS
    ) -> None:
        self.source = source
        self.live = live
        self.timeout = timeout
        self.too_slow = ""
        self.tried_sizes: set[int] = set()
        self._recordings = recordings

    @cached_property
    def loaded(self) -> VendorPlugin | PluginError:
        """The plug-in, or why it cannot be loaded."""
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
    def machines(self) -> tuple[TestedMachine, ...]:
        """The recorded machines."""
        return tuple(TestedMachine(self, path) for path in self._recordings)

    def simulated(self) -> Iterator[TestedMachine]:
        """One machine for each product that the plug-in knows, as large as they come."""
        for product in self.plugin.products():
            count = max(product.counts, default=1)
            machine = Machine(
                text=f"sim:{product.name}:{count}", products=(Simulated(product=product.name, count=count),)
            )
            yield TestedMachine(self, machine=machine)


def payload(source: Source, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what a task of a vendor's process is told in any case."""
    return {"load": {"source": encode(source), "path": sys.path}, "environ": dict(environ), "seconds": SECONDS}


def interpret_here(source: Source, machine: Machine, environ: Mapping[str, str]) -> tuple[VendorReport, list[Device]]:
    """Detect a machine in this process; return the vendor's report and its devices, as users get them."""
    answer = tasks.detect({**payload(source, environ), "machine": encode(machine)})
    return interpret(source, Outcome(value=answer))


class TimelessContext(ProbeContext):
    """A context on which no time passes, so that no answer depends on how busy the testing machine is."""

    def remaining(self) -> float:
        """Seconds left: always the same."""
        return SECONDS


class TestedMachine:
    """A machine that a plug-in is tested on.

    Args:
        subject: The plug-in.
        path: Directory of the recording.
        machine: A simulated machine instead.

    Attributes:
        machine: Where its facts come from.
        name: What reports call it.
    """

    __test__ = False

    def __init__(self, subject: Subject, path: str = "", machine: Machine | None = None) -> None:
        self.subject = subject
        self.path = path
        self.machine = machine or Machine(text=path, recording=os.path.join(path, FILE_NAME))
        self.name = HOST if subject.live and path else os.path.basename(path) or self.machine.text

    @property
    def product(self) -> str | None:
        """Name of the product that the machine simulates; None when it is recorded."""
        return self.machine.products[0].product if self.machine.products else None

    @property
    def facts(self) -> Facts:
        """What shows the machine, as users see it: this host itself when it is the one, or the recording."""
        return HostFacts(os.environ) if self.subject.live else RecordedFacts(self.recording)

    @cached_property
    def recording(self) -> dict[str, Any]:
        """The content of ``machine.json``; of a simulated machine, a recording of nothing."""
        if not self.path:
            return {"schema": SCHEMA}
        return load(os.path.join(self.path, FILE_NAME))

    def context(self, facts: Facts | None = None) -> ProbeContext:
        """Show the machine to a hook: this host itself when it is the one, a replay otherwise, or other facts."""
        if facts is None and self.subject.live:
            return ProbeContext(HostFacts(os.environ), time.monotonic() + SECONDS)
        return TimelessContext(facts or RecordedFacts(self.recording), time.monotonic() + SECONDS)

    def replay(self, environ: Mapping[str, str] | None = None) -> ProbeContext:
        """Show the recording to a hook."""
        return self.context(RecordedFacts(self.recording, environ))

    def call(self, hook: str, **told: Callable[[], Any]) -> Callable[[], Any]:
        """What calls a hook.

        Args:
            hook: Its name, without ``anyaccel_``.
            told: By the names of arguments, what makes them at each call.
        """
        plugin = self.subject.plugin
        return lambda: getattr(plugin, hook)(*(told[each]() for each in plugin.arguments(hook)))

    @cached_property
    def interpreted(self) -> tuple[VendorReport, list[Device]]:
        """The vendor's report and its devices, as users get them."""
        return interpret_here(self.subject.source, self.machine, os.environ if self.subject.live else {})

    @property
    def problem(self) -> Problem | None:
        """Why nothing can be said about the devices: a hook's fault between detection and the inventory."""
        problem = self.interpreted[0].problem
        return None if problem is not None and problem.hook == "anyaccel_env" else problem  # C16 to C18 say it better

    @property
    def detected(self) -> Detected | None:
        """What is found on the machine, completed as for users; None when the vendor is absent.

        Raises:
            NotApplicable: When detection fails, which other checks report.
        """
        if not isinstance(self.subject.loaded, VendorPlugin):
            raise NotApplicable("the plug-in cannot be loaded; see C01, C03 and C05")
        if self.problem is not None:
            raise NotApplicable("detection fails here; see C07, C09 and C15")
        report, devices = self.interpreted
        return Detected(devices=tuple(devices), partial=report.partial) if report.state is VendorState.OK else None

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order of their indexes; empty when there are none."""
        found = self.detected
        return tuple(sorted(found.devices, key=lambda device: device.index)) if found else ()

    @property
    def known_devices(self) -> tuple[Device, ...]:
        """The devices; nothing where detection fails, too, which other checks report."""
        try:
            return self.devices
        except NotApplicable:
            return ()
