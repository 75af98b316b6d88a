"""A forked child renews locks and tidies up."""

import subprocess
import sys

HELD = """
import os, sys, threading
from anyaccel.linux.fork import renew_in_child, tidy_in_child

lock, reentrant = renew_in_child(threading.Lock()), renew_in_child(threading.RLock())
held, done = threading.Event(), threading.Event()

def hold():
    with lock, reentrant:
        held.set()
        done.wait()

@tidy_in_child
def fail():
    raise ValueError("what one has to tidy up is no matter of the others")

@tidy_in_child
def write():
    with lock, reentrant:
        os.write(1, b"tidied ")

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    with lock, reentrant:
        os.write(1, b"free")
    os._exit(0)
os.waitpid(child, 0)
assert lock.locked()
done.set()
"""


def test_locks_are_free_in_a_child_and_each_function_is_called():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "tidied free"), done.stderr
    assert "ValueError: what one has to tidy up" in done.stderr
