"""What a gang of one does on every engine."""

import os
import socket
import time

import anyaccel as aa
import pytest
from waiting import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]

WAIT = 90
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def place():
    return [os.environ[name] for name in PLACE], os.environ["ACME_VISIBLE"].split(",")


def meet(*arguments):
    """Exchange a word over the port that all were told; return what the others said, and where we are."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    held = os.environ["ANYACCEL_STATE_DIR"], aa.current().devices
    if rank:
        with until(lambda: reached(address), "rank 0") as made:
            made.sendall(f"{rank} of {count}".encode())
        return [], held
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        server.settimeout(WAIT)
        return sorted(received(server) for _ in range(count - 1)), held


def reached(address):
    try:
        return socket.create_connection(address)
    except ConnectionRefusedError:
        return None


def received(server):
    with server.accept()[0] as made:
        return made.makefile().read()


def fail_at(rank, directory):
    """Fail at one rank; at all others, wait to be ended."""
    (directory / os.environ["RANK"]).write_text(str(os.getpid()))
    if int(os.environ["RANK"]) == rank:
        until(lambda: len(list(directory.iterdir())) == int(os.environ["WORLD_SIZE"]), "the others")
        raise LookupError("nothing here")
    time.sleep(2 * WAIT)


def ended(directory):
    """Whether all that have begun have gone."""
    return not any(os.path.exists(f"/proc/{file.read_text()}") for file in directory.iterdir())


def test_a_gang_of_one(pool):
    gang = pool("A1:2").gang(1, place)
    [(variables, mask)] = gang.result(WAIT)
    assert variables == ["0", "1", "0", "1"]
    assert mask == [device.id for device in gang.members[0].allocation.devices]
    assert len(mask) == 2
    assert gang.done()
    assert not gang.cancel()


def test_a_gang_without_needs_sees_no_device(pool):
    assert pool().gang(1, place).result(WAIT) == [(["0", "1", "0", "1"], [""])]


def test_the_port_is_there_to_listen_at(pool):
    [(others, _)] = pool().gang(1, meet).result(WAIT)
    assert others == []


def test_variables_of_a_gang_are_gone_in_the_next_call(pool):
    kept = pool(max_calls=0)
    kept.gang(1, place).result(WAIT)
    assert kept.submit(os.getenv, "RANK").result(WAIT) is None


def test_an_exception_says_whose_it_is(pool):
    gang = pool("A1:1").gang(1, divmod, 1, 0)
    with pytest.raises(ZeroDivisionError) as caught:
        gang.result(WAIT)
    assert caught.value.__notes__ == ["It is rank 0 of a gang of 1; the others were ended."]


@pytest.mark.parametrize(
    ("options", "hosts", "said"),
    [
        ({}, 0, "hosts must be a whole number, 1 or more (got 0)"),
        ({}, True, "hosts must be a whole number, 1 or more (got True)"),
        ({}, "2", "hosts must be a whole number, 1 or more (got '2')"),
        ({"retries": 1}, 1, "a gang is not run again when a worker has died; retries must be 0 for it"),
    ],
)
def test_gangs_that_make_no_sense_are_refused(pool, options, hosts, said):
    with pytest.raises(aa.UsageError) as caught:
        pool("A1:1", **options).gang(hosts, place)
    assert str(caught.value) == said


def test_nothing_is_taken_after_shutdown(pool):
    closed = pool("A1:1")
    closed.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        closed.gang(1, place)
