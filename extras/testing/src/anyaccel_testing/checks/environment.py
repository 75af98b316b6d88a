"""C16 to C20: the environment of a worker shows exactly the worker's devices, and can be read back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal

from anyaccel.errors import PluginError
from anyaccel.model import (
    AGREEMENT,
    UNITS_PER_DEVICE,
    Device,
    EnvContext,
    EnvEdits,
    ProblemKind,
    Share,
    Term,
    format_slots,
    slots_by_id,
)

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.subject import Subject, TestedMachine

ALL_SUBSETS = 4
"""Largest number of devices of which every subset is tried."""
RANDOM_SUBSETS = 24
HALF = UNITS_PER_DEVICE // 2
MASKS: tuple[Literal["id", "index"], ...] = ("id", "index")
STALE = "anyaccel-conformance"
"""A value without meaning to any runtime, as left by an outer launcher; a hook must not read it."""

Devices = tuple[Device, ...]


def choose_subsets(devices: Devices) -> list[Devices]:
    """Choose sets of devices to try: every subset of a few devices, a fixed sample of many."""
    count = len(devices)
    if count <= ALL_SUBSETS:
        return [each for size in range(1, count + 1) for each in combinations(devices, size)]
    chosen: list[Devices] = [(device,) for device in (*devices[:4], devices[-1])]
    chosen += combinations(devices[:ALL_SUBSETS], 2)
    size = 2
    while size < count:  # neighbors: what torus and bus machines accept
        chosen += [devices[start : start + size] for start in (0, size, count - size)]
        size *= 2
    # Seeded by the count: a failure must come again in the next run.
    draw = random.Random(count)  # noqa: S311 - no secret
    for _ in range(RANDOM_SUBSETS):
        positions = sorted(draw.sample(range(count), draw.randint(1, count)))
        chosen.append(tuple(devices[position] for position in positions))
    return list({tuple(device.id for device in each): each for each in (*chosen, devices)}.values())


def list_accepted(subject: Subject, sets: Iterable[Devices]) -> Iterator[Devices]:
    """Yield the sets of devices that the plug-in's counts and its ``validate`` accept."""
    for chosen in sets:
        term = Term(names=(subject.plugin.info.resource,), units=len(chosen) * UNITS_PER_DEVICE)
        if _get_refusal(subject, term, chosen) is None:
            yield chosen


def list_launches(subject: Subject, machine: TestedMachine) -> Iterator[tuple[str, Devices, EnvContext]]:
    """Yield launches to try: a description, the devices, and the context for ``anyaccel_env``."""
    devices = machine.devices
    usable = tuple(device for device in devices if device.usable)
    new = machine.product is None or machine.first_of_shape
    sets = choose_subsets(usable) if new else [usable[:1], usable] if usable else []
    for chosen in list_accepted(subject, sets):
        shares = {device.id: Share(device=device, memory_bytes=device.memory_bytes) for device in chosen}
        for mask in MASKS:
            # An outer launcher may have set the variables: a hook that only adds to them would keep its mask.
            for environ in ({}, _make_stale(subject)):
                ctx = EnvContext(devices=devices, shares=shares, environ=environ, mask=mask)
                yield _format_launch(chosen, mask, environ), chosen, ctx
    for device in devices:
        term = Term(names=(subject.plugin.info.resource,), units=HALF)
        if device.usable and device.fractional and _get_refusal(subject, term, (device,)) is None:
            memory = device.memory_bytes // 2 if device.memory_bytes else None
            for slots in _list_halves(device):
                share = Share(
                    device=device,
                    units=HALF,
                    slots=slots,
                    memory_bytes=memory,
                    memory_by=AGREEMENT,
                    compute_by=AGREEMENT,
                )
                where = f" (slots {format_slots(slots)})" if slots else ""
                yield f"half of {device.id}{where}", (device,), EnvContext(devices=devices, shares={device.id: share})


def _list_halves(device: Device) -> list[tuple[int, ...]]:
    """List the slots of the first and the last half of a device; one empty tuple if shares have no position."""
    count = device.slots // 2
    return [tuple(range(start, start + count)) for start in sorted({0, device.slots - count})] if count else [()]


def _get_refusal(subject: Subject, term: Term, devices: Devices) -> str | None:
    try:
        return subject.plugin.validate(term, devices)
    except PluginError:
        return "see C21"


def _make_stale(subject: Subject) -> dict[str, str]:
    return dict.fromkeys(subject.plugin.info.env_vars, STALE)


def _format_launch(devices: Devices, mask: str, environ: Mapping[str, str]) -> str:
    ids = ", ".join(device.id for device in devices[:4]) + (", ..." if len(devices) > 4 else "")  # noqa: PLR2004
    over = " over an outer launcher's variables" if environ else ""
    return f"{ids} by {mask}{over}"


def apply_edits(edits: EnvEdits, environ: Mapping[str, str]) -> dict[str, str]:
    """Apply edits to an environment, like the launcher."""
    kept = {name: value for name, value in environ.items() if name not in edits.unset}
    return kept | dict(edits.set)


def check_env(subject: Subject, machine: TestedMachine) -> None:
    """C16: Each accepted set of usable devices and each share has an environment; other slots have another."""
    demand(_find_failures(subject, machine))


def _find_failures(subject: Subject, machine: TestedMachine) -> Iterator[str]:
    given: dict[tuple[str, str], str] = {}
    for said, devices, ctx in list_launches(subject, machine):
        try:
            first = subject.plugin.env(devices, ctx)
            # The same arguments twice: leases are compared with what env writes, also after a restart.
            if subject.plugin.env(devices, ctx) != first:
                yield f"anyaccel_env for {said} must be the same each time"
        except PluginError as error:
            if error.problem.kind is ProblemKind.RAISED:
                yield f"anyaccel_env for {said}: {error.problem.reason}; answer, or let anyaccel_validate refuse it"
            continue
        for share in ctx.shares.values():
            if share.slots and (other := given.setdefault((share.device.id, str(first.set)), said)) != said:
                yield f"anyaccel_env for {said} must differ from that for {other}; name Share.slots in the mask"


def check_hiding(subject: Subject, machine: TestedMachine) -> None:
    """C17: The environment for no device hides every device."""
    plugin, devices = subject.plugin, machine.devices
    if not plugin.info.maskable:
        raise NotApplicable("PluginInfo.maskable is False: its devices are open to all workers, and launches say so")
    if not plugin.info.env_vars:
        raise CheckFailed(
            "PluginInfo.env_vars must name the variable that hides the devices (got none); where the vendor's runtime"
            " has no such variable, say maskable=False (in the kit: mask = None)"
        )
    for environ in ({}, _make_stale(subject), _show_all(subject, devices)):
        for mask in MASKS:
            ctx = EnvContext(devices=devices, environ=environ, mask=mask)
            try:
                after = apply_edits(plugin.env((), ctx), environ)
            except PluginError as error:
                if error.problem.kind is ProblemKind.CONTRACT:
                    raise NotApplicable("what anyaccel_env returns breaks the contract; see C18") from error
                raise CheckFailed(f"anyaccel_env for no device: {error.problem.reason}") from error
            _demand_hidden(subject, devices, environ, after)


def _show_all(subject: Subject, devices: Devices) -> dict[str, str]:
    """Return an environment with every device visible."""
    try:
        return apply_edits(subject.plugin.env(devices, EnvContext(devices=devices)), {})
    except PluginError:
        return {}


def _demand_hidden(subject: Subject, devices: Devices, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    if not subject.plugin.implements("anyaccel_visible"):
        if devices and not before and not after:
            raise CheckFailed("anyaccel_env for no device must set a variable that hides all (got no edit)")
        return
    try:
        ids = slots_by_id(subject.plugin.visible(after, devices)[0])
    except PluginError as error:
        raise CheckFailed(
            f"anyaccel_visible refuses what anyaccel_env hides all with: {error.problem.reason}"
        ) from error
    if devices and (ids is None or ids):
        left = "all" if ids is None else ", ".join(ids)
        raise CheckFailed(
            f"anyaccel_env for no device must hide all of them (visible after {dict(after)!r:.100}: {left}); set the"
            " mask to what the runtime takes for none"
        )


def check_ownership(subject: Subject, machine: TestedMachine) -> None:
    """C18: The environment changes only variables of the plug-in."""
    demand(_find_foreign(subject, machine))


def _find_foreign(subject: Subject, machine: TestedMachine) -> Iterator[str]:
    nothing = ("no device", (), EnvContext(devices=machine.devices))
    for said, devices, ctx in (nothing, *list_launches(subject, machine)):
        try:
            subject.plugin.env(devices, ctx)
        except PluginError as error:
            if error.problem.kind is ProblemKind.CONTRACT:
                yield f"anyaccel_env for {said}: {error.problem.reason}"


def check_round_trip(subject: Subject, machine: TestedMachine) -> None:
    """C19: Visible reads back the devices and slots that env wrote, also over an outer launcher's variables."""
    if not subject.plugin.info.env_vars:
        raise NotApplicable("the vendor's runtime cannot be masked: PluginInfo.env_vars is empty")
    demand(_find_misread(subject, machine))


def _find_misread(subject: Subject, machine: TestedMachine) -> Iterator[str]:
    for said, devices, ctx in list_launches(subject, machine):
        wanted = [_format_part(device.id, ctx.shares[device.id].slots) for device in devices]
        for order in (devices, devices[::-1])[: len(devices)]:
            try:
                environ = apply_edits(subject.plugin.env(order, ctx), ctx.environ)
            except PluginError:
                continue  # C16 and C18 report it
            ids = _read_visible(subject, environ, machine.devices)
            # A runtime may number its devices in an order of its own; then the order asked for makes no difference.
            if ids not in (wanted, [_format_part(device.id, ctx.shares[device.id].slots) for device in order]):
                values = {name: value for name, value in environ.items() if value != STALE}
                yield f"anyaccel_visible of {values!r:.120} must be {said} (got {ids})"


def _format_part(device_id: str, slots: tuple[int, ...]) -> str:
    """Format a device id, with the slots of a share if the share has a position."""
    return f"{device_id} slots {format_slots(slots)}" if slots else device_id


def _read_visible(subject: Subject, environ: Mapping[str, str], devices: Devices) -> Sequence[str]:
    try:
        ids = slots_by_id(subject.plugin.visible(environ, devices)[0])
    except PluginError as error:
        return error.problem.reason
    if ids is None:  # no mask is set, so the runtime sees every device
        return [device.id for device in devices]
    return [_format_part(*part) for part in ids.items()]


def check_odd_values(subject: Subject, machine: TestedMachine) -> None:
    """C20: For any value of a variable, visible returns ids or raises a ValueError with the variable's name."""
    demand(_find_unexpected(subject, machine))


WORDS = (
    *("", " ", ",", ",,", " , ", "0", "00", "-1", "+1", "1.0", "0x0", "0-1", "1-0", "0-", "-", "0:0", "0;1", "0 1"),
    *("99999", "9" * 400, "none", "NoDevFiles", "all", "void", "True", "*", "null", "{}", "[0]", "'0'", '"0"'),
    *("é", "٣", "\uff10", "²", "\U0001f600", "\x7f", "0\n1", "\t0", "%s", "a" * 10_000, "0," * 4_000, "," * 10_000),
    *("0,junk", "junk,0", "0,,1", "0,0", "0, 1", " 0 ,1 "),
)
"""Values of masks seen on real machines, and values to break a parser."""


def list_odd_values(devices: Devices) -> list[str]:
    """List values of a mask with the ids and indexes of `devices`: valid, cut, repeated and mixed."""
    ids = [device.id for device in devices]
    cut = [value[:-1] for value in ids[:2]]
    numbers = [str(device.index) for device in devices]
    lists = [",".join(each) for each in (ids, ids[::-1], numbers, numbers[::-1], ids[:1] * 2, numbers[:1] * 2)]
    return [
        *(*ids[:2], *cut, *lists),
        *([f" {ids[0]} ", f"{ids[0]},junk", f"{ids[0]},{numbers[0]}", ids[0].upper(), ids[0].lower()] if ids else []),
    ]


def _find_unexpected(subject: Subject, machine: TestedMachine) -> Iterator[str]:
    devices = machine.devices
    names = subject.plugin.info.env_vars
    new = machine.first_of_shape
    if machine.product is not None and not new:
        return
    values = dict.fromkeys((*(WORDS if new else ()), *list_odd_values(devices)))
    shown = _show_all(subject, devices)
    for name in names:
        # Beside the vendor's other variables as well, where it has set any.
        for base in ({}, shown) if shown.keys() - {name} else ({},):
            # One value stands for all where visible does not look at the variable.
            for value in values if _is_read(subject, name, base, devices) else ("0",):
                reason = _find_fault(subject, {**base, name: value}, devices)
                if reason:
                    yield f"anyaccel_visible with {name}={value!r:.60}: {reason}"


class _Watched(Mapping[str, str]):
    """Variables; notes the names that are looked up."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.read: set[str] = set()
        self._variables = variables

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._variables)
        return iter(self._variables)

    def __len__(self) -> int:
        self.read.update(self._variables)
        return len(self._variables)


def _is_read(subject: Subject, name: str, base: Mapping[str, str], devices: Devices) -> bool:
    """Return False if the answer of visible cannot depend on a variable: it ends without looking the variable up."""
    environ = _Watched({**base, name: "0"})
    try:
        subject.plugin.visible(environ, devices)
    except PluginError:
        return True  # also for a hook that expects more of the mapping, such as '|' of a dict
    return name in environ.read


def _find_fault(subject: Subject, environ: Mapping[str, str], devices: Devices) -> str:
    try:
        subject.plugin.visible(environ, devices)
    except PluginError as error:
        cause = error.__cause__  # the exception of the hook itself
        if error.problem.kind is ProblemKind.CONTRACT:
            return error.problem.reason
        # UnicodeError is a ValueError, but raised by a codec: its text says nothing about the variable.
        if not isinstance(cause, ValueError) or isinstance(cause, UnicodeError):
            return f"{error.problem.reason}; return ids, or raise ValueError with one sentence"
        if not any(name in str(cause) for name in environ):
            return f"the ValueError must name the variable (got {str(cause)!r:.80})"
    return ""
