"""Any sequence of calls of two shared schedulers that see one machine, each as it was last told."""

import tempfile
from collections import Counter
from contextlib import suppress

import anyaccel as aa
from anyaccel.errors import NeverFitsError, NotFreeError, UnknownNameError
from anyaccel.ledger import Ledger
from anyaccel.model import replace
from hypothesis import given, settings
from hypothesis import strategies as st
from small_machines import gpus, machine
from waiting import until

ONE, TWO = (replace(device, declared=True) for device in gpus(2))  # no vendor has to be asked
PARTS = tuple(replace(ONE, id=f"part-{index}", index=index, parent=ONE.id, tags=("MIG",)) for index in range(2))
MACHINES = (machine([ONE, TWO]), machine(PARTS, [TWO]), machine([ONE], PARTS, [TWO]), machine([TWO]))
REQUESTS = ("GPU", "GPU:2", "GPU:0.5", "MIG", "MIG|H100", "H100:0.25 H100:0.5", "H100 MIG")
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(REQUESTS), st.integers(0, 2)),
    st.tuples(st.just("allocate"), st.sampled_from(REQUESTS), st.none()),
    st.tuples(st.just("release"), st.integers(0, 20), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.none()),
    st.tuples(st.just("update"), st.sampled_from(MACHINES), st.none()),
)


class Schedulers:
    """Two schedulers, and what they gave."""

    def __init__(self, state):
        environ = {"ANYACCEL_STATE_DIR": state}
        self.ledger = Ledger.open(environ)
        self.both = [aa.open_scheduler(MACHINES[2], shared=True, environ=environ) for _ in range(2)]
        self.held = []
        self.waiting = []

    def collect(self):
        """Take what tickets have got; no device, and no device and a part of it, may be given twice."""
        for scheduler, ticket in list(self.waiting):
            assert ticket.error is None
            if ticket.allocation is not None:
                self.waiting.remove((scheduler, ticket))
                self.held.append((scheduler, ticket.allocation))
        shares = [share for _, allocation in self.held for share in allocation.shares]
        units = Counter()
        for share in shares:
            units[share.device.id] += share.units
        assert max(units.values(), default=0) <= 10_000
        assert not any(share.device.parent in units for share in shares)

    def take(self, scheduler, step, request, priority):
        with suppress(NotFreeError, NeverFitsError, UnknownNameError):
            if step == "submit":
                self.waiting.append((scheduler, scheduler.submit(request, priority=priority, infeasible="pend")))
            else:
                self.held.append((scheduler, scheduler.allocate(request)))

    def release_all(self):
        self.collect()
        while self.held:
            scheduler, allocation = self.held.pop()
            scheduler.release(allocation)
        return not self.waiting


@given(st.lists(st.tuples(st.integers(0, 1), STEPS), max_size=20))
@settings(max_examples=25)
def test_no_device_is_given_twice_and_each_request_is_served_in_the_end(steps):
    # A scheduler that still looks once more, as for a request that was cancelled, makes the directory again.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        run(Schedulers(f"{state}/leases"), steps)


def run(some, steps):
    for which, (step, what, priority) in steps:
        scheduler = some.both[which]
        if step in ("submit", "allocate"):
            some.take(scheduler, step, what, priority)
        elif step == "release" and some.held:
            owner, allocation = some.held.pop(what % len(some.held))
            owner.release(allocation)
        elif step == "cancel" and some.waiting:
            some.waiting[what % len(some.waiting)][1].cancel()
            some.waiting = [(owner, ticket) for owner, ticket in some.waiting if not ticket.cancelled]
        elif step == "update":
            scheduler.update(what)
        some.collect()
    for scheduler in some.both:
        scheduler.update(MACHINES[2])
    until(some.release_all, "all who wait")
    until(lambda: not some.ledger.tickets() and not some.ledger.leases(), "the end of all leases")
    for scheduler in some.both:
        assert scheduler.pending() == ()
        devices = scheduler.inventory.devices
        until(lambda: {scheduler.free(each.id) for each in devices} == {10_000}, "all devices")  # noqa: B023
