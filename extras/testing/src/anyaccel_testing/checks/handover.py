"""C30: devices are changed for a holder through ctx alone, and each call of the hook sets their whole state.

The hook is rehearsed: on the facts of a recording, with commands that are not run and files that are not written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyaccel.errors import PluginError
from anyaccel.model import Device
from anyaccel.plugin import CommandResult
from anyaccel.probe import ProbeContext, RecordedFacts
from anyaccel.vendors import VendorPlugin

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.checks.observation import limit_time
from anyaccel_testing.subject import Subject, TestedMachine
from anyaccel_testing.watch import Watch

HOOK = "anyaccel_handover"
MOST_DEVICES = 8


class _RehearsedFacts(RecordedFacts):
    """Facts of a recording on which each command succeeds, and a written file has its new content.

    Attributes:
        commands: The commands that the recording does not have, in their order.
        written: The contents of written files, by path.
    """

    def __init__(self, recording: Mapping[str, Any]) -> None:
        super().__init__(recording)
        self.commands: list[str] = []
        self.written: dict[str, str] = {}

    def read(self, path: str) -> str | None:
        return self.written[path] if path in self.written else super().read(path)

    def write(self, path: str, text: str) -> None:
        self.written[path] = text

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        found = super().run(argv, timeout)
        if found is not None:  # the tool was asked a question
            return found
        self.commands.append(" ".join(argv))
        return CommandResult(returncode=0, stdout="")


def check_handover(subject: Subject, machine: TestedMachine) -> None:
    """C30: Handover acts through ctx alone, and each call sets the whole state of the devices."""
    devices = machine.known_devices[:MOST_DEVICES]
    if not devices:
        raise NotApplicable("there are no devices to hand over")
    plugin, fresh = subject.plugin, _load_again(subject)
    watch = Watch(subject.source)
    for chosen in (*((device,) for device in devices), devices):
        facts = _RehearsedFacts(machine.recording)
        with limit_time(subject, machine, HOOK), watch:
            _call(plugin, chosen, facts, given=False)
            idle = dict(facts.written)
            asked = len(facts.commands)
            _call(plugin, chosen, facts, given=True)
            given = facts.commands[asked:]
            asked = len(facts.commands)
            # By a plug-in that has seen no other call, as after the end of the first one's process.
            _call(fresh, chosen, facts, given=False)
        if watch.events:
            raise CheckFailed(f"{HOOK} {watch.events[0]} by itself: act through ctx.run and ctx.write alone")
        undone = facts.commands[asked:]
        demand(_find_kept(RecordedFacts(machine.recording), idle, facts.written, given, undone))


def _load_again(subject: Subject) -> VendorPlugin:
    """Return the plug-in with new modules, which keep nothing of former calls."""
    package = subject.source.target.partition(":")[0].partition(".")[0]
    own = [name for name in sys.modules if name.partition(".")[0] == package]
    kept = {name: sys.modules.pop(name) for name in own}
    try:
        return VendorPlugin(subject.source)
    finally:
        sys.modules.update(kept)


def _call(plugin: VendorPlugin, devices: Sequence[Device], facts: RecordedFacts, *, given: bool) -> None:
    ctx = ProbeContext(facts, time.monotonic() + 10)
    try:
        plugin.ask("handover", devices, ctx, given)
    except PluginError as error:
        raise CheckFailed(f"{HOOK} with given={given}: {error.problem.reason}") from error


def _find_kept(
    recorded: RecordedFacts, idle: Mapping[str, str], last: Mapping[str, str], given: list[str], undone: list[str]
) -> Iterator[str]:
    """Yield what a holder's devices keep after their last call.

    Args:
        recorded: The facts before all calls.
        idle: The files after the first call.
        last: The files after the last call.
        given: The commands of the call for the holder.
        undone: The commands of the last call.
    """
    for path, text in last.items():
        before = idle.get(path, recorded.read(path))
        if text != before:
            yield (
                f"{HOOK} leaves {text!r} in {path}, where the idle state has {before!r}: write the same value in each"
                " call with given=False, whatever was there before"
            )
    if given and not undone and last == idle:
        yield f"{HOOK} runs {given[0]!r} for a holder, and nothing with given=False that undoes it"
