"""The dispatcher: calls that wait, the devices that they get, and the processes that run them, for all pools.

All of it changes in the thread of the reactor alone, which gets no signals: so there are no locks, and Ctrl-C leaves
nothing half done. What other threads may call says so; it leaves a note, and looks at single values.

Calls that are alike wait in a line, in order. Lines are served in the order of arrival of their first calls, among
those that compete for a device or for room in their pool. Of those, the first alone stands in the machine's line: a
thousand calls are one ticket. A process has the calls that it runs, nothing else, but for the methods of an actor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NoReturn

from anyaccel.errors import (
    AnyaccelError,
    BrokenWorkerError,
    LedgerError,
    TaskTimeoutError,
    UsageError,
    WorkerError,
    WorkerStartError,
)
from anyaccel.forkserver.client import Gone
from anyaccel.inventory.current import LEASE_VARIABLE
from anyaccel.inventory.detect import detect
from anyaccel.launcher.launch import check_start
from anyaccel.launcher.scope import Scope
from anyaccel.launcher.usage import UsageMeter
from anyaccel.launcher.use import get_process_lease
from anyaccel.launcher.verdicts import why
from anyaccel.ledger import Ledger
from anyaccel.linux import mark as marks
from anyaccel.linux.fork import renew_in_child, tidy_in_child
from anyaccel.linux.process import describe_end
from anyaccel.model import NOTHING, Allocation, Extent, Grant, Inventory, Request
from anyaccel.pool import spawning
from anyaccel.pool.call import Call, Options, Runner, UnreadableError, exception_in, settle_call
from anyaccel.pool.channel import MOST_INLINE, Message, MessageKind, receive, send
from anyaccel.pool.devices import (
    ChoiceFactory,
    LocalRequest,
    WorkerLease,
    check_request,
    choice_among,
    forsake,
    private_directory,
    without,
)
from anyaccel.pool.engine import Engine, PoolSettings
from anyaccel.pool.launching import CPU, outputs
from anyaccel.pool.payload import Pickled, dumps
from anyaccel.pool.quarantine import can_tell, release_when_free
from anyaccel.pool.reactor import Timer, reactor
from anyaccel.probe.machine import Machine, parse_machine

if TYPE_CHECKING:
    from anyaccel.launcher.environment import WorkerGroup
    from anyaccel.launcher.time_limit import EarlySignal
    from anyaccel.ledger.acquisition import Acquisition
    from anyaccel.pool.actor import ActorState
    from anyaccel.pool.gang import GangFuture
    from anyaccel.scheduler import Choice, Verdict

LOOK_SECONDS = 0.05
"""How often to look whether another process waits for what idle processes of ours hold."""
OWN_SECONDS = 0.01
"""How long to wait for what this process holds itself before standing in the machine's line for it."""
PROCESSORS = len(os.sched_getaffinity(0))
"""Processors that this process may use: as many calls as that can run at once without devices."""
MOST_AHEAD, MOST_AHEAD_BYTES = 32, 1 << 12
"""So many methods at most are sent to an actor that runs one, and no larger ones: they find room in its channel."""
MOST_STORED = 64
"""Calls of which the arguments wait in shared memory: each keeps a descriptor."""
MOST_ASKED = 256
MOST_DEVICES = 64
"""About so many workers with devices run at once at most, where nothing says how many may."""

_ANSWERS = MessageKind.RESULT, MessageKind.ERROR
_GONE = {errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN}
"""The other end has been closed, or ours has since the end was noticed."""


class CallQueue:
    """Calls of one pool and one kind that wait, in order.

    Attributes:
        key: What calls have in common that wait in it.
        owner: The pool.
        options: How they are to be run.
        asked: What their request means; None where they need no device.
        actor: Whether they make actors.
        calls: The calls, of which some may have been cancelled.
        refused: The count of changes at which there was nothing for it.
        others: What other processes held then, by name in the ledger.
        chosen: What was chosen last.
        wish: Its first one, in the machine's line; None while it is not there.
        began: When it was asked for that.
        watched: What tells of changes there.
        timer: Has it asked again.
    """

    def __init__(self, key: object, owner: LocalEngine, call: Call, asked: LocalRequest | None) -> None:
        self.key = key
        self.owner = owner
        self.options = call.options
        self.asked = asked
        self.actor = call.actor is not None
        self.calls: deque[Call] = deque()
        self.refused = -1
        self.others: dict[str, Extent] = {}
        self.chosen: tuple[Grant, ...] = ()
        self.wish: Acquisition | None = None
        self.began = 0.0
        self.watched: list[int] = []
        self.timer: Timer | None = None

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the devices for which its calls compete."""
        return frozenset() if self.asked is None else self.asked.ids

    @property
    def admitted(self) -> bool:
        """Whether room in the pool is kept for the first one, which waits for its devices."""
        return self.wish is not None or self.timer is not None

    def head(self) -> Call | None:
        """The first one that is still wanted."""
        calls = self.calls
        while calls and not calls[0].undecided():  # cancelled
            calls.popleft()
        return calls[0] if calls else None

    def rest(self) -> None:
        """Listen to the machine's line no more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        while self.watched:
            reactor().unwatch(self.watched.pop())

    def leave(self) -> None:
        """Leave the machine's line."""
        self.rest()
        if self.wish is not None:
            self.wish.undo()
            self.wish = None


class Broker:
    """The devices of one machine, and who waits for them in this process: one for all pools.

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
        self, inventory: Inventory, *, shared: bool = True, choice: ChoiceFactory | None = None, note: str = ""
    ) -> None:
        self.inventory = inventory
        self.private = not shared
        self._environ = dict(os.environ)
        if self.private:
            path = private_directory()  # which the ledger must not lock
            self._environ["ANYACCEL_STATE_DIR"] = os.path.join(path, "leases")
            weakref.finalize(self, forsake, path).atexit = False
        self.ledger = Ledger.open(self._environ)
        self.scope = Scope.make(inventory, self._environ)
        used = get_process_lease()
        self._used = None if used is None else used.lease
        self.choice: Callable[[Request], Choice] = choice or choice_among(inventory)
        self._note = note
        self._lines: dict[object, CallQueue] = {}
        self._idle: list[WorkerProcess] = []
        self._asked: dict[object, LocalRequest] = {}
        self._own: dict[str, list[Extent]] = {}
        self._changes = 0
        self._serving = self._again = False
        self._looking = False
        self._looked = float("-inf")
        self._elsewhere: frozenset[str] = frozenset()
        self._patience = 1

    # Waiting

    def enter(self, owner: LocalEngine, call: Call) -> None:
        """Give a call to an idle process of its kind, or let it wait.

        Raises:
            UnknownNameError, NeverFitsError: When its request can never be served.
        """
        key = _key(owner, call)
        idle = None if key in self._lines else self._take_idle(owner, call.options.alike)
        if idle is not None:
            idle.give(call)
            return
        line = self._line(owner, call)
        crowded = line.head() is not None  # then there is nothing for this one either
        line.calls.append(call)
        if not crowded:
            self.serve()

    def put_back(self, owner: LocalEngine, calls: list[Call]) -> None:
        """Let calls of one kind wait again, in front of their like."""
        for call in reversed(calls):
            self._line(owner, call).calls.appendleft(call)

    def forget(self, owner: LocalEngine, call: Call) -> None:
        """A call was cancelled: if it was the last of its line, nobody waits there any more."""
        line = self._lines.get(_key(owner, call))
        if line is not None and line.head() is None:
            self._drop(line)

    def next_for(self, member: WorkerProcess) -> Call | None:
        """Take the next call out that waits for a process, if it would overtake nobody."""
        line = self._lines.get((id(member.owner), member.options.alike, False))
        if line is None or self._is_wanted_elsewhere(member):
            return None
        return None if line.head() is None or self._overtakes(line) else self._pop(line)

    def serve(self) -> None:
        """Start whatever can be started now."""
        self._again = True
        if self._serving:  # what is started may fail at once and come here: a thousand may follow
            return
        self._serving = True
        try:
            while self._again:
                self._again = False
                while self._lines and self._serve_one():
                    pass
        finally:
            self._serving = False

    def _serve_one(self) -> bool:
        """Start one thing; False when there is none."""
        wanted: frozenset[str] = frozenset()
        crowded: set[LocalEngine] = set()
        for line in self._ordered():
            owner, asked = line.owner, line.asked
            idle = None if self._overtakes(line) else self._take_idle(owner, line.options.alike)
            if idle is not None:
                idle.give(self._pop(line))
                return True
            if not self._has_room(line):
                if owner not in crowded and (useless := self._evictable(line)) is not None:
                    self._evict([useless])
                    return True
                crowded.add(owner)
                continue
            if owner in crowded and owner.settings.max_workers is not None:
                continue
            if asked is None or asked.nothing:
                held = None if asked is None else WorkerLease(Allocation(id="", request=asked.request, grants=()))
                call = self._pop(line)
                owner.join(call, held).launch(call)
                return True
            blocked = not line.ids.isdisjoint(wanted)
            wanted |= line.ids
            if not (blocked or line.wish is not None or line.refused == self._changes):
                self._ask(line, asked)
                return True
        return False

    def _has_room(self, line: CallQueue) -> bool:
        """Whether the pool of a line may have one more process for it."""
        owner = line.owner
        if owner.settings.max_workers is not None:
            others = (other for other in self._lines.values() if other.owner is owner and other is not line)
            return len(owner.members) + sum(other.admitted for other in others) < owner.settings.max_workers
        if line.asked is not None or line.actor:
            return True
        return sum(member.busies_processor for member in owner.members) < PROCESSORS

    def _overtakes(self, line: CallQueue) -> bool:
        """Whether a call of another line comes before and competes for the same."""
        if len(self._lines) == 1:
            return False
        number = line.calls[0].number
        for other in self._lines.values():
            first = other.head() if other is not line else None
            if first is None or first.number > number:
                continue
            roomy = self._has_room(other)
            alike = line.owner.settings.max_workers is not None or (line.asked is None and other.asked is None)
            if (not roomy and other.owner is line.owner and alike) or (roomy and not other.ids.isdisjoint(line.ids)):
                return True
        return False

    def _ordered(self) -> list[CallQueue]:
        """Lines in which somebody waits, by the arrival of their first."""
        return sorted(
            (line for line in self._lines.values() if line.head() is not None), key=lambda line: line.calls[0].number
        )

    def _line(self, owner: LocalEngine, call: Call) -> CallQueue:
        """The line of calls that are alike."""
        key = _key(owner, call)
        line = self._lines.get(key)
        if line is None:
            asked = self._asked_for(call.options, confined=owner.confined)
            line = self._lines[key] = CallQueue(key, owner, call, asked)
        return line

    def _pop(self, line: CallQueue) -> Call:
        """Take the first call out, which is there."""
        call = line.calls.popleft()
        if line.head() is None:
            self._drop(line)
        elif line.wish is not None and self._overtakes(line):  # the place was that of the one before
            line.leave()
        return call

    def _drop(self, line: CallQueue) -> None:
        """Forget an empty line."""
        if self._lines.get(line.key) is line:
            del self._lines[line.key]
        line.leave()

    def why(self, request: Request) -> Verdict:
        """What a request waits for; any thread may ask."""
        return why(request, inventory=self.inventory, environ=self._environ)

    def _asked_for(self, options: Options, *, confined: bool) -> LocalRequest | None:
        """What the request of some calls means; None where they have none."""
        if options.needs is None:
            return None
        found = self._asked.get((options.alike, confined))
        if found is None:
            if len(self._asked) >= MOST_ASKED:
                self._asked.clear()
            choice = self.choice(options.needs)
            found = LocalRequest(choice, self.inventory, self.scope, private=self.private, confined=confined)
            self._asked[options.alike, confined] = found
        return found

    # Devices

    def _ask(self, line: CallQueue, asked: LocalRequest, *, insist: bool = False) -> None:
        """Ask for devices for the first call of a line, or look how far it is in the machine's line.

        Args:
            line: The line.
            asked: What is asked for.
            insist: Whether to stand in that line although what this process holds is in the way.
        """
        line.rest()
        call = line.head()
        if call is None:
            return
        line.refused = self._changes
        if line.wish is None and not insist and asked.choose(self.scope.to_devices(self._held())) is None:
            line.timer = reactor().call_later(OWN_SECONDS, partial(self._ask, line, asked, insist=True))
            self._make_way(line, asked)
            return
        try:
            found = self._attempt(line, asked, call)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            line.leave()
            self._pop(line)
            call.fail(error)
            line.owner.forget(call)
            self.serve()
            return
        if found is None:
            if line.wish is not None:
                self._listen(line, asked, line.wish)
            self._make_way(line, asked)
        elif line.head() is None or self._overtakes(line):
            found.release()
        else:
            call = self._pop(line)
            line.owner.join(call, found).launch(call)
        self.serve()

    def _attempt(self, line: CallQueue, asked: LocalRequest, call: Call) -> WorkerLease | None:
        """Get devices from the ledger; None when they are not free now, and then a place in the machine's line is kept.

        Raises:
            AnyaccelError: When there will be none.
        """
        if self._used is not None and self._used.released:
            raise LedgerError(
                "this process has given back what it used when this pool was made, and others may have it by now; use"
                " a pool inside of the 'with' statement of anyaccel.use(), or make a new one"
            )
        note = f"{call.name}{self._note}"
        if line.wish is None:
            line.wish = self.ledger.begin(asked.want, partial(self._choose, line, asked), note=note)
            line.began = time.monotonic()
        lease = line.wish.attempt()
        if lease is None:
            return None
        line.wish.leave_line()
        line.wish = None
        allocation = Allocation(id=lease.id, request=asked.request, grants=line.chosen)
        for key, extent in lease.devices.items():
            self._own.setdefault(key, []).append(extent)
        usage = None
        if not self.private:
            waited = time.monotonic() - line.began
            usage = UsageMeter(allocation, note, waited=waited, added_up=True)
        return WorkerLease(allocation, lease, self._released, private=self.private, usage=usage)

    def _choose(self, line: CallQueue, asked: LocalRequest, taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
        """Choose for the first call of a line, given what is taken by name in the ledger."""
        grants = asked.choose(self.scope.to_devices(taken))
        if grants is None:
            own = self._held()
            line.others = {key: without(extent, own.get(key, NOTHING)) for key, extent in taken.items()}
            return None
        line.chosen = grants
        return self.scope.to_ledger(grants)

    def _listen(self, line: CallQueue, asked: LocalRequest, wish: Acquisition) -> None:
        """Look again once something has happened that the first call of a line waits for."""
        loop = reactor()
        line.timer = loop.call_later(wish.pause(), partial(self._ask, line, asked))

        def note(descriptor: int) -> None:
            if wish.read_event(descriptor):
                self._ask(line, asked)

        line.watched = wish.descriptors()
        for descriptor in line.watched:
            loop.watch(descriptor, partial(note, descriptor))

    def _released(self, devices: Mapping[str, Extent]) -> None:
        """Count what was given back, and serve those who wait for it."""
        for key, extent in devices.items():
            self._own[key].remove(extent)
        self._changes += 1
        self.serve()

    def _held(self, but: Collection[WorkerProcess] = ()) -> dict[str, Extent]:
        """What this process holds, by key of the ledger, but for what some processes do."""
        own = {key: list(extents) for key, extents in self._own.items()}
        for member in but:
            for key, extent in ({} if member.held is None else member.held.devices).items():
                own[key].remove(extent)
        return {key: reduce(Extent.joined, extents) for key, extents in own.items() if extents}

    # Idle processes

    def rest(self, member: WorkerProcess) -> None:
        """Keep an idle process for later calls, unless another process waits for its devices."""
        if self._is_wanted_elsewhere(member):
            member.finish()
            return
        self._idle.append(member)
        if member.held is not None and not self._looking:
            self._looking = True
            self._look_later()
        if not self._lines:
            return
        for line in self._ordered() if member.held is not None else ():
            if line.asked is not None and self._has_room(line) and not line.ids.isdisjoint(member.ids):
                self._make_way(line, line.asked)
                break
        self.serve()

    def discard(self, member: WorkerProcess) -> None:
        """Forget an idle process that has gone."""
        if member in self._idle:
            self._idle.remove(member)

    def _take_idle(self, owner: LocalEngine, alike: int) -> WorkerProcess | None:
        """An idle process for calls of a kind: the one used last, so that the others get old enough to go."""
        for place in range(len(self._idle) - 1, -1, -1):
            member = self._idle[place]
            if member.owner is owner and member.options.alike == alike and not member.ending:
                return self._idle.pop(place)
        return None

    def _evictable(self, line: CallQueue) -> WorkerProcess | None:
        """The idle process that is to end so that a line has room, unless one ends anyhow."""
        owner = line.owner
        if any(member.ending for member in owner.members):
            return None
        for member in self._idle:
            if member.owner is owner and (owner.settings.max_workers is not None or member.busies_processor):
                return member
        return None

    def _make_way(self, line: CallQueue, asked: LocalRequest) -> None:
        """End as many idle processes as a line needs the devices of, those first that were used longest ago."""
        if not self._idle or line.head() is None:
            return
        near = self.scope.excluded_by(asked.ids)
        idle = [member for member in self._idle if not member.ids.isdisjoint(near)]
        peers = {peer for owner in {member.owner for member in idle} for peer in owner.members}
        ended = [peer for peer in peers if peer.ending and peer.held is not None]
        number = 0
        while number < len(idle):
            taken = dict(line.others)
            for key, extent in self._held([*ended, *idle[:number]]).items():
                taken[key] = taken.get(key, NOTHING).joined(extent)
            if asked.choose(self.scope.to_devices(taken)) is not None:
                break
            number += 1
        self._evict(idle[:number])

    def _evict(self, members: list[WorkerProcess]) -> None:
        for member in members:
            self._idle.remove(member)
            member.finish()

    def _look(self) -> None:
        """End processes that have been idle for too long, or whose devices other processes wait for."""
        now = time.monotonic()
        holders = [member for member in self._idle if member.held is not None]
        unused = [member for member in holders if member.heard + member.owner.settings.idle <= now]
        wanted = [member for member in holders if self._is_wanted_elsewhere(member)]
        # One by one at first: nobody knows how many of them the others need.
        self._patience = 2 * self._patience if wanted else 1
        self._evict(unused + [member for member in wanted[: self._patience // 2] if member not in unused])
        self._looking = any(member.held is not None for member in self._idle)
        if self._looking:
            self._look_later()

    def _look_later(self) -> None:
        """Come back when the first idle process gets too old, and as often as others have to be asked."""
        when = min(member.heard + member.owner.settings.idle for member in self._idle if member.held is not None)
        reactor().call_at(when if self.private else min(when, time.monotonic() + LOOK_SECONDS), self._look)

    def _is_wanted_elsewhere(self, member: WorkerProcess) -> bool:
        """Whether another process waits for devices of a process of ours, parts of them, or what they are parts of."""
        if member.held is not None and not self.private and (now := time.monotonic()) - self._looked > LOOK_SECONDS:
            self._looked = now
            ids = self.scope.ids
            keys: frozenset[str] = frozenset()
            with contextlib.suppress(AnyaccelError):  # whoever asks for devices is told
                keys = self.ledger.find_wanted(frozenset(ids))
            self._elsewhere = self.scope.excluded_by(ids[key] for key in keys) if keys else frozenset()
        return not member.ids.isdisjoint(self._elsewhere)


def _key(owner: LocalEngine, call: Call) -> tuple[int, int, bool]:
    return id(owner), call.options.alike, call.actor is not None


class WorkerProcess(Runner):
    """A worker process of a pool, from the decision to fork it until its devices have gone back.

    Args:
        owner: The pool.
        held: The devices that it holds, or None for the CPU alone.
        call: The call that it is for.

    Attributes:
        owner: The pool.
        options: How the calls that it runs are to be run.
        actor: The actor that lives in it, or None.
        held: The devices that it holds, or None for the CPU alone.
        allocation: What it holds, with what enforces that once it is known.
        ids: Ids of the devices that it holds.
        mark: What it and all that it starts carry; empty before it has been told.
        running: Calls that it was given and has not answered, by number, in order.
        heard: Time of ``time.monotonic()`` of its last answer, or of the first call since it had none.
        calls: Calls that it was given so far.
        ending: Whether it gets no more calls.
        stopped: Whether we have ended it, whatever it was doing.
        proven: Whether it has answered at all.
        fault: Why nothing that it says is believed any more, or an empty string.
        notices: What it has to say before it answers, in order.
    """

    def __init__(self, owner: LocalEngine, held: WorkerLease | None, call: Call) -> None:
        self.owner = owner
        self.actor: ActorState | None = call.actor
        self.options: Options = call.options if call.actor is None else call.actor.kept
        self.held = held
        self.allocation = CPU if held is None else held.allocation
        self.ids = frozenset(device.id for device in self.allocation.devices)
        self.mark: marks.Mark = ()
        self.running: dict[int, Call] = {call.number: call}
        self.heard = time.monotonic()
        self.calls = 0
        self.ending = self.stopped = self.proven = False
        self.fault = self.stuck = self.killed = ""
        self.last = 0
        self.notices: deque[MessageKind] = deque()
        self.timer: Timer | None = None
        self._process: spawning.Process | None = None
        self._open = False
        self._ahead = True
        self._group: WorkerGroup | None = None

    # What the fork server tells

    def ended(self, gone: Gone) -> None:
        """Hand over what it said last, and that it has gone."""
        self.ending = True
        self._shut(socket.SHUT_RDWR)  # nothing is sent any more, since the process would not take it out
        while self._open:
            message = self._receive(last=True)
            if message is not None:
                self.on_message(message)
        if self.timer is not None:
            self.timer.cancel()
        if self._group is not None:
            from anyaccel.launcher.limits import remove_group

            self.killed = remove_group(self._group)
        self.owner.on_gone(self, gone)

    def on_stuck(self, reason: str) -> None:
        """Take note that it ignores SIGKILL, or cannot be understood: its devices stay with it."""
        self.stuck = reason
        self.owner.on_stuck(self, reason)

    # What it is given

    @property
    def busies_processor(self) -> bool:
        """Whether it counts among those that may run at once without devices: an actor is idle for most of its life."""
        return self.held is None and self.actor is None

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered, in order; any thread may ask."""
        return list(self.running.values())

    @property
    def free(self) -> bool:
        """Whether it runs one more call at once."""
        running = self.running
        return not self.ending and (not running or (len(running) < self.options.concurrency and not self._constructs()))

    def takes(self, call: Call) -> bool:
        """Whether it takes a call: to run it at once or, for an actor of its own, after those that it has."""
        if self.free:
            return True
        state, body = self.actor, call.body
        return (
            state is not None
            and state.pipelined
            and self.options.concurrency == 1
            and not (self.ending or self._constructs())
            and len(self.running) < MOST_AHEAD
            and body is not None
            and body.stored is None
            and not body.buffers
            and len(body.data) <= MOST_AHEAD_BYTES
            and call.log is None
            and self.owner.settings.logs is None
        )

    def _constructs(self) -> bool:
        return any(call.kind == MessageKind.CONSTRUCT for call in self.running.values())

    def pull(self) -> None:
        """Give it the calls that wait, as many as it takes."""
        self.owner.feed(self)

    def launch(self, call: Call, *, ahead: bool = True) -> None:
        """Have it forked, make its environment, and send it its first call.

        Args:
            call: The call.
            ahead: Whether it may be a process that was forked before anybody needed one.
        """
        owner, settings, held = self.owner, self.owner.settings, self.held
        self._ahead = ahead
        call.future.allocation = self.allocation
        try:
            descriptors = () if held is None else held.descriptors
            self._process = spawning.spawn(
                self, settings.preload, grace=settings.grace, leases=descriptors, ahead=ahead
            )
            self._open = True
            reactor().watch(self._process.channel.fileno(), self.read)
            server = self._process.server
            self.mark = (() if held is None else held.mark) or marks.draw_often()
            timed = call.options.timeout is not None
            made, setup = settings.preparation.setup(
                self.allocation,
                owner.inventory,
                lease="" if held is None else held.lease_id,
                mark=self.mark,
                environ=server.environ,
                path=server.path,
                ready=timed,
            )
            self.allocation, self._group = made.allocation, made.group
            if timed:
                self.notices.append(MessageKind.READY)
            if settings.preparation.staged:
                self.notices.append(MessageKind.PREPARED)
            with outputs() as pair:
                self._send(MessageKind.SETUP, setup, (*pair, *descriptors))
            self.give(call, fresh=True)
            if self.stopped:  # by another thread, when there was no process yet that could have been told
                self._process.stop(settings.grace)
            owner.use(server, ahead=self.options.max_calls == 1)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            if self._process is None:
                owner.on_gone(self, Gone(forked=False))
            else:
                self.stop(0)

    def give(self, call: Call, *, fresh: bool = False) -> None:
        """Send it a call: to run, or to stand behind those that it has.

        Args:
            call: The call.
            fresh: Whether nothing says yet that the process is there.
        """
        self.running[call.number] = call
        if not call.undecided():  # cancelled just now, and of a fresh process that is told in a moment
            if not fresh:
                self.owner.on_free(self, call)
            return
        body = call.body or Pickled(b"", [])
        call.future.allocation = self.allocation
        call.sent = True
        self.calls += 1
        self.ending = self.ending or self.calls == self.options.max_calls
        if len(self.running) <= self.options.concurrency:
            self._begin(call, fresh=fresh)
        if call.tries >= call.options.retries:
            call.body = None
        try:
            if not self._pass(call, body):
                call.sent, call.body = False, body
            elif self.ending:  # it ends once it has answered
                self._shut(socket.SHUT_WR)
        except OSError as error:  # no memory or no descriptor is left
            call.fail(error)
            self.stop(0)

    def _begin(self, call: Call, *, fresh: bool = False) -> None:
        """Take note that it runs a call; the time of the first one begins when the process is there."""
        call.worker = self
        if len(self.running) == 1:
            self.heard = time.monotonic()
        if not fresh:
            self._start_timer(call)

    def _pass(self, call: Call, body: Pickled) -> bool:
        """Send it a call, with the file for its output where it has one; False when it has gone.

        Raises:
            OSError: When there is no memory or no descriptor left for that.
        """
        logs = self.owner.settings.logs
        log = call.log if logs is None else call.log or logs.path_for(call.name)
        if log is None:
            return self._send(call.kind, body, number=call.number)
        call.future.log = log
        with outputs(log) as pair:
            return self._send(call.kind, body, pair, number=call.number)

    def skip(self, call: Call) -> None:
        """Have it not begin with a call that stands behind others."""
        if call.worker is None:
            with contextlib.suppress(OSError):
                self._send(MessageKind.SKIP, number=call.number)

    def not_begun(self, gone: Gone) -> list[Call]:
        """The calls that it never began with, now that it has gone.

        What was set up and did not become a worker began with all that it was sent: another one may not become one
        either. The same goes for what was forked when it was needed and took nothing out.
        """
        self.ending = True
        first = self._untaken() if gone.forked and not self.stopped else None
        unused = self._ahead and not self.proven and first is not None and first.kind == MessageKind.SETUP
        found: list[Call] = []
        while first is not None and (unused or self.proven):
            call = self.running.get(first.number)
            if call is not None:
                call.body = Pickled(bytes(first.data), first.buffers)
                call.sent = False
            first = self._untaken()
        for call in self.outstanding:
            if not call.sent:
                call.withdraw()
                found.append(call)
        return [call for call in found if call.undecided()]

    def _untaken(self) -> Message | None:
        """The first message that it has not taken out, now that it has gone."""
        try:
            message = None if self._process is None else receive(self._process.end, wait=False)
        except (OSError, ValueError):
            return None
        for descriptor in () if message is None else message.descriptors:
            os.close(descriptor)
        return message

    def _start_timer(self, call: Call) -> None:
        if call.options.timeout is None:
            return
        seconds, early = call.options.timeout, self.owner.settings.early
        if early is None or early.seconds >= seconds:
            call.timer = reactor().call_later(seconds, partial(self.owner.on_timeout, self, call))
        else:
            call.timer = reactor().call_later(seconds - early.seconds, partial(self._send_early, early, call))

    def _send_early(self, early: EarlySignal, call: Call) -> None:
        """Send the signal that comes before the time of a call is over, and wait for that."""
        call.timer = reactor().call_later(early.seconds, partial(self.owner.on_timeout, self, call))
        if call.number in self.running:
            early.send(self.mark)

    # Its end

    def stop(self, grace: float, *, answer: bool = True) -> None:
        """End it, and everything that it started; any thread may.

        Args:
            grace: Seconds between asking and killing.
            answer: Whether anybody still wants what it may say.
        """
        self.ending = self.stopped = True
        if self._process is not None:
            self._process.stop(grace)
        if not answer:
            self._shut(socket.SHUT_RD)

    def finish(self) -> None:
        """Let it end by itself; if it takes too long, end it."""
        self.ending = True
        self._shut(socket.SHUT_WR)
        self.expect_end()

    def expect_end(self) -> None:
        """Give it so long to end by itself."""
        grace = self.owner.settings.grace
        if self.timer is not None:
            self.timer.cancel()
        self.timer = reactor().call_later(max(grace, 1.0), partial(self.stop, grace))

    def refuse(self, fault: str) -> None:
        """Believe it nothing any more, and end it."""
        self.fault, self.ending = self.fault or fault, True
        if self._process is not None:
            self._process.stop(0)
        self._shut(socket.SHUT_RD)

    def _shut(self, directions: int) -> None:
        """Shut the channel, if there is one."""
        if self._process is not None:
            self._process.shut(directions)

    def death(self, gone: Gone, name: str) -> WorkerError:
        """Why its call has no result."""
        if not gone.forked:
            return WorkerStartError(f"no worker can be started for {name}: {gone.reason}")
        who = f"the worker (process {gone.pid}) that ran {name}" if gone.pid else f"the worker that ran {name}"
        if self.fault:
            return BrokenWorkerError(f"{who} was ended: {self.fault}", exit_status=gone.status)
        notes = "; ".join(filter(None, (gone.reason, self.stuck, self.killed)))
        text = f"{who} {describe_end(gone.status)} before it answered" + (f": {notes}" if notes else "")
        return BrokenWorkerError(text, exit_status=gone.status)

    # What it says

    def read(self) -> None:
        """Take the answers that there are, and hand them over."""
        for _ in range(max(1, len(self.running))):
            message = self._receive()
            if message is None:
                return
            self.on_message(message)

    def on_message(self, message: Message) -> None:
        """Hear it: an answer, a notice that is due, or what no worker that keeps to the rules says."""
        kind, owner = message.kind, self.owner
        if self.fault:
            return
        if kind in _ANSWERS and not self.notices:
            owner.on_answer(self, message)
        elif kind == MessageKind.BROKEN and (self.notices if owner.settings.preparation.staged else not self.proven):
            owner.on_broken(self, message)
        elif self.notices and kind == self.notices[0]:
            if self.notices.popleft() == MessageKind.READY:
                for call in self.outstanding[:1]:
                    self._start_timer(call)
        else:
            self.refuse(f"it sent what is no answer (a message of the kind {kind})")

    def answered(self, message: Message) -> Call | None:
        """The call that it has answered, which it does not run any more."""
        call = self.running.pop(message.number, None)
        self.heard = time.monotonic()
        self.proven = True
        if call is None:
            if message.number != self.last:  # the last one a second time costs nothing: others may run
                self.refuse("it answered a call that it was not given")
            return None
        call.body = None
        self.last = message.number
        if self.running and self.options.concurrency == 1:
            following = next(iter(self.running.values()))
            if following.worker is None:
                self._begin(following)
        if self.actor is not None and call is self.actor.construction and message.kind == MessageKind.ERROR:
            self.ending = True  # it could not make the object, and is about to end
        return call

    def _send(
        self, kind: MessageKind, body: Pickled | bytes = b"", descriptors: Collection[int] = (), *, number: int = 0
    ) -> bool:
        """Send it a message; False when it has gone.

        Raises:
            OSError: When there is no memory or no descriptor left for the message.
        """
        assert self._process is not None  # noqa: S101 - it was launched
        try:
            send(self._process.channel, kind, body, tuple(descriptors), number=number)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        return True

    def _receive(self, *, last: bool = False) -> Message | None:
        """Take a message; None when there is none now or, where it is the last look, any more."""
        if not self._open or self._process is None:
            return None
        message = None
        try:
            message = receive(self._process.channel, wait=False)
            if message is not None and message.descriptors:
                _refuse(message.descriptors)
        except BlockingIOError:
            if not last:
                return None
        except (OSError, ValueError) as error:  # it is none of ours, or no descriptors or memory are left for it
            message = None
            self.refuse(f"its answer could not be read: {error}")
        if message is None:
            self._open = False
            reactor().unwatch(self._process.channel.fileno())
        return message


def _refuse(descriptors: list[int]) -> NoReturn:
    """Close descriptors that a worker passes along.

    Raises:
        ValueError: Since no worker that keeps to the rules does.
    """
    for descriptor in descriptors:
        os.close(descriptor)
    raise ValueError("it passes descriptors along")


class LocalEngine(Engine):
    """The calls of one pool on this machine; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        broker: Gives the machine and its devices; called once, when they are needed first.
        settings: What all calls have in common. Where it sets no limit to the processes, the devices do, and the
            processors do for calls that need none.

    Attributes:
        members: Processes that live, or are about to.
        confined: Whether processes will be confined to their devices.

    Raises:
        EnforcementError: When workers must be confined, or held to memory, and the kernel cannot.
    """

    def __init__(self, broker: Callable[[], Broker], settings: PoolSettings) -> None:
        super().__init__(settings)
        self.confined = check_start(settings.preparation.start, forked=True)
        self.members: set[WorkerProcess] = set()
        self._open_broker = broker
        self._broker: Broker | None = None
        self._calls: dict[int, Call] = {}
        self._servers: set[spawning.WorkerServer] = set()
        self._quarantined: dict[int, tuple[Allocation, str]] = {}

    @property
    def broker(self) -> Broker:
        """The machine and its devices; any thread may ask.

        Raises:
            MachineError: When the machine cannot be understood.
        """
        if self._broker is None:
            with self.lock:
                if self._broker is None:
                    self._broker = self._open_broker()
        return self._broker

    @property
    def inventory(self) -> Inventory:
        """The machine."""
        return self.broker.inventory

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served."""
        check_request(self.inventory, request)

    def most_ahead(self, options: Options) -> int:
        """Batches of a ``map`` that are made before it is known how long calls take: four for each worker."""
        return 4 * (self.settings.max_workers or (PROCESSORS if options.needs is None else MOST_DEVICES))

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Let a pickled call be run as a gang of one, on this machine."""
        from anyaccel.launcher.rendezvous import Rendezvous
        from anyaccel.pool.gang import GangFuture, ranked

        if hosts > 1:
            raise UsageError(
                f"hosts must be 1 with engine='local', which has this machine alone (got {hosts}); engine='ray' has"
                " those of a cluster"
            )
        rendezvous = Rendezvous()
        call = Call(name, options, self.on_cancel)
        future = GangFuture([call.future])
        future.add_done_callback(lambda _: rendezvous.close())
        try:
            self.enter(call, ranked(0, 1, rendezvous.variables, work))
        except BaseException:
            rendezvous.close()
            raise
        return future

    def enter(self, call: Call, work: Pickled | tuple[Any, ...], *, late: bool = False) -> None:
        """Let a call be run as soon as there is a process for it; any thread may."""
        if self.foreign or not late:
            self.check_open()
        broker = self.broker  # it may not be there, which is told before anything else
        try:
            call.body = work if isinstance(work, Pickled) else dumps(work)
            self.keep(call)
        except Exception as error:  # noqa: BLE001 - it belongs to the future, as other executors do it
            call.fail(error)
            return
        if call.options.needs is not None:
            call.waits = partial(broker.why, call.options.needs)
        enter = partial(self._enter, broker, call)
        try:
            self._calls[call.number] = call
            reactor().call_soon(enter)
        except BaseException:  # an interrupt: it may have been taken for all that
            self._calls.pop(call.number, None)
            raise

    def keep(self, call: Call) -> None:
        """Let a call not see what becomes of its arguments, of which the large ones are copied once, here."""
        body = call.body
        if body is None or body.stored is not None or not (body.buffers or len(body.data) > MOST_INLINE):
            return
        if not call.options.retries and len(self._calls) < MOST_STORED:  # a worker writes to what it is sent
            with contextlib.suppress(OSError):
                call.body = body.written()
                return
        call.body = body.frozen()

    def _enter(self, broker: Broker, call: Call) -> None:
        self._calls[call.number] = call
        if not call.undecided():
            self.forget(call)
            return
        try:
            self.check_whole()
            broker.enter(self, call)
        except Exception as error:  # noqa: BLE001 - the request was served before; whatever has changed, it is told
            call.fail(error)
            self.forget(call)

    def forget(self, call: Call) -> None:
        """Forget a call that is over."""
        self._calls.pop(call.number, None)
        self.settle()

    def join(self, call: Call, held: WorkerLease | None) -> WorkerProcess:
        """Make the process that will run a call first."""
        member = WorkerProcess(self, held, call)
        if call.actor is not None:
            call.actor.member = member
        self.members.add(member)
        return member

    # What processes do

    def on_answer(self, member: WorkerProcess, message: Message) -> None:
        """Give a worker that has answered the next call, then hand over what it said."""
        call = member.answered(message)
        if call is None:
            return
        self.on_free(member, call)
        try:
            settle_call(call, message, plain=self.settings.preparation.plain)
        except BaseException as error:
            member.stop(0)
            call.fail(error)
            raise
        state = member.actor
        if state is not None and call is state.construction and message.kind == MessageKind.ERROR:
            state.bury(BrokenWorkerError("it could not be made"))  # where its future has not said why
        self.forget(call)

    def on_free(self, member: WorkerProcess, call: Call) -> None:
        """Give a worker that runs a call no more the next one, or let it rest."""
        member.running.pop(call.number, None)
        if member.ending:
            if not member.running:
                member.expect_end()
        elif not self.feed(member) and not member.running:
            if member.actor is None:
                self.broker.rest(member)
            elif member.actor.closing:
                member.finish()

    def feed(self, member: WorkerProcess) -> bool:
        """Give a worker the calls that it takes; whether there were any."""
        given = False
        if member.actor is not None:
            while (call := member.actor.next_for(member)) is not None:
                given = True
                member.give(call)
        elif member.free and (call := self.broker.next_for(member)) is not None:
            given = True
            member.give(call)
        return given

    def on_broken(self, member: WorkerProcess, message: Message) -> None:
        """Break the pool, or tell the call, of which the worker could not be set up."""
        member.fault = "it could not be set up"
        error = exception_in(message, plain=self.settings.preparation.plain)
        if isinstance(error, UnreadableError):
            member.fault = ""
            member.refuse(f"it sent what is no answer ({error})")
        elif self.settings.preparation.staged:
            self.break_off(error)
        else:  # it has no environment or directory, which the next one may have
            for call in member.outstanding:
                call.fail(error)
            member.stop(0)

    def on_gone(self, member: WorkerProcess, gone: Gone) -> None:
        """Let others have the calls and the devices of a process: it and all that it started have left the kernel."""
        self.members.discard(member)
        self.broker.discard(member)
        state = member.actor
        name = member.outstanding[0].name if member.running else f"the actor {state.name}" if state else ""
        again = member.not_begun(gone)
        if state is not None and member.stopped:
            again = [call for call in again if call is not state.construction]
        begun = [call for call in member.outstanding if call not in again]
        member.running.clear()
        if state is not None and state.construction not in again:
            death = member.death(gone, name)
            if state.closing and gone.status == 0:
                death = BrokenWorkerError("it was closed", exit_status=0)
            state.die(death)  # before a caller hears of it and calls again
        held, member.held = member.held, None
        if again and not begun and not member.proven:  # it was not used, and another one takes its place
            fresh, held = self.join(again[0], held), None
            fresh.launch(again.pop(0), ahead=False)
        retried = [call for call in begun if gone.forked and not member.stopped and call.may_be_retried]
        for call in begun:
            if call in retried:
                call.retry()
            else:
                call.fail(member.death(gone, call.name))
                self._calls.pop(call.number, None)
        # First, or others that came later would be given the devices.
        if state is None:
            self.broker.put_back(self, [*retried, *again])
        else:
            state.put_back([*retried, *again])
        if held is not None:
            self.give_back(held, gone)
        if state is not None and state.death is not None:
            state.bury(state.death)
        self.broker.serve()
        self.settle()

    def on_stuck(self, member: WorkerProcess, reason: str) -> None:
        """Keep the devices of a worker aside of which something ignores SIGKILL."""
        if member.held is not None:
            self.quarantine(member.held, reason)
        for call in member.outstanding:
            call.fail(member.death(Gone(reason=reason), call.name))
        if member.actor is not None:  # others may run its calls, it will not
            member.actor.bury(member.death(Gone(reason=reason), f"the actor {member.actor.name}"))
        self.broker.serve()

    def on_timeout(self, member: WorkerProcess, call: Call) -> None:
        """End a call whose time is up."""
        if call.number not in member.running:
            return
        member.ending = True
        if member.held is not None:
            member.held.timed_out = True
        call.fail(TaskTimeoutError(f"{call.name} took longer than its timeout of {call.options.timeout:g} s"))
        member.stop(self.settings.grace, answer=False)

    def on_cancel(self, call: Call) -> None:
        """End the process that runs a call which was cancelled."""
        member = next((member for member in self.members if call.number in member.running), None)
        call.body = None
        if member is not None and call.kind == MessageKind.METHOD:  # of an object that others use
            member.skip(call)
        elif member is not None:
            member.stop(self.settings.grace, answer=False)
        elif self._broker is not None:
            self._broker.forget(self, call)
            self._broker.serve()
        self.forget(call)

    # Devices that are given back

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, and why; any thread may ask."""
        return tuple(self._quarantined.values())

    def quarantine(self, held: WorkerLease, reason: str) -> None:
        """Say why devices are kept."""
        known = self._quarantined.get(id(held))
        self._quarantined[id(held)] = (held.allocation, reason)
        if known is None or known[1] != reason:
            held.quarantine(reason)

    def give_back(self, held: WorkerLease, gone: Gone) -> None:
        """Give devices back: at once when their holder has ended by itself, else when nothing of it is left."""
        inventory = self.inventory

        def release() -> None:
            self._quarantined.pop(id(held), None)
            held.release(carried=gone.carried)

        if gone.status == 0 or not gone.forked or not can_tell(inventory, held.allocation):
            release()
        else:
            release_when_free(
                inventory,
                held.allocation,
                gone.pid,
                keep=partial(self.quarantine, held),
                release=lambda: reactor().call_soon(release),
            )

    # Its end

    def stop(self, grace: float) -> None:
        """Take no more calls, cancel those that wait, and end the workers of those that run; any thread may."""
        if not self.foreign:
            self.shutdown(wait=False, cancel_futures=True)
            reactor().call_soon(partial(self._stop, grace))

    def _stop(self, grace: float) -> None:
        for member in list(self.members):
            member.stop(grace)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run. A done-callback does not wait for that."""
        if self.foreign:
            return
        self.closed = True
        for call in tuple(self._calls.values()) if cancel_futures else ():
            if not call.sent:
                call.future.cancel()
        reactor().call_soon(self._shut)
        if wait and not reactor().inside:
            self.drained.wait()

    def _shut(self) -> None:
        """Let actors go that have no work, since others may wait for what they hold."""
        made = [member.actor for member in self.members]
        for actor in (*made, *(call.actor for call in self._calls.values())):
            if actor is not None:
                actor.close()
        self.settle()

    def settle(self) -> None:
        """Once closed and out of work, let the workers go."""
        if not self.closed or any(call.undecided() and not call.sent for call in self._calls.values()):
            return
        for member in list(self.members):
            if self._broker is not None:
                self._broker.discard(member)
            if not (member.running or member.ending or member.actor):
                member.finish()
        if not self.members:
            servers, self._servers = self._servers, set()
            for server in servers:
                server.leave()
            self.drained.set()

    def unfinished(self) -> list[Call]:
        """Calls that wait, or run."""
        return [*self._calls.values(), *(call for member in self.members for call in member.outstanding)]

    def use(self, server: spawning.WorkerServer, *, ahead: bool) -> None:
        """Take note that a worker came from a fork server.

        Args:
            server: The fork server.
            ahead: Whether another fresh worker will be needed, and is better forked now.
        """
        if server not in self._servers:
            self._servers.add(server)
            server.use()
        if ahead:
            server.fork_ahead()


_known: weakref.WeakValueDictionary[object, Broker] = weakref.WeakValueDictionary()
_opening = renew_in_child(threading.Lock())


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


@tidy_in_child
def _forget() -> None:
    """We are a fork: the queue and the leases are the parent's."""
    _known.clear()
