"""Drained and reserved devices: no new request gets them, running leases go on, and only the administrator decides."""

import grp
import json
import os
import pwd
import subprocess
import sys
import time

import pytest
from anyaccel.errors import LedgerError
from anyaccel.ledger import Want, entries, machine_policy, tickets
from anyaccel.ledger.entries import boot, hash_device
from anyaccel.model import Extent
from anyaccel.policy import Need
from claimant import ClaimantError

ALICE = 61_001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
TIMED = """
def timed(seconds):
    want = Want(candidates=frozenset("a"), seconds=seconds)
    leases.append(ledger.acquire(want, chooser("a"), wait=0))
"""

NEEDY = """
from anyaccel.policy import Need

def needy(wait):
    need = Need(count=1, units=10_000, among=frozenset("a"))
    want = Want(candidates=frozenset("a"), seconds=60.0, needs=(need,))
    leases.append(ledger.acquire(want, chooser("a"), wait=wait))
"""


def only_a(taken):
    return None if "a" in taken else {"a"}


def become(claimant, state, uid=ALICE):
    """Make a claimant another user."""
    os.chmod(state, 0o1777)
    claimant.do("import grp, pwd, logging, anyaccel.linux.inotify; anyaccel.linux.system._libc()")
    (state / f"checked.{boot()}.{uid}").touch()
    os.chown(state / f"checked.{boot()}.{uid}", uid, -1)
    claimant.do(f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})")
    claimant.do(f"open_ledger({str(state)!r})")


def test_a_running_lease_goes_on_and_no_request_starts(claim, ledger, in_line):
    holder, other, waiter = claim(), claim(), claim()
    holder.do("take('a')")
    drain = ledger.block(["a"], "the fan is loud")
    assert [record.state for record in ledger.leases()] == ["held", "drained"]
    holder.do("give()")
    with pytest.raises(ClaimantError, match=r"a is drained by .*: the fan is loud"):
        other.do("take('a')")
    assert other.do("take('a', 'b')") == {"b": 10_000}
    waiter.begin("take('a', wait=600)")
    in_line(1)
    assert [ticket.starts for ticket in ledger.tickets()] == [None]
    ledger.remove_blocks([drain.id])
    assert waiter.end() == {"a": 10_000}


def test_a_device_whose_name_has_the_hash_of_a_drained_one_is_not_drained(claim, ledger):
    """The two names have the same CRC-32."""
    assert hash_device("acme/plumless") == hash_device("acme/buckeroo")
    ledger.block(["acme/plumless"], "")
    assert claim().do("take('acme/buckeroo')") == {"acme/buckeroo": 10_000}
    with pytest.raises(ClaimantError, match="plumless is drained"):
        claim().do("take('acme/plumless')")


def test_a_request_for_drained_devices_alone_holds_up_no_other(claim, ledger, in_line):
    first, second, third = claim(), claim(), claim()
    ledger.block(["a"], "")
    first.begin("take('a', wait=600)")
    in_line(1)
    second.do("take('b')")
    third.begin("take('a', 'b', wait=600)")
    in_line(2)
    assert [ticket.behind for ticket in ledger.tickets()] == [0, 0]
    second.do("give()")
    assert third.end() == {"b": 10_000}


def test_a_lease_that_ends_before_a_reservation_begins_may_start(claim, ledger):
    begin = time.time() + 3600
    more = {"user": ALICE, "note": "", "request": "a"}
    made = ledger.block("a", begin=begin, end=begin + 60, **more)
    assert made.devices == ("a",)
    claimant = claim()
    claimant.do(TIMED)
    claimant.do("timed(60.0); give()")
    for seconds in ("3700.0", "None"):
        with pytest.raises(ClaimantError, match=f"a is reserved for {ALICE} from "):
            claimant.do(f"timed({seconds})")
    claimant.do("timed(60.0)")
    assert ledger.find_leased(begin) == frozenset()  # a lease with this end may be held no more
    assert ledger.find_leased(time.time() + 1) == {"a"}
    ledger.remove_blocks([made.id])
    claimant.do("give(); timed(None)")
    assert ledger.find_leased(begin) == {"a"}


def test_a_reservation_that_has_ended_is_forgotten(claim, ledger):
    now = time.time()
    ledger.block("a", begin=now - 60, end=now - 1, user=ALICE, note="", request="a")
    assert ledger.blocks() == ()
    claim().do("take('a')")


def test_a_ticket_that_could_not_be_read_once_is_read_again(claim, ledger, in_line, monkeypatch):
    """As when no descriptor is free at that moment: its time limit would be unknown to this process for ever."""
    holder, waiter = claim(), claim()
    holder.do("take('a')")
    waiter.do(NEEDY)
    waiter.begin("needy(600)")
    in_line(1)
    monkeypatch.setattr(tickets, "_waiting", {})
    with monkeypatch.context() as scarce:
        scarce.setattr(entries, "read_body", lambda *_: b"")
        assert [ticket.seconds for ticket in ledger.tickets()] == [None]
    assert [ticket.seconds for ticket in ledger.tickets()] == [60.0]


@needs_root
def test_its_user_gets_a_reserved_device_before_earlier_requests(claim, ledger, state, in_line):
    now = time.time()
    ledger.block("a", begin=now - 60, end=now + 3600, user=ALICE, note="course", request="a")
    earlier, alice = claim(), claim()
    earlier.begin("take('a', wait=600)")
    in_line(1)
    become(alice, state)
    assert alice.do("take('a')") == {"a": 10_000}
    alice.do("give()")
    ledger.remove_blocks([block.id for block in ledger.blocks()])
    assert earlier.end() == {"a": 10_000}


@needs_root
def test_its_user_gets_reserved_devices_first_for_a_request_of_any_device(claim, ledger, state, in_line):
    """An earlier request for the other devices does not block it, and the reserved device is preferred to free ones."""
    now = time.time()
    ledger.block("a", begin=now - 60, end=now + 3600, user=ALICE, note="course", request="a")
    holder, earlier, alice, second = claim(), claim(), claim(), claim()
    become(alice, state)
    assert alice.do("take('b', 'a')") == {"a": 10_000}
    alice.do("give()")
    holder.do("take('b')")
    earlier.begin("take('a', 'b', 'c', count=2, wait=600)")
    in_line(1)
    anyone = Want(candidates=frozenset("abc"))
    assert ledger.count_ahead(anyone, 0, only_a) == 1
    ask = "ledger.count_ahead(Want(candidates=frozenset('abc')), 0, chooser('cba'))"
    assert alice.do(ask) == 0
    assert alice.do("take('c', 'b', 'a', wait=600)") == {"a": 10_000}
    assert alice.do(ask) == 1
    become(second, state)
    second.begin("take('c', 'b', 'a', wait=600)")
    in_line(2)
    alice.do("give()")
    assert second.end() == {"a": 10_000}  # the device is free before the earlier request is served
    assert earlier.busy()
    holder.do("give()")
    assert earlier.end() == {"b": 10_000, "c": 10_000}


@needs_root
@pytest.mark.parametrize("held", ["", "a", "d"])
def test_a_request_for_more_devices_than_are_reserved_gets_those_and_as_few_others_as_it_needs(
    claim, ledger, state, held
):
    now = time.time()
    reserved = dict.fromkeys("ab")
    more = {"user": ALICE, "note": "course", "request": "a b"}
    ledger.block(reserved, begin=now - 60, end=now + 3600, **more)
    alice, holder = claim(), claim()
    become(alice, state)
    if held:
        (alice if held in reserved else holder).do(f"take({held!r})")
    chosen = {"": "abe", "a": "bde", "d": "abf"}[held]
    assert alice.do("take('c', 'd', 'e', 'f', 'b', 'a', count=3)").keys() == set(chosen)


@needs_root
def test_members_of_a_group_are_served_as_the_user_of_a_reservation(claim, ledger, state, in_line):
    now = time.time()
    member, group = pwd.getpwnam("daemon"), grp.getgrnam("daemon")
    ledger.block("a", begin=now - 60, end=now + 3600, group=group.gr_gid, note="course", request="a")
    earlier, daemon, alice = claim(), claim(), claim()
    earlier.begin("take('a', wait=600)")
    in_line(1)
    become(daemon, state, member.pw_uid)
    assert daemon.do("take('b', 'a')") == {"a": 10_000}
    daemon.do("give()")
    become(alice, state)
    with pytest.raises(ClaimantError, match="a is reserved for @daemon from "):
        alice.do("take('a')")
    ledger.remove_blocks([block.id for block in ledger.blocks()])
    assert earlier.end() == {"a": 10_000}


def test_a_reservation_from_before_groups_is_read(ledger, state):
    old = {"id": "1a2b3c4d", "devices": ["a"], "begin": 1.0, "end": time.time() + 600, "user": ALICE, "request": "a"}
    (state / machine_policy.NAME).write_text(json.dumps({"v": 1, "blocks": [old]}))
    (block,) = ledger.blocks()
    assert (block.user, block.group, block.drains) == (ALICE, None, False)


@needs_root
def test_files_of_ended_processes_do_not_make_a_start_unknown(claim, ledger, state, in_line):
    """In a shared directory only their owners can remove them: a lease and a ticket of root, who has left."""
    gone, left, alice, waiter = claim(), claim(), claim(), claim()
    for each in (alice, waiter):
        become(each, state)
        each.do(TIMED + NEEDY)
    gone.do("take('a')")
    left.begin("take('a', wait=600)")
    in_line(1)
    left.kill()
    gone.kill()
    alice.do("timed(3600.0)")
    waiter.begin("needy(600)")
    in_line(1)
    assert len([name for name in os.listdir(state) if name[0] in "tv"]) == 4
    (lease,) = ledger.leases()
    (ticket,) = ledger.tickets()
    assert ticket.starts == pytest.approx(lease.until, abs=2)
    need = Need(count=1, units=10_000, among=frozenset("a"))
    want = Want(candidates=frozenset("a"), seconds=60.0, needs=(need,))
    assert ledger.forecast_start(want) == pytest.approx(lease.until + 60, abs=2)


@needs_root
def test_only_root_and_the_owner_of_the_directory_decide(claim, ledger, state):
    alice = claim()
    become(alice, state)
    with pytest.raises(ClaimantError, match="LeasePermissionError: only root can drain"):
        alice.do("ledger.change_blocks(list)")
    drain = ledger.block(["a"], "")
    with pytest.raises(ClaimantError, match="LeasePermissionError"):
        alice.do("ledger.change_blocks(lambda blocks: [])")
    with pytest.raises(ClaimantError, match="a is drained"):
        alice.do("take('a')")
    ledger.remove_blocks([drain.id])
    (state / machine_policy.NAME).unlink()
    forged = json.dumps({"v": 1, "blocks": [{"id": "x", "devices": ["a"], "reason": "mine"}]})
    alice.do(f"print(forged := {forged!r}, file=open({str(state / machine_policy.NAME)!r}, 'w'))")
    assert ledger.blocks() == ()
    assert claim().do("take('a')") == {"a": 10_000}
    ledger.block(["b"], "")  # the file of another user is replaced
    assert [block.devices for block in ledger.blocks()] == [("b",)]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"v": 2}', '{"v": 1, "blocks": 3}', "{" * 9999),
        '{"v": 1, "blocks": [3, {}, {"devices": 3}]}',
        '{"v": 1, "blocks": [{"devices": ["a"], "user": 5}]}',
        '{"v": 1, "blocks": [{"devices": ["a"], "begin": 1}]}',
        '{"v": 1, "blocks": [{"devices": ["a"], "begin": 1, "end": 9e9, "user": 5, "group": 5}]}',
    ],
)
def test_a_file_that_makes_no_sense_withholds_nothing(claim, ledger, state, text):
    (state / machine_policy.NAME).write_text(text)
    assert ledger.blocks() == ()
    claim().do("take('a')")


def test_blocks_of_the_machines_directory_outlast_a_boot(ledger, state, tmp_path, monkeypatch):
    """A boot empties the directories below /run."""
    monkeypatch.setattr(machine_policy, "MACHINE_WIDE", str(state))
    monkeypatch.setattr(machine_policy, "KEPT", str(tmp_path / "lib" / "blocks.json"))
    (state / machine_policy.NAME).mkdir()  # as any user may in a directory for all; no file counts then
    assert (ledger.blocks(), ledger.leases()) == ((), ())
    with pytest.raises(LedgerError, match=r"blocks\.json cannot be written: .*; .*/lib/blocks\.json has the change"):
        ledger.block(["a"], "")
    (state / machine_policy.NAME).rmdir()
    drain = ledger.blocks()[0]
    assert ledger.blocks() == (drain,)
    ledger.remove_blocks([drain.id])
    assert ledger.blocks() == ()


def test_a_file_of_any_size_takes_no_more_memory_than_blocks(ledger, state):
    with open(state / machine_policy.NAME, "wb") as file:
        os.truncate(file.fileno(), 1 << 42)
    assert ledger.blocks() == ()
    assert ledger.acquire(Want(candidates=frozenset("a")), lambda _: {"a": Extent()}, wait=0).intact


@needs_root
def test_blocks_that_cannot_be_read_are_an_error_of_the_ledger(ledger, state):
    ledger.block(["a"], "")
    code = """
import os, subprocess, sys
from anyaccel.errors import LedgerError
from anyaccel.ledger import Ledger

ledger = Ledger.open()
subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", sys.argv[1]], check=True)
for ask in (ledger.blocks, ledger.leases):
    try:
        ask()
    except LedgerError as error:
        print(error)
"""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this system lets root mount nothing")
    environ = {**os.environ, "ANYACCEL_STATE_DIR": str(state)}
    command = ["unshare", "--mount", sys.executable, "-c", code, str(state / machine_policy.NAME)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.stderr == ""
    assert done.stdout == f"the state directory {state} could not be used: Input/output error\n" * 2
