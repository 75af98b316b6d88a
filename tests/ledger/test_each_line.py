"""Something happens to the state directory, or to who holds the device, at each line that a claim executes in turn."""

import contextlib
import os
import shutil
import signal
import sys

import anyaccel.ledger
import pytest
from anyaccel.errors import DevicesBusyError
from anyaccel.ledger import Ledger, Want
from anyaccel.model import Extent
from claimant import ClaimantError, eventually
from lengths import length

LEDGER = os.path.dirname(anyaccel.ledger.__file__)
ANY = Want(candidates=frozenset("a"))
STRIDE = length(67, 11)
WAITS = length([0.02], [0, 0.02])
MOST = length(700, 1000)  # of one that waits, which looks again and again
HOLD = """
from anyaccel.linux import mark
lease = ledger.acquire(Want(candidates=frozenset('a'), mark=mark.draw), chooser('a'), wait=0)
mark.put(lease.mark)
result = subprocess.Popen(['sleep', '600']).pid
"""


def one(taken):
    return None if taken.get("a") else {"a": Extent()}


def at_each_line(claim, happen, within=LEDGER, stride=STRIDE):
    """Make a claim anew for each of its lines, have something happen before that one, and yield how it ended.

    Args:
        claim: Makes the claim; it is called until it has fewer lines.
        happen: Called at the line.
        within: How the paths of the files begin whose lines are meant.
        stride: From one of these lines to the next that is tried.
    """
    position, happened = 1, True
    while happened and position < MOST:
        count, happened = 0, False

        def at_line(frame, event, _):
            nonlocal count, happened
            count += event == "line"
            if count == position and not happened:  # noqa: B023 -- it is not called after this round
                happened = True
                happen()
            return at_line

        sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(within) else None)
        try:
            outcome = claim()
        except DevicesBusyError as error:
            outcome = error
        finally:
            sys.settrace(None)
        yield outcome
        position += stride
    assert position > 20


def empty(state):
    for path in state.iterdir():
        path.unlink()


GONE = {"deleted": shutil.rmtree, "emptied": empty}
BECOMES_KEPT = {"left": "lease.leave_to(lease.mark)", "killed": "os.kill(os.getpid(), 9)"}


@pytest.fixture
def claimed(state):
    """Makes a claim in this process, that waits for some seconds."""
    return lambda wait: Ledger.open({"ANYACCEL_STATE_DIR": str(state)}).acquire(ANY, one, wait=wait)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["deleted", "deleted and made", "emptied", "emptied and looked at"])
@pytest.mark.parametrize("wait", WAITS)
def test_the_directory_goes_while_a_process_holds(claim, claimed, state, how, wait):
    holder, other = claim(), claim()
    holder.do("take('a')")

    def happen():
        GONE[how.split()[0]](state)
        if " and " in how:
            other.do("ledger.make()")  # which brings over what is in force

    for outcome in at_each_line(lambda: claimed(wait), happen):
        assert isinstance(outcome, DevicesBusyError)
        other.do("ledger.make()")
        assert other.do("[each.pid for each in ledger.leases()]") == [holder.pid]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("gone", GONE)
def test_the_directory_goes_and_another_process_claims(claim, claimed, state, gone, files):
    """One of the two gets the device, and what is held is listed."""
    other = claim()

    def happen():
        GONE[gone](state)
        with contextlib.suppress(ClaimantError):  # this process has it, or keeps the emptied directory locked
            other.do("import anyaccel.ledger.acquisition as module; module._LOCK_SECONDS_AT_LAST = 0.05; take('a')")

    for outcome in at_each_line(lambda: claimed(0), happen):
        others = other.do("len(leases)")
        assert isinstance(outcome, DevicesBusyError) == bool(others)
        holder = other.pid if others else os.getpid()
        other.do("ledger.make()")
        assert other.do("[each.pid for each in ledger.leases()]") == [holder]
        if others:
            other.do("give()")
        else:
            outcome.release()
        assert files() == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("becomes", BECOMES_KEPT)
@pytest.mark.parametrize("wait", WAITS)
def test_a_lease_becomes_one_that_only_its_mark_keeps(claim, claimed, ledger, becomes, wait):
    holders = []

    def ready():
        holder = claim()
        holders.append((holder, holder.do(HOLD)))
        return claimed(wait)

    for outcome in at_each_line(ready, lambda: holders[-1][0].begin(BECOMES_KEPT[becomes])):
        assert isinstance(outcome, DevicesBusyError)
        eventually(lambda: [each.device for each in ledger.leases()] == ["a"])  # its file may get its name just now
        holder, child = holders[-1]
        holder.close()
        os.kill(child, signal.SIGKILL)
        eventually(lambda: not ledger.leases())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("gone", GONE)
def test_the_directory_goes_and_the_device_becomes_free(claim, claimed, state, gone):
    """The waiting process gets it."""
    holder = claim()

    def ready():
        holder.do("take('a')")
        return claimed(60)

    def happen():
        GONE[gone](state)
        holder.do("give()")

    for lease in at_each_line(ready, happen):
        lease.release()


def test_what_is_being_given_back_is_not_brought_over(claim, claimed, state):
    """By a process that looks for the first time, and takes a deleted file that is locked for one that was lost."""
    other = claim()

    def happen():
        for path in state.glob("checked.*"):
            path.unlink()
        other.do("ledger.make()")

    rounds = at_each_line(lambda: claimed(20).release(), happen, f"{LEDGER}/lease.py", 1)
    for _ in rounds:
        assert other.do("take('a'); give()") is None
