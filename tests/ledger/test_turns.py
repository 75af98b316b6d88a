"""Whose turn it is where requests say how long they take, or the machine's configuration has rules."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest
from anyaccel.errors import DevicesBusyError
from anyaccel.ledger import Ledger, Want, machine_policy, tickets
from anyaccel.ledger.entries import hash_device, parse_lease, parse_ticket
from anyaccel.model import Extent
from anyaccel.policy import Limits, Need, Policy

WHOLE = 10_000


def want(count, seconds=None, devices="ab"):
    among = frozenset(devices)
    needs = (Need(count=count, units=WHOLE, among=among),)
    return Want(candidates=among, request=f"APU:{count}", needs=needs, seconds=seconds)


def some(count, devices="ab"):
    def choose(taken):
        free = [device for device in devices if device not in taken]
        return {device: Extent() for device in free[:count]} if len(free) >= count else None

    return choose


@contextlib.contextmanager
def waiting(ledger, in_line, number, wanted, count, **options):
    """A claimant that waits, in a thread, and gives back at once."""
    served = threading.Event()

    def wait():
        with contextlib.suppress(DevicesBusyError):
            ledger.acquire(wanted, some(count), wait=60, **options).release()
            served.set()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        in_line(number)
        yield served
    finally:
        thread.join()


def test_a_lease_says_until_when(ledger, files):
    with ledger.acquire(want(1, 3600), some(1), wait=0) as lease:
        (name,) = files()
        assert parse_lease(name).period.until / 1000 == lease.until
        assert parse_lease(name).period.passed is None
        (record,) = ledger.leases()
        assert record.until - record.since == pytest.approx(3600, abs=120)
    with ledger.acquire(want(1), some(1), wait=0) as lease:
        assert lease.until is None
        assert ledger.leases()[0].until is None


def test_who_ends_in_time_passes_and_says_so(ledger, in_line, files):
    first = ledger.acquire(want(1, 3600), some(1), wait=0)
    with waiting(ledger, in_line, 1, want(2), 2) as served:
        with pytest.raises(DevicesBusyError, match="1 earlier request"):
            ledger.acquire(want(1), some(1), wait=0)
        with pytest.raises(DevicesBusyError, match="1 earlier request"):
            ledger.acquire(want(1, 7200), some(1), wait=0)
        with ledger.acquire(want(1, 600), some(1), wait=0):
            passed = [parse_lease(name).period.passed for name in files() if name.startswith("v2")]
            assert sorted(value is not None for value in passed) == [False, True]
            assert not served.is_set()
        first.release()
    assert served.is_set()


def test_who_waits_passes_once_it_may(ledger, in_line):
    """A request behind others that waits for a device watches leases, wherever it stands."""
    first = ledger.acquire(want(1, 3600), some(1), wait=0)
    second = ledger.acquire(want(1, 3600), some(1), wait=0)
    with waiting(ledger, in_line, 1, want(2), 2) as big:
        with waiting(ledger, in_line, 2, want(1, 60), 1) as small:
            tickets = ledger.tickets()
            assert [ticket.behind for ticket in tickets] == [0, 1]
            assert [ticket.seconds for ticket in tickets] == [None, 60]
            assert tickets[0].starts is not None
            second.release()
        assert small.is_set()
        assert not big.is_set()
        first.release()
    assert big.is_set()


def test_without_a_known_end_no_request_passes(ledger, in_line):
    first = ledger.acquire(want(1), some(1), wait=0)
    with waiting(ledger, in_line, 1, want(2), 2):
        with pytest.raises(DevicesBusyError, match="1 earlier request"):
            ledger.acquire(want(1, 1), some(1), wait=0)
        assert ledger.tickets()[0].starts is None
        first.release()


def test_a_ticket_of_an_older_version_is_not_passed(ledger, claim, in_line, monkeypatch):
    monkeypatch.setattr("anyaccel.ledger.tickets.write_ticket_words", lambda *_: {})
    first = ledger.acquire(want(1, 3600), some(1), wait=0)
    with waiting(ledger, in_line, 1, want(2), 2):
        with pytest.raises(DevicesBusyError, match="1 earlier request"):
            ledger.acquire(want(1, 60), some(1), wait=0)
        first.release()


def test_bodies_that_say_nonsense_decide_nothing(ledger, in_line, state):
    holder = ledger.acquire(want(2), some(2), wait=0)
    with waiting(ledger, in_line, 1, want(2), 2):
        (name,) = (each for each in os.listdir(state) if each.startswith("t1."))
        for body in (b"", b"[]", b"{", b'{"since": "x", "seconds": -1, "needs": [[1], [0, 1, null, []], 5]}', b"\xff"):
            facts = tickets._read_waiting(parse_ticket(name), 5, body)
            assert (facts.seconds, facts.needs) == (None, ())
        ((count, units, among, sizes),) = json.loads((state / name).read_bytes())["needs"]
        assert (count, units, sorted(among), sizes) == (2, WHOLE, sorted(map(hash_device, "ab")), [])
        holder.release()


def test_fair_shares_and_limits_in_one_process(ledger, in_line, monkeypatch):
    """By the owners of files, here all of one user, who is given a number by the rules."""
    rules = Policy(users={os.geteuid(): Limits(devices=1)})
    monkeypatch.setattr("anyaccel.ledger.acquisition.current_policy", lambda *_: rules)
    first = ledger.acquire(want(1), some(1), wait=0)
    with pytest.raises(DevicesBusyError):
        ledger.acquire(want(1), some(1), wait=0)
    with waiting(ledger, in_line, 1, want(1), 1) as served:
        assert not served.is_set()
        first.release()
    assert served.is_set()


def test_a_lease_that_has_ended_puts_no_earlier_request_over_a_limit(ledger, claim, in_line, monkeypatch):
    """Its file is left by a holder that was killed; else the earlier request would seem to block no other one."""
    rules = Policy(users={os.geteuid(): Limits(devices=3)})
    monkeypatch.setattr("anyaccel.ledger.acquisition.current_policy", lambda *_: rules)
    killed = claim()
    killed.do("take('c')")
    killed.kill()
    first = ledger.acquire(want(1, devices="a"), some(1, "a"), wait=0)
    with waiting(ledger, in_line, 1, want(2), 2):
        with pytest.raises(DevicesBusyError, match="1 earlier request is ahead"):
            ledger.acquire(want(1), some(1), wait=0)
        first.release()


SCRIPT = """
import os, sys, json, tempfile
import anyaccel.ledger.ending, anyaccel.ledger.recovery, anyaccel.linux.inotify
import logging, pwd, random, tomllib, unicodedata
import anyaccel.ledger.tickets
from anyaccel.errors import AnyaccelError
from anyaccel.ledger import Ledger, Want
from anyaccel.model import Extent
from anyaccel.policy import Need
anyaccel.linux.system._libc()
ledger = Ledger.open({"ANYACCEL_STATE_DIR": sys.argv[1]})
def want(count, seconds=None):
    among = frozenset("abcd")
    return Want(candidates=among, needs=(Need(count=count, units=10000, among=among),), seconds=seconds)
def some(count):
    return lambda taken: {d: Extent() for d in [d for d in "abcd" if d not in taken][:count]}
def attempt(count, seconds=None, **options):
    try:
        lease = ledger.acquire(want(count, seconds), some(count), wait=0, **options)
    except AnyaccelError as error:
        return [type(error).__name__, str(error), error.hint]
    return [lease.until is not None, lease]
def show(*found):
    print(json.dumps([each[:1] if each[0] in (True, False) else each for each in found]), flush=True)
root = attempt(3)
root[1].release()
show(root)
if not os.fork():
    os.setgroups([]); os.setresgid(61001, 61001, 61001); os.setresuid(61001, 61001, 61001)
    os.environ["XDG_CONFIG_HOME"] = "/nowhere"
    kept = attempt(1)
    show(attempt(3), attempt(1, priority=1), attempt(1, 7200), kept)
    more = attempt(1), attempt(1)
    show(*more)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare(1)")
def test_a_user_cannot_exceed_the_machines_limits(tmp_path):
    """The real file in its real place, in a private mount namespace; as another user, whatever the environment says."""
    import tempfile

    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        os.mkdir(f"{parent}/state")
        os.chmod(f"{parent}/state", 0o1777)
        configuration = "[limits]\ndevices = 2\ntime = '1h'\npriority = 0\n"
        mounts = (
            f"cp /etc/passwd /etc/group {parent} && mount -t tmpfs none /etc && cp {parent}/passwd {parent}/group /etc"
            ' && mkdir /etc/anyaccel && printf %s "$1" > /etc/anyaccel/config.toml'
            f' && exec {sys.executable} -c "$2" {parent}/state'
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", mounts, "sh", configuration, textwrap.dedent(SCRIPT)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    root, asked, more = map(json.loads, done.stdout.splitlines())
    assert root == [[False]]
    devices, priority, seconds, kept = asked
    assert devices[:2] == ["LimitError", "what was asked for can never fit: 3 devices are over your limit of 2."]
    assert devices[2] == "ask for 2 devices at most; the administrator can raise 'devices' in /etc/anyaccel/config.toml"
    assert priority[1].endswith("can never fit: a priority of 1 is over your limit of 0.")
    assert seconds[1].endswith("can never fit: a time of 2h is over your limit of 1h.")
    assert kept == [True]  # who gives no time gets the longest
    assert more[0] == [True]
    assert more[1][0] == "DevicesBusyError"
    assert not os.path.exists("/etc/anyaccel")


def test_looking_does_not_mind_a_wrong_configuration(ledger, monkeypatch):
    def wrong(state):
        raise machine_policy.ConfigurationError("it is wrong")

    monkeypatch.setattr(machine_policy, "current_policy", wrong)
    assert machine_policy.policy_for_display(ledger.state).plain
    assert Ledger.open({"ANYACCEL_STATE_DIR": ledger.path}).tickets() == ()


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_the_directory_is_asked_under_a_lock_by_the_same_rule(ledger, in_line, seconds):
    """No request slips in between: one that came in front after the choice is seen before it is published."""
    first = ledger.acquire(want(1, 3600), some(1), wait=0)
    entered = []

    def choose(taken):
        if not entered:
            entered.append(waiting(ledger, in_line, 1, want(2), 2))
            entered[0].__enter__()
        return some(1)(taken)

    with contextlib.ExitStack() as stack:
        if seconds is None:
            with pytest.raises(DevicesBusyError):
                ledger.acquire(want(1, seconds), choose, wait=0)
        else:
            stack.enter_context(ledger.acquire(want(1, seconds), choose, wait=0))
        stack.callback(first.release)
    entered[0].__exit__(None, None, None)
