"""Real signals and forks at random times: a pool serves after any number of them, and no lease is lost."""

import signal

import pytest
from lengths import length
from waiting import PATIENCE

TRIALS = length(6, 20)
FORKS = 3

PROGRAM = """
import os, random, signal, sys, threading, time
import anyaccel as aa
from anyaccel.ledger import Ledger

class Interrupt(BaseException):
    pass

came = []

def interrupt(*_):
    came.append(None)
    raise Interrupt

def ignore_interrupts(unraisable):
    if unraisable.exc_type is not Interrupt:
        sys.__unraisablehook__(unraisable)

class Echo:
    def say(self, word):
        return word

def act(pool, mode):
    if mode == "submit":
        return pool.submit(abs, -7).result()
    if mode == "live":
        return pool.options(max_calls=0).submit(abs, -7).result()
    if mode == "map":
        return list(pool.options(needs=None).map(abs, range(300)))
    if mode == "large":
        return len(pool.submit(bytes, bytearray(1 << 20)).result())
    if mode == "actor":
        with pool.actor(Echo) as echo:
            return echo.say("word").result()
    if mode == "stream":
        return list(pool.stream(range, 5))
    if mode == "cancel":
        futures = [pool.submit(time.sleep, 0.001) for _ in range(4)]
        return [future.cancel() for future in futures]
    with aa.Pool("A1:1", machine="sim:A1:2") as own:
        return own.submit(abs, -7).result()

def trial(pool, mode, number, seconds):
    # Another process would need its time to start; the signal comes to the main thread all the same.
    sender = threading.Timer(seconds, os.kill, (os.getpid(), number))
    came.clear()
    try:
        sender.start()
        act(pool, mode)
        sender.join()
        while not came:  # a finalizer ends with it, too
            time.sleep(0.001)
    except Interrupt:
        return
    except RuntimeError as error:  # of threading's conditions, where it comes between two steps of a wait
        if not isinstance(error.__context__, Interrupt):
            raise

def main():
    mode, number, trials = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(number)
    signal.signal(number, interrupt)
    sys.unraisablehook = ignore_interrupts
    pool = aa.Pool("A1:1", machine="sim:A1:2")
    act(pool, mode)
    began = time.monotonic()
    act(pool, mode)
    took = time.monotonic() - began
    for _ in range(trials):
        trial(pool, mode, number, took * chance.random() * chance.random() * 1.5)
        assert pool.options(needs="A1:2").submit(abs, -1).result(timeout=100) == 1  # whatever was held is free
    pool.shutdown()
    assert not Ledger.open().leases()
    print("served")

main()
"""

WAITING = """
import random, signal, sys, time
import anyaccel as aa

class Interrupt(BaseException):
    pass

due = []

def interrupt(*_):  # comes again and again: one that comes right before the wait does not end that
    if due:
        due.clear()
        raise Interrupt

def wait(wait_once):
    try:
        due.append(None)
        signal.setitimer(signal.ITIMER_REAL, 0.0001 * random.random() + 0.000001, 0.001)
        while True:
            wait_once()
    except Interrupt:
        return

def main():
    signal.signal(signal.SIGALRM, interrupt)
    with aa.Pool() as pool:
        future = pool.submit(time.sleep, 1_000_000)
        try:
            for _ in range(int(sys.argv[2])):
                wait(future.result if sys.argv[1] == "result" else pool.shutdown)
        finally:
            future.cancel()
    print("served")

main()
"""

FORKING = """
import os, random, sys, threading, time, traceback, warnings
import anyaccel as aa
from anyaccel.ledger import Ledger

warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # since 3.12, of each fork below

def child(pool, future):
    try:
        assert not future.cancel() or future.done()
        with aa.Pool("A1:1", machine="sim:A1:2", shared=False) as own:
            assert own.submit(abs, -2).result(timeout=100) == 2
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

def main():
    forks = int(sys.argv[1])
    pool = aa.Pool("A1:1", machine="sim:A1:2", max_calls=0)
    over = threading.Event()
    def work():
        while not over.is_set():
            assert list(pool.map(abs, range(50)))[-1] == 49
            assert pool.options(max_calls=1).submit(abs, -1).result() == 1
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(forks):
        future = pool.submit(time.sleep, 0.01)
        time.sleep(random.random() * 0.02)
        pid = os.fork()
        if not pid:
            child(pool, future)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        future.result(timeout=100)
    over.set()
    thread.join()
    pool.shutdown()
    assert not Ledger.open().leases()
    print("served")

main()
"""


@pytest.mark.timeout(length(300, 3000))
@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("submit", signal.SIGINT),
        ("live", signal.SIGINT),
        ("map", signal.SIGTERM),
        pytest.param("large", signal.SIGINT, marks=pytest.mark.full),
        ("actor", signal.SIGTERM),
        pytest.param("stream", signal.SIGINT, marks=pytest.mark.full),
        pytest.param("cancel", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("with", signal.SIGINT, marks=pytest.mark.full),
    ],
)
def test_an_interrupt_breaks_no_pool_and_loses_no_lease(script, mode, number):
    out, err = script(PROGRAM, arguments=(mode, int(number), TRIALS)).communicate()
    assert (out, err) == ("served\n", "")


@pytest.mark.parametrize("what", ["result", "shutdown"])
def test_an_interrupt_of_a_wait_is_raised_as_it_is(script, what):
    out, err = script(WAITING, arguments=(what, length(2000, 20_000))).communicate()
    assert (out, err) == ("served\n", "")


@pytest.mark.timeout(length(300, 3000))
def test_forks_during_calls_cost_neither_the_pool_nor_the_fork_anything(script):
    out, err = script(FORKING, arguments=(FORKS,)).communicate()
    assert (out, err) == ("served\n", "")


@pytest.mark.parametrize("call", ["os.eventfd", "tempfile.mkdtemp"])
def test_the_handler_of_a_signal_may_submit_while_the_first_call_is_submitted(script, call):
    """While the reactor starts, or the machine's broker opens; what the signal interrupts waits for the handler."""
    with script(f"""
        import os, signal, tempfile
        import anyaccel as aa

        first, other = (aa.Pool(machine="sim:A1:2", shared=False) for _ in range(2))
        answers, call = [], {call}

        def interrupted(*arguments, **options):
            {call} = call
            signal.raise_signal(signal.SIGUSR1)
            return call(*arguments, **options)

        signal.signal(signal.SIGUSR1, lambda *_: answers.append(other.submit(abs, -2)))
        {call} = interrupted
        print(first.submit(abs, -1).result(), *(answer.result() for answer in answers))
    """) as program:
        try:
            assert program.communicate(timeout=PATIENCE) == ("1 2\n", "")
        finally:
            program.kill()
