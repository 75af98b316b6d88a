"""Any sequence of claims, releases and deaths of real processes, against a few lines that say what must come out."""

import os
import signal

import pytest
from anyaccel.ledger import Ledger
from anyaccel.ledger.entries import boot
from claimant import Claimant, ClaimantError, eventually
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

DEVICES = ("a", "b", "c")
UNITS = st.sampled_from([1, 2500, 5000, 7500, 10_000])


class Machine(RuleBasedStateMachine):
    """Claimants that come, claim, give back, fork, stop, go on and die."""

    nest = None
    base = None
    claimants = Bundle("claimants")

    def __init__(self):
        super().__init__()
        Machine.count = getattr(Machine, "count", 0) + 1
        self.path = self.base / f"state-{Machine.count}"
        self.path.mkdir(mode=0o700)
        (self.path / f"checked.{boot()}.{os.geteuid()}").touch()
        self.ledger = Ledger.open({"ANYACCEL_STATE_DIR": str(self.path)})
        self.held = []  # [claimant or None, child or None, {device: units}] for each lease, oldest first
        self.all = []

    def free(self, device):
        return 10_000 - sum(choice.get(device, 0) for _, _, choice in self.held)

    @rule(target=claimants)
    def come(self):
        claimant = Claimant(self.nest)
        self.all.append(claimant)
        claimant.do(f"open_ledger({str(self.path)!r})")
        return claimant

    @rule(claimant=claimants, units=UNITS, count=st.integers(1, 3), devices=st.permutations(DEVICES))
    def claim(self, claimant, units, count, devices):
        free = [device for device in devices if self.free(device) >= units]
        code = f"take(*{devices!r}, units={units}, count={count})"
        if len(free) < count:
            with pytest.raises(ClaimantError, match="DevicesBusyError"):
                claimant.do(code)
        else:
            choice = claimant.do(code)
            assert choice == dict.fromkeys(free[:count], units)
            self.held.append([claimant, None, choice])

    @rule(claimant=claimants)
    def give(self, claimant):
        own = [lease for lease in self.held if lease[0] is claimant]
        if own:
            claimant.do("give()")
            self.held.remove(own[-1])

    @rule(claimant=claimants)
    def fork(self, claimant):
        """A child that carries all leases of its parent, and nothing else."""
        child = claimant.do("pid = os.fork()\nif pid == 0:\n    time.sleep(600)\n    os._exit(0)\nresult = pid")
        for lease in self.held:
            if lease[0] is claimant:
                if lease[1]:
                    os.kill(lease[1], signal.SIGKILL)
                lease[1] = child

    @rule(claimant=consumes(claimants))
    def die(self, claimant):
        claimant.kill()
        for lease in self.held:
            if lease[0] is claimant:
                lease[0] = None
        self.held = [lease for lease in self.held if lease[0] or lease[1]]

    @rule(claimant=claimants)
    def stop_for_a_while(self, claimant):
        claimant.stop()
        self.agrees()
        claimant.signal(signal.SIGCONT)

    @precondition(lambda self: any(child for _, child, _ in self.held))
    @rule()
    def end_a_child(self):
        child = next(child for _, child, _ in self.held if child)
        os.kill(child, signal.SIGKILL)
        for lease in self.held:
            if lease[1] == child:
                lease[1] = None
        self.held = [lease for lease in self.held if lease[0] or lease[1]]

    @invariant()
    def agrees(self):
        expected = sorted((device, units) for _, _, choice in self.held for device, units in choice.items())
        eventually(lambda: sorted((each.device, each.units) for each in self.ledger.leases()) == expected)

    def teardown(self):
        for child in {child for _, child, _ in self.held if child}:  # one may carry several leases
            os.kill(child, signal.SIGKILL)
        for claimant in self.all:
            claimant.close()


@pytest.mark.timeout(300)
def test_the_ledger_agrees_with_its_description(nest, tmp_path):
    Machine.nest, Machine.base = nest, tmp_path
    long = bool(os.environ.get("ANYACCEL_EVERY_STEP"))
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=400 if long else 25,
            stateful_step_count=50 if long else 20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
