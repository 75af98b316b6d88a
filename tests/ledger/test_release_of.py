"""Ending a lease from outside: its processes are ended, and what it holds is not touched while they live."""

import os
import subprocess

import pytest
from anyaccel.errors import LeaseNotFoundError, LedgerError
from anyaccel.ledger import Want, ending
from anyaccel.model import Extent
from claimant import state


def test_the_holder_is_asked_to_end(claim, ledger):
    holder = claim()
    holder.do("take('a', 'b', count=2)")
    (lease_id,) = {record.id for record in ledger.leases()}
    assert ledger.end_lease(lease_id) == (holder.pid,)
    assert ledger.leases() == ()


def test_so_are_all_that_carry_it_and_no_other_process(claim, ledger):
    holder, bystander = claim(), claim()
    holder.do("take('a'); other = subprocess.Popen(['sleep', '600']).pid")
    bystander.do("take('b')")
    other = holder.do("other")
    worker = holder.do("subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds).pid")
    holder.kill()
    lease_id = next(record.id for record in ledger.leases() if record.device == "a")
    assert ledger.end_lease(lease_id) == (worker,)
    assert [record.device for record in ledger.leases()] == ["b"]
    assert state(other) not in ("", "Z")
    os.kill(other, 9)


def test_one_that_does_not_end_keeps_its_device(claim, ledger):
    holder = claim()
    holder.do("signal.signal(signal.SIGTERM, signal.SIG_IGN); take('a')")
    (record,) = ledger.leases()
    with pytest.raises(LedgerError, match=f"still held by {holder.pid} after 0.2 s") as caught:
        ledger.end_lease(record.id, grace=0.2)
    assert "--force" in caught.value.hint
    assert len(ledger.leases()) == 1
    assert ledger.end_lease(record.id, grace=0.1, force=True) == (holder.pid,)
    assert ledger.leases() == ()


def test_one_that_ends_while_it_is_looked_for_has_ended(claim, ledger, monkeypatch):
    """Its lease still counted at the look before: the next look finds neither the lease nor a process."""
    holder = claim()
    holder.do("signal.signal(signal.SIGTERM, signal.SIG_IGN); take('a')")
    (record,) = ledger.leases()
    find = ending._find_holders

    def find_late(*arguments):
        holder.kill()
        return find(*arguments)

    monkeypatch.setattr(ending, "_find_holders", find_late)
    assert ledger.end_lease(record.id, grace=0, force=True) == ()
    assert ledger.leases() == ()


def test_a_stopped_one_is_killed(claim, ledger):
    holder = claim()
    holder.do("take('a')")
    holder.stop()
    (record,) = ledger.leases()
    assert ledger.end_lease(record.id, grace=0.1, force=True) == (holder.pid,)


def test_one_that_is_not_there(ledger):
    for name in ("", "0123456789ab", "../x"):
        with pytest.raises(LeaseNotFoundError, match="is active"):
            ledger.end_lease(name)


def test_ones_own_is_left_alone(ledger):
    with ledger.acquire(Want(candidates=frozenset("a")), lambda taken: {"a": Extent(1)}, wait=0) as lease:
        with pytest.raises(LedgerError, match="held by this very process"):
            ledger.end_lease(lease.id)
        assert not lease.released


def test_a_program_that_replaced_the_holder_keeps_it(claim, ledger):
    holder = claim()
    holder.do("take('a'); leases[0].inherit()")
    holder.begin("os.execvp('sleep', ['sleep', '600'])")
    with open(f"/proc/{holder.pid}/comm") as comm:
        while comm.read().strip() != "sleep":
            comm.seek(0)
    (record,) = ledger.leases()
    assert (record.pid, record.state) == (holder.pid, "held")
    assert ledger.end_lease(record.id) == (holder.pid,)


def test_a_killed_holder_that_was_not_reaped_has_left(ledger, state):
    """A zombie holds nothing any more, and its device is not passed over for another one."""
    code = (
        "import sys; from anyaccel.ledger import Ledger, Want; from anyaccel.model import Extent\n"
        "ledger = Ledger.open({'ANYACCEL_STATE_DIR': sys.argv[1]})\n"
        "lease = ledger.acquire(Want(candidates=frozenset('a')), lambda taken: {'a': Extent()}, wait=0)\n"
        "print('held', flush=True); input()"
    )
    import sys

    def choose(taken):
        return next(({device: Extent()} for device in "ab" if device not in taken), None)

    process = subprocess.Popen([sys.executable, "-c", code, str(state)], stdin=-1, stdout=-1)
    process.stdout.readline()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with ledger.acquire(Want(candidates=frozenset("ab")), choose, wait=30) as lease:
        assert list(lease.devices) == ["a"]
    process.communicate()
