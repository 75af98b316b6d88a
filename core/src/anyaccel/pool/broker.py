"""Who waits for devices in this process, who holds some, and which idle processes do: one queue for all pools.

Calls are served in the order of arrival among those that compete for a device or for room in their pool. Only here the
ledger is asked. Of those that compete, the first alone stands in the machine's line: a thousand calls are one ticket.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial, reduce

from anyaccel.errors import (
    AnyaccelError,
    DevicesBusyError,
    LeaseCancelledError,
    LedgerError,
    NeverFitsError,
    StateDirectoryError,
)
from anyaccel.inventory.current import LEASE_VARIABLE
from anyaccel.inventory.detect import detect
from anyaccel.launcher.choosing import KnownNames, local_scheduler, validate
from anyaccel.launcher.hold import Scope, why
from anyaccel.launcher.usage import Usage
from anyaccel.launcher.use import in_use
from anyaccel.ledger import Ledger, Want
from anyaccel.ledger import mark as marks
from anyaccel.model import ANY_SLOTS, NOTHING, Allocation, Extent, Grant, Inventory, Request
from anyaccel.pool.call import Call, Options
from anyaccel.pool.process import Held, Owner, WorkerProcess
from anyaccel.pool.reactor import Timer, reactor
from anyaccel.probe.machine import Machine, parse_machine
from anyaccel.scheduler import Choice, Verdict

LOOK_SECONDS = 0.05
"""How often to look whether another process waits for what idle processes of ours hold."""
OWN_SECONDS = 0.01
"""How long to wait for what this process holds itself before standing in the machine's line for it."""
PROCESSORS = len(os.sched_getaffinity(0))
"""Processors that this process may use: as many calls as that can run at once without devices."""
MOST_ASKED = 256
PRIVATE = "anyaccel-private-"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - what is made there has mode 0700

ChoiceOf = Callable[[Request], Choice]


class Asked:
    """What a request means on this machine.

    Attributes:
        request: The request.
        nothing: Whether no device can ever serve it, and it takes the CPU instead.
        ids: Ids of the devices that could serve it, and of their parts: two requests compete where these meet.
        want: What to ask the ledger for.
    """

    def __init__(self, broker: Broker, request: Request, *, confined: bool) -> None:
        choice = broker.choice(request)
        self.request = choice.request
        self._choice = choice
        self._chosen: tuple[Mapping[str, Extent], tuple[Grant, ...] | None] = ({}, choice.choose({}))
        self.nothing = self._chosen[1] is None
        if self.nothing:
            broker.check(request)
        candidates = () if self.nothing else choice.candidates
        wanted = frozenset(device.id for device in candidates)
        self.ids = broker.scope.with_parts(wanted)
        self.want: Want = broker.scope.want(
            wanted,
            choice.needs,
            device_locks={} if broker.private else broker.scope.device_locks(broker.inventory, candidates),
            request=str(self.request),
            confined=confined,
            mark=marks.draw_often,
        )

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """Choose among what is left, or None; what was chosen last is chosen again as long as the same is taken."""
        before, grants = self._chosen
        if before != taken:
            grants = self._choice.choose(taken)
            self._chosen = dict(taken), grants
        return grants


class Line:
    """Calls of one pool and one kind that wait, in order.

    Attributes:
        key: What calls have in common that wait in it.
        owner: The pool.
        options: How they are to be run.
        asked: What their request means; None where they need no device.
        why: Says what they wait for; None where they need no device.
        actor: Whether they make actors.
        calls: The calls, of which some may have been cancelled.
        trying: Whether somebody asks the ledger for the first one just now.
        standing: Whether a thread stands in the machine's line for the first one.
        refused: The count of changes at which there was nothing for it.
        others: What other processes held then, by name in the ledger.
        freed: What this process has given back since, likewise.
        granted: Whether there are devices for the first one, which it is about to get.
    """

    __slots__ = (
        "actor", "asked", "calls", "cancel", "freed", "granted", "key", "options", "others", "owner", "refused",
        "standing", "timer", "trying", "why",
    )  # fmt: skip

    def __init__(
        self,
        key: object,
        owner: Owner,
        options: Options,
        asked: Asked | None,
        why: Callable[[], Verdict] | None,
        *,
        actor: bool,
    ) -> None:
        self.key = key
        self.why = why
        self.owner = owner
        self.options = options
        self.asked = asked
        self.actor = actor
        self.calls: deque[Call] = deque()
        self.trying = False
        self.standing = False
        self.refused = -1
        self.others: dict[str, Extent] = {}
        self.freed: dict[str, Extent] = {}
        self.granted = False
        self.timer: Timer | None = None
        self.cancel: int | None = None

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the devices for which its calls compete."""
        return frozenset() if self.asked is None else self.asked.ids

    @property
    def admitted(self) -> bool:
        """Whether room in the pool is kept for the first one, which waits for its devices."""
        return self.trying or self.standing or self.timer is not None

    def head(self) -> Call | None:
        """The first one that is still wanted."""
        calls = self.calls
        while calls and not calls[0].undecided():  # cancelled
            calls.popleft()
        return calls[0] if calls else None


class Broker:
    """The devices of one machine, for all pools of this process. Every method may be called by any thread.

    No lock is held while devices are chosen, asked for or given back, nor while a process is started.

    Args:
        inventory: The machine.
        shared: Whether leases are seen by every process on the machine. Else they are kept in a directory of our own.
        choice: Makes what chooses devices for a request; None for any that serve it.
        note: What leases say beside the name of their call.

    Attributes:
        inventory: The machine.
        private: Whether nobody else sees the leases.
        scope: Under which names the ledger counts the devices.

    Raises:
        StateDirectoryError: When there is no state directory that can be trusted.
    """

    def __init__(
        self, inventory: Inventory, *, shared: bool = True, choice: ChoiceOf | None = None, note: str = ""
    ) -> None:
        self.inventory = inventory
        self.private = not shared
        self._environ = dict(os.environ)
        if self.private:
            path = _private_directory()  # which the ledger must not lock
            self._environ["ANYACCEL_STATE_DIR"] = os.path.join(path, "leases")
            weakref.finalize(self, _forsake, path).atexit = False
        self.ledger = Ledger.open(self._environ)
        self.scope = Scope.of(inventory, self._environ)
        used = in_use()
        self._used = None if used is None else used.lease
        self._choice = choice
        self._note = note
        self._lock = lock()
        self._lines: dict[object, Line] = {}
        self._idle: list[WorkerProcess] = []
        self._asked: dict[object, Asked] = {}
        self._own: dict[str, list[Extent]] = {}
        self._changes = 0
        self._looking = False
        self._looked = float("-inf")
        self._elsewhere: frozenset[str] = frozenset()
        self._patience = 1

    def choice(self, request: Request) -> Choice:
        """What chooses devices for a request.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        if self._choice is not None:
            return self._choice(request)
        return Choice(self.inventory, request, validate, KnownNames())

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When there are not such devices, or not so many.
        """
        verdict = local_scheduler(self.inventory).why(request)
        if not (verdict.ever_fits or verdict.cpu):
            raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)

    # Waiting

    def enter(self, owner: Owner, call: Call) -> WorkerProcess | None:
        """Give a call to an idle process of its kind, or let it wait.

        Returns:
            The process, which is to run it; None when it waits, or has found devices and runs already.

        Raises:
            UnknownNameError, NeverFitsError: When its request can never be served.
            RuntimeError: When the pool takes no more calls.
        """
        asked = self._asked_for(call.options, confined=owner.confined)
        key = _key(owner, call)
        with self._lock:
            owner.check_open()
            line = self._lines.get(key)
            if line is None:
                member = self._take_idle(owner, call.options.alike)
                if member is not None:
                    member.call = call
                    return member
                line = self._line(key, owner, call, asked)
            crowded = line.head() is not None  # then there is nothing for this one either
            line.calls.append(call)
            call.waits = line.why
        if not crowded:
            self.serve()
        return None

    def put_back(self, owner: Owner, calls: list[Call]) -> None:
        """Let calls of one kind wait again, in front of their like."""
        if not calls:
            return
        asked = self._asked_for(calls[0].options, confined=owner.confined)
        with self._lock:
            line = self._line(_key(owner, calls[0]), owner, calls[0], asked)
            line.calls.extendleft(reversed(calls))
            for call in calls:
                call.waits = line.why

    def forget(self, owner: Owner, call: Call) -> None:
        """A call was cancelled: if it was the last of its line, nobody waits there any more."""
        with self._lock:
            line = self._lines.get(_key(owner, call))
            if line is not None and line.head() is None:
                self._drop(line)

    def waiting(self, owner: Owner) -> list[Call]:
        """The calls of a pool that wait; called with the lock held."""
        lines = [line for line in self._lines.values() if line.owner is owner]
        return [call for line in lines for call in line.calls if not call.future.done()]

    def next_for(self, member: WorkerProcess, *, ahead: bool) -> Call | None:
        """Give a process the next call of its kind that waits, if it takes that and it would overtake nobody.

        Args:
            member: The process.
            ahead: Whether the call is to stand behind one that the process runs.
        """
        key = (id(member.owner), member.options.alike, False)
        if key not in self._lines or (member.held is not None and not member.ids.isdisjoint(self._wanted_elsewhere())):
            return None
        with self._lock:
            line = self._lines.get(key)
            call = None if line is None or not member.owner.feeds else line.head()
            if line is None or call is None or not member.takes(call, ahead=ahead) or self._overtakes(line):
                return None
            self._pop(line)
            member.add(call)
        return call

    def serve(self) -> None:
        """Start whatever can be started now."""
        while self._lines:
            with self._lock:
                step = self._next()
            if step is None:
                return
            step()

    def _next(self) -> Callable[[], object] | None:
        """The next thing to do; called with the lock held, done without it."""
        wanted: frozenset[str] = frozenset()
        crowded: set[Owner] = set()
        for line in self._ordered():
            owner, call = line.owner, line.calls[0]
            idle = None if self._overtakes(line) else self._take_idle(owner, line.options.alike)
            if idle is not None:
                idle.call = self._pop(line)
                return partial(idle.run, call)
            if not self._has_room(line):
                if owner not in crowded and (useless := self._evictable(line)) is not None:
                    return useless.finish
                crowded.add(owner)
                continue
            if owner in crowded and owner.setting.max_workers is not None:
                continue
            if line.asked is None:
                return partial(owner.join(self._pop(line), None).launch, call)
            if line.asked.nothing:
                held = Held(Allocation(id="", request=line.asked.request, grants=()), None, lambda _: None)
                return partial(owner.join(self._pop(line), held).launch, call)
            blocked = not line.ids.isdisjoint(wanted)
            wanted |= line.ids
            if not (blocked or line.trying or line.standing or line.refused == self._changes):
                line.trying = True
                return partial(self._try, line, line.asked, self._changes)
        return None

    def _has_room(self, line: Line) -> bool:
        """Whether the pool of a line may have one more process for it; called with the lock held."""
        owner = line.owner
        if owner.setting.max_workers is not None:
            others = (other for other in self._lines.values() if other.owner is owner and other is not line)
            return len(owner.members) + sum(other.admitted for other in others) < owner.setting.max_workers
        if line.asked is not None or line.actor:
            return True
        return sum(member.busies_processor for member in owner.members) < PROCESSORS

    def _overtakes(self, line: Line) -> bool:
        """Whether a call of another line comes before and competes for the same; called with the lock held."""
        if len(self._lines) == 1:
            return False
        number = line.calls[0].number
        for other in self._lines.values():
            first = other.head() if other is not line else None
            if first is None or first.number > number:
                continue
            roomy = self._has_room(other)
            alike = line.owner.setting.max_workers is not None or (line.asked is None and other.asked is None)
            if (not roomy and other.owner is line.owner and alike) or (roomy and not other.ids.isdisjoint(line.ids)):
                return True
        return False

    def _ordered(self) -> Iterator[Line]:
        """Lines in which somebody waits, by the arrival of their first; called with the lock held."""
        lines = [line for line in self._lines.values() if line.head() is not None]
        return iter(sorted(lines, key=lambda line: line.calls[0].number) if len(lines) > 1 else lines)

    def _line(self, key: object, owner: Owner, call: Call, asked: Asked | None) -> Line:
        """The line of calls that are alike; called with the lock held."""
        line = self._lines.get(key)
        if line is None:
            why = None if asked is None else partial(self._why, asked.request)
            line = self._lines[key] = Line(key, owner, call.options, asked, why, actor=call.actor is not None)
        return line

    def _pop(self, line: Line) -> Call:
        """Take the first call out, which is there; called with the lock held."""
        call = line.calls.popleft()
        call.waits = None
        if line.head() is None:
            self._drop(line)
        elif line.cancel is not None and self._overtakes(line):  # the place was that of the one before
            os.eventfd_write(line.cancel, 1)
        return call

    def _drop(self, line: Line) -> None:
        """Forget an empty line; called with the lock held."""
        if self._lines.get(line.key) is line:
            del self._lines[line.key]
        if line.timer is not None:
            line.timer.cancel()
            line.timer = None
        if line.cancel is not None:
            os.eventfd_write(line.cancel, 1)

    def _why(self, request: Request) -> Verdict:
        return why(request, inventory=self.inventory, environ=self._environ)

    def _asked_for(self, options: Options, *, confined: bool) -> Asked | None:
        """What the request of some calls means; None where they have none."""
        if options.needs is None:
            return None
        found = self._asked.get((options.alike, confined))
        if found is None:
            if len(self._asked) >= MOST_ASKED:
                self._asked.clear()
            found = self._asked[options.alike, confined] = Asked(self, options.needs, confined=confined)
        return found

    # Devices

    def _try(self, line: Line, asked: Asked, changes: int) -> None:
        """Ask for devices for the first call of a line, without waiting for them."""
        found = None
        fits = asked.choose(self.scope.taken(self._held())) is not None  # else the ledger need not be asked
        try:
            found = self._acquire(line, asked, wait=0) if fits else None
        finally:
            with self._lock:
                line.trying = False
                if not isinstance(found, Held):
                    line.refused = changes
        if found is not None:
            self._hand_over(line, found)
            return
        self._make_way(line, asked)
        if fits:
            self._stand(line)
        else:  # an idle process of ours may take the call by then
            with self._lock:
                if line.timer is None and not line.standing and line.head() is not None:
                    line.timer = reactor().call_later(OWN_SECONDS, partial(self._stand, line))

    def _stand(self, line: Line) -> None:
        """Stand in the machine's line for the first call of a line, in a thread."""
        with self._lock:
            line.timer = None
            call = line.head()
            if line.standing or line.trying or call is None or line.asked is None:
                return
            line.standing = True
        try:
            line.cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            threading.Thread(target=self._wait, args=(line, line.asked), name="anyaccel lease", daemon=True).start()
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
            self._rise(line)
            self._hand_over(line, LedgerError(f"{line.asked.request} cannot wait for its devices: {error}"))

    def _wait(self, line: Line, asked: Asked) -> None:
        try:
            found = self._acquire(line, asked, wait=None)
        finally:
            self._rise(line)
        if found is None:
            self.serve()
        else:
            self._hand_over(line, found)

    def _rise(self, line: Line) -> None:
        with self._lock:
            line.standing = False
            cancel, line.cancel = line.cancel, None
        if cancel is not None:
            os.close(cancel)

    def _hand_over(self, line: Line, found: Held | AnyaccelError) -> None:
        """Give the first call of a line its devices, or tell it why there will be none."""
        member = None
        held = found if isinstance(found, Held) else None
        with self._lock:
            line.granted = False
            call = line.head()
            if call is not None and not (held is not None and self._overtakes(line)):
                self._pop(line)
                member = line.owner.join(call, held) if held is not None else None
        if call is not None and member is not None:
            member.launch(call)
        elif held is not None:
            held.release()
        elif call is not None and isinstance(found, AnyaccelError):
            call.fail(found)
            line.owner.settle()
            reactor().call_soon(self.serve)  # not from here: a thousand may follow
            return
        self.serve()

    def _acquire(self, line: Line, asked: Asked, *, wait: float | None) -> Held | AnyaccelError | None:
        """Get devices from the ledger for the first call of a line.

        Args:
            line: The line.
            asked: What is asked for.
            wait: 0, or None to wait for as long as it takes or until the line is dropped.

        Returns:
            The devices; why there will be none; or None when they are not free now, or nobody wants them any more.
        """
        chosen: tuple[Grant, ...] = ()

        def choose(taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
            nonlocal chosen
            left = self.scope.taken(taken)
            grants = asked.choose(left)
            if grants is None:
                # What we have given back since the last look may have been read before that. Where others have it by
                # now, the next look tells, which their taking it causes.
                own = self._held()
                freed, line.freed = line.freed, {}
                line.others = {
                    key: _without(extent, own.get(key, NOTHING).joined(freed.get(key, NOTHING)))
                    for key, extent in taken.items()
                }
                if wait is None and self._idle:
                    reactor().call_soon(partial(self._make_way, line, asked))
                return None
            chosen = grants
            return self.scope.to_ledger(grants)

        began = time.monotonic()
        with self._lock:
            call = line.head()
            line.freed, line.granted = {}, False
        if call is None:
            return None
        if self._used is not None and self._used.released:
            return LedgerError(
                "this process has given back what it used when this pool was made, and others may have it by now; use"
                " a pool inside of the 'with' statement of anyaccel.use(), or make a new one"
            )
        note, cancel = f"{call.name}{self._note}", None if wait is not None else line.cancel
        try:
            lease = self.ledger.acquire(asked.want, choose, wait=wait, note=note, cancel=cancel)
        except LeaseCancelledError:
            return None
        except AnyaccelError as error:
            return None if wait == 0 and isinstance(error, DevicesBusyError) else error
        allocation = Allocation(id=lease.id, request=asked.request, grants=chosen)
        with self._lock:
            line.granted = True  # as soon as we hold them, or idle processes might make way for it once more
            for key, extent in lease.devices.items():
                self._own.setdefault(key, []).append(extent)
        usage = None
        if not self.private:
            waited = time.monotonic() - began
            usage = Usage(allocation.id, allocation.shares, asked.want.request, note, waited=waited, added_up=True)
        return Held(allocation, lease, self._released, private=self.private, usage=usage)

    def _released(self, devices: Mapping[str, Extent]) -> None:
        """Count what was given back, and serve those who wait for it."""
        with self._lock:
            for key, extent in devices.items():
                self._own[key].remove(extent)
                for line in self._lines.values():
                    if line.trying or line.standing:
                        line.freed[key] = line.freed.get(key, NOTHING).joined(extent)
            self._changes += 1
        self.serve()

    def _held(self, but: Collection[WorkerProcess] = ()) -> dict[str, Extent]:
        """What this process holds, by key of the ledger, but for what some processes do."""
        with self._lock:
            own = {key: list(extents) for key, extents in self._own.items()}
            for member in but:
                for key, extent in ({} if member.held is None else member.held.devices).items():
                    own[key].remove(extent)
        return {key: reduce(Extent.joined, extents) for key, extents in own.items() if extents}

    # Idle processes

    def rest(self, member: WorkerProcess) -> None:
        """Keep an idle process for later calls, unless another process waits for its devices."""
        if member.held is not None and not member.ids.isdisjoint(self._wanted_elsewhere()):
            member.finish()
            return
        with self._lock:
            if member.ending:  # it has gone meanwhile
                return
            self._idle.append(member)
            if member.held is not None and not self._looking:
                self._looking = True
                self._look_later()
            rivals: list[Line] = []
            if member.held is not None and self._lines:
                rivals = [line for line in self._ordered() if line.asked is not None and self._has_room(line)]
        for line in rivals:
            if line.asked is not None and not line.ids.isdisjoint(member.ids):
                self._make_way(line, line.asked)
                break
        if self._lines:
            self.serve()

    def take_idle(self, owner: Owner, alike: int) -> WorkerProcess | None:
        """An idle process for calls of a kind: the one used last, so that the others get old enough to go."""
        with self._lock:
            return self._take_idle(owner, alike)

    @property
    def idles(self) -> bool:
        """Whether there are idle processes."""
        return bool(self._idle)

    def discard(self, member: WorkerProcess) -> None:
        """Forget an idle process that has gone; called with the lock held."""
        if member in self._idle:
            self._idle.remove(member)

    def _take_idle(self, owner: Owner, alike: int) -> WorkerProcess | None:
        for place in range(len(self._idle) - 1, -1, -1):
            member = self._idle[place]
            if member.owner is owner and member.options.alike == alike and not member.ending:
                return self._idle.pop(place)
        return None

    def _evictable(self, line: Line) -> WorkerProcess | None:
        """The idle process that is to end so that a line has room, unless one ends anyhow; taken out."""
        owner = line.owner
        if any(member.ending for member in owner.members):
            return None
        for member in self._idle:
            if member.owner is owner and (owner.setting.max_workers is not None or member.busies_processor):
                self._idle.remove(member)
                return member
        return None

    def _make_way(self, line: Line, asked: Asked) -> None:
        """End as many idle processes as a line needs the devices of, those first that were used longest ago."""
        near = self.scope.excluded_by(asked.ids)
        with self._lock:
            if line.granted or line.head() is None:
                return
            idle = [member for member in self._idle if not member.ids.isdisjoint(near)]
            peers = {peer for owner in {member.owner for member in idle} for peer in owner.members}
            ending = [peer for peer in peers if peer.ending and peer.held is not None]
        number = 0
        while number < len(idle):
            taken = dict(line.others)
            for key, extent in self._held([*ending, *idle[:number]]).items():
                taken[key] = taken.get(key, NOTHING).joined(extent)
            if asked.choose(self.scope.taken(taken)) is not None:
                break
            number += 1
        self._end(idle[:number])

    def _end(self, members: list[WorkerProcess]) -> None:
        with self._lock:
            members = [member for member in members if member in self._idle]
            for member in members:
                self._idle.remove(member)
                member.ending = True  # now: who makes way again, once the first has gone, ends no more
        for member in members:
            member.finish()

    def _look(self) -> None:
        """End processes that have been idle for too long, or whose devices other processes wait for."""
        now = time.monotonic()
        elsewhere = self._wanted_elsewhere()
        with self._lock:
            holders = [member for member in self._idle if member.held is not None]
            unused = [member for member in holders if member.heard + member.owner.setting.idle <= now]
            wanted = [member for member in holders if not member.ids.isdisjoint(elsewhere)]
            # One by one at first: nobody knows how many of them the others need.
            self._patience = 2 * self._patience if wanted else 1
            unused += [member for member in wanted[: self._patience // 2] if member not in unused]
        self._end(unused)
        with self._lock:
            self._looking = any(member.held is not None for member in self._idle)
            if self._looking:
                self._look_later()

    def _look_later(self) -> None:
        """Come back when the first idle process gets too old, and as often as others have to be asked."""
        when = min(member.heard + member.owner.setting.idle for member in self._idle if member.held is not None)
        reactor().call_at(when if self.private else min(when, time.monotonic() + LOOK_SECONDS), self._look)

    def _wanted_elsewhere(self) -> frozenset[str]:
        """Devices, with those that they are parts of and their parts, for which other processes wait; of late."""
        if not self.private and (now := time.monotonic()) - self._looked > LOOK_SECONDS:
            self._looked = now
            ids = self.scope.ids
            keys: frozenset[str] = frozenset()
            with contextlib.suppress(AnyaccelError):  # whoever asks for devices is told
                keys = self.ledger.wanted(frozenset(ids))
            self._elsewhere = self.scope.excluded_by(ids[key] for key in keys) if keys else frozenset()
        return self._elsewhere


def _key(owner: Owner, call: Call) -> tuple[int, int, bool]:
    return id(owner), call.options.alike, call.actor is not None


def _without(extent: Extent, own: Extent) -> Extent:
    """What others hold of a device, given what all do and what we do."""
    units = max(0, extent.units - own.units)
    return Extent(units, (extent.slots & ~own.slots) or (ANY_SLOTS if units else 0), extent.divided and not own.divided)


_known: weakref.WeakValueDictionary[object, Broker] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_lock = threading.Lock()


def lock() -> threading.Lock:
    """The lock of all pools of this process: held over looks at who waits and who runs, never over what takes time."""
    return _lock


def broker_of(machine: str | Machine | None, declare: Mapping[str, int] | None, *, shared: bool) -> Broker:
    """The broker of a machine: the same for all pools that live at the same time, and inside of the same lease.

    Args:
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name.
        shared: Whether leases are seen by every process on the machine, or by this one alone.

    Raises:
        MachineError: When it names no machine.
        StateDirectoryError: When leases are to be shared, and there is no directory for them that can be trusted.
    """
    where = parse_machine(machine)
    around = os.environ.get("ANYACCEL_STATE_DIR"), os.environ.get(LEASE_VARIABLE)
    key = (where.text, tuple(sorted((declare or {}).items())), shared, *around)
    with _opening:
        found = _known.get(key)
        if found is None:
            found = _known[key] = Broker(detect(where, declare=declare), shared=shared)
        return found


_private: dict[str, int] = {}
"""Our private directories, with descriptors that lock them."""


def _private_directory() -> str:
    """Make a state directory for this process alone; removes those of processes that have gone.

    Raises:
        StateDirectoryError: When there is no place for it.
    """
    import tempfile

    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    try:
        for name in os.listdir(base):
            if name.startswith(PRIVATE) and (path := os.path.join(base, name)) not in _private:
                with contextlib.suppress(OSError):
                    _remove(path, _locked(path, wait=False))
        while True:
            path = tempfile.mkdtemp(prefix=PRIVATE, dir=base)
            descriptor = _locked(path, wait=True)
            if os.fstat(descriptor).st_nlink:  # else somebody was quicker, who took it for a leftover
                _private[path] = descriptor
                return path
            os.close(descriptor)
    except OSError as error:
        raise StateDirectoryError(f"no directory for leases can be made in {base}: {error.strerror}") from error


def _locked(path: str, *, wait: bool) -> int:
    """Lock a private directory as long as the descriptor is open, which is as long as its process lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: str, descriptor: int) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _forsake(path: str) -> None:
    """Remove a private directory, of which the broker has gone."""
    if (descriptor := _private.pop(path, None)) is not None:
        _remove(path, descriptor)


@atexit.register  # after the pools have ended, which say so later
def _forsake_all() -> None:
    for path in list(_private):
        _forsake(path)


def _forget() -> None:
    """We are a fork: the queue and the leases are the parent's."""
    global _lock, _opening
    _lock, _opening = threading.Lock(), threading.Lock()
    _known.clear()
    while _private:
        os.close(_private.popitem()[1])


os.register_at_fork(after_in_child=_forget)
