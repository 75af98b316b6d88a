"""A worker that writes nonsense to its descriptors costs its own call, with one clear error, and no other one."""

import contextlib
import os
import socket
import struct
import sys
import time

import anyaccel as aa
import pytest
from anyaccel.pool import spawning
from anyaccel.pool.messages import MessageKind, dumps, dumps_error, receive
from raw_messages import head, say
from waiting import until

UNREAD = "its answer could not be read"
NOT_GIVEN = "it answered a call that it was not given"


def sparse():
    """Memory that says to be huge, and has nothing behind it."""
    import fcntl

    descriptor = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 42)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def of_nothing():
    return os.open("/dev/null", os.O_RDONLY)


NONSENSE = {
    "nothing": (b"", None, f"{UNREAD}: an empty message"),
    "three bytes": (b"abc", None, UNREAD),
    "a kind that there is not": (head(77), None, "it sent what is no answer \\(a message of the kind 77\\)"),
    "a kind for workers": (head(MessageKind.CALL), None, "it sent what is no answer"),
    "a kind of the fork server's": (head(18), None, "it sent what is no answer"),
    "ready twice": (head(MessageKind.READY), None, "it sent what is no answer"),
    "an answer to another call": (head(MessageKind.RESULT, 0, 1 << 60), None, NOT_GIVEN),
    "memory that was not passed": (head(MessageKind.RESULT, 1), None, UNREAD),
    "a form that there is not": (head(MessageKind.RESULT, 9), None, UNREAD),
    "memory that is no memory": (head(MessageKind.RESULT, 1) + bytes(8), of_nothing, UNREAD),
    "that it cannot be used, without a reason": (head(MessageKind.BROKEN), None, "it sent what is no answer"),
    "memory of no length": (head(MessageKind.RESULT, 1) + b"abc", of_nothing, UNREAD),
    "memory that is not there": (
        head(MessageKind.RESULT, 1) + struct.pack("=QQ", 8, 1 << 41), sparse, f"{UNREAD}: shared memory must be sealed",
    ),
    "a descriptor": (head(MessageKind.RESULT), of_nothing, f"{UNREAD}: it passes descriptors along"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_nonsense_costs_the_call_that_says_it(pool, case, kept):
    packet, make, words = NONSENSE[case]
    one = pool("A1:1", max_calls=0 if kept else 1)
    other = one.submit(lambda: (time.sleep(0.1), "other")[1])
    server, before = spawning.fork_server().pid, len(os.listdir("/proc/self/fd"))

    def speak():
        return say(packet, [make()] if make else [])

    ends = rf"was ended: {words}"
    if not packet:  # where it has ended before that is read, it reads like the end
        ends += "|ended with exit status 0 before it answered"
    with pytest.raises(aa.BrokenWorkerError, match=rf"the worker .* that ran .*speak ({ends})"):
        one.submit(speak).result(60)
    assert other.result(60) == "other"
    assert one.submit(pow, 2, 5).result(60) == 32
    assert spawning.fork_server().pid == server
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4, "what was passed to be closed")


def test_what_an_empty_packet_passes_is_closed(tmp_path):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(tmp_path / "passed", "w") as passed:
        socket.send_fds(theirs, [b""], [passed.fileno()])
        with pytest.raises(ValueError, match="an empty message"):
            receive(ours)
    with os.scandir("/proc/self/fd") as opened:
        assert passed.name not in [os.readlink(each.path) for each in opened if os.path.exists(each.path)]


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "with an initializer"])
def test_a_worker_that_says_it_could_not_be_set_up_breaks_no_pool(pool, prepared):
    options = {"initializer": int} if prepared else {}
    one = pool(**options)

    def lie():
        return say(head(MessageKind.BROKEN) + dumps_error(ValueError("a lie"), "").data)

    with pytest.raises((aa.BrokenWorkerError, ValueError), match=r"it sent what is no answer|a lie") as caught:
        one.submit(lie).result(60)
    assert not isinstance(caught.value, aa.BrokenPoolError)
    assert one.submit(pow, 2, 5).result(60) == 32


@pytest.mark.parametrize("body", [b"", b"\x80", dumps(7).data, dumps((1, 2, 3)).data, dumps((b"x", "s", "t")).data])
def test_an_exception_that_is_none_is_an_error_of_its_call(pool, body):
    one = pool()
    current = one.submit(pow, 1, 1)
    current.result()

    def lie(number):
        return say(head(MessageKind.ERROR, 0, number) + body)

    from anyaccel.pool import call

    number = next(call._numbers) + 1
    with pytest.raises(aa.RemoteError, match="cannot be"):
        one.submit(lie, number).result(60)
    assert one.submit(pow, 2, 5).result(60) == 32


@pytest.mark.parametrize(
    "answer",
    [
        7,
        (1, 2, 3),
        ([1], None, "soon"),
        ([1], None, float("nan")),
        ([1], None, -1.0),
        ([1, 2], None, 0.1),
        ([], None, 0.1),
    ],
    ids=str,
)
def test_a_map_whose_worker_sends_no_answer_to_a_batch_fails_in_its_place(pool, answer):
    def lie(number):
        if number == 2:
            frame = sys._getframe()
            while "message" not in frame.f_locals:
                frame = frame.f_back
            say(head(MessageKind.RESULT, 0, frame.f_locals["message"].number) + dumps(answer).data)
        return number

    one = pool()
    found = one.map(lie, range(50), timeout=60)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(aa.RemoteError, match="no answer to a batch of 1 call"):
        next(found)
    assert one.submit(pow, 2, 5).result(60) == 32


def test_an_actor_that_says_nonsense_has_gone_and_says_why(pool):
    class Liar:
        def speak(self):
            return say(head(MessageKind.RESULT, 0, 1 << 60))

    one = pool("A1:1")
    actor = one.actor(Liar)
    with pytest.raises(aa.BrokenWorkerError, match="it answered a call that it was not given"):
        actor.speak().result(60)
    with pytest.raises(aa.BrokenWorkerError, match=r"the actor .*Liar has gone"):
        actor.speak().result(60)
    assert one.submit(pow, 2, 5).result(60) == 32


@pytest.mark.needs("nvidia")
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"null"], ids=repr)
def test_a_lease_whose_file_was_written_to_can_be_quarantined(tmp_path, body):
    with aa.acquire("H100:1", machine="sim:H100:1") as hold:
        for descriptor in hold.fds:
            if os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, body, 0)
        hold.lease.quarantine("it is stuck")
        (record,) = aa.leases(aa.detect("sim:H100:1"))
    assert (record.state, record.reason) == ("quarantined", "it is stuck")


def test_what_is_closed_by_a_call_is_told(pool):
    one = pool("A1:1")
    with pytest.raises(aa.BrokenWorkerError, match="before it answered"):
        one.submit(os.closerange, 3, 200).result(60)
    assert one.submit(pow, 2, 5).result(60) == 32
    assert sys.exc_info() == (None, None, None)


def test_an_initializer_that_writes_nonsense_costs_its_worker_and_not_the_pool(pool, tmp_path):
    # Each worker of this time: which of them takes the call is not certain, since one is forked ahead.
    def initialize(path):
        if not path.exists():
            say(head(MessageKind.BROKEN) + b"junk")

    one = pool(max_workers=1, initializer=initialize, initargs=(tmp_path / "well",))
    with pytest.raises(aa.BrokenWorkerError, match="it sent what is no answer"):
        one.submit(abs, -1).result()
    (tmp_path / "well").touch()

    def works():
        with contextlib.suppress(aa.BrokenWorkerError):  # one was forked before
            return one.submit(abs, -1).result() == 1

    until(works, "a call of a worker that is well")
