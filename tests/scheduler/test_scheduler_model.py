"""Any sequence of calls, compared with what a naive model allows after each."""

from anyaccel.errors import NotFreeError
from anyaccel.model import UNITS_PER_DEVICE
from anyaccel.scheduler import Scheduler, parse_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from lengths import length
from small_machines import chip_rule, chips, gpus, legal, machine, possible

INVENTORY = machine(gpus(2, links=1), gpus(1, "A100"), chips(4))
DEVICES = INVENTORY.devices
REQUESTS = st.sampled_from(
    [
        *("GPU", "GPU:2", "GPU:2,linked", "GPU:3,mixed", "GPU:0.4", "GPU:0.7", "H100", "A100:0.5", "A100|H100"),
        *("TPU", "TPU:2", "TPU:4", "GPU:0.5 TPU", "GPU TPU:2", "GPU A100", "GPU:0.4 GPU:0.4"),
    ]
)


def wanted(request):
    """Ids of the devices that could serve one of a request's terms."""
    return {device.id for term in request.terms for device in DEVICES if legal(term, [device], None)}


class SchedulerModel(RuleBasedStateMachine):
    """Drives one scheduler and keeps its own books."""

    allocations = Bundle("allocations")

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(INVENTORY, chip_rule)
        self.held = {}
        self.waiting = []
        self.free = {device.id: UNITS_PER_DEVICE for device in DEVICES}
        self.collected = []

    def ahead(self, ticket):
        """Rivals that wait in front of a ticket, or of a newcomer."""
        return [
            other
            for other in self.waiting
            if other is not ticket
            and (-other.priority, other.number) < (-ticket.priority, ticket.number)
            and wanted(other.request) & wanted(ticket.request)
        ]

    def book(self, allocation):
        self.held[allocation.id] = allocation
        for grant in allocation.grants:
            assert legal(grant.term, [share.device for share in grant.shares], chip_rule)
            for share in grant.shares:
                self.free[share.device.id] -= share.units
        self.collected.append(allocation)

    def settle(self):
        """Book the requests placed since the last call: none may have passed a rival that still waits."""
        placed = [ticket for ticket in self.waiting if ticket.allocation]
        self.waiting = [ticket for ticket in self.waiting if not ticket.allocation]
        for ticket in placed:
            assert not self.ahead(ticket)
            self.book(ticket.allocation)

    @rule(text=REQUESTS, priority=st.integers(0, 2))
    def submit(self, text, priority):
        ticket = self.scheduler.submit(text, priority=priority)
        free_now = possible(DEVICES, self.free, ticket.request, chip_rule)
        assert bool(ticket.allocation) == (free_now and not self.ahead(ticket))
        self.waiting.append(ticket)
        self.settle()

    @rule(text=REQUESTS)
    def allocate(self, text):
        before = dict(self.free)
        rivals = [ticket for ticket in self.waiting if wanted(ticket.request) & wanted(parse_request(text))]
        fits = not rivals and possible(DEVICES, before, parse_request(text), chip_rule)
        assert self.scheduler.why(text).fits_now == fits
        try:
            allocation = self.scheduler.allocate(text)
        except NotFreeError:
            assert not fits
        else:
            assert fits
            self.book(allocation)

    @precondition(lambda self: self.collected)
    @rule(target=allocations)
    def collect(self):
        collected, self.collected = self.collected, []
        return multiple(*collected)

    @rule(allocation=consumes(allocations))
    def release(self, allocation):
        self.scheduler.release(allocation)
        del self.held[allocation.id]
        for share in allocation.shares:
            self.free[share.device.id] += share.units
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        ticket = data.draw(st.sampled_from(self.waiting))
        assert ticket.cancel()
        self.waiting.remove(ticket)
        self.settle()

    @invariant()
    def the_books_agree(self):
        assert {device.id: self.scheduler.free(device.id) for device in DEVICES} == self.free
        assert all(0 <= units <= UNITS_PER_DEVICE for units in self.free.values())
        for device in DEVICES:
            holders = {key for key, allocation in self.held.items() if device.id in {d.id for d in allocation.devices}}
            assert {allocation.id for allocation in self.scheduler.holders(device.id)} == holders

    @invariant()
    def no_request_waits_that_could_be_served(self):
        assert list(self.scheduler.pending()) == sorted(self.waiting, key=lambda each: (-each.priority, each.number))
        for ticket in self.waiting:
            if not self.ahead(ticket):
                assert not possible(DEVICES, self.free, ticket.request, chip_rule)
                assert not ticket.why().fits_now


TestSchedulerModel = SchedulerModel.TestCase
TestSchedulerModel.settings = settings(max_examples=length(10, 60), stateful_step_count=30, deadline=None)
