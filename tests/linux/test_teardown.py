"""Teardown of process trees: ask, then kill, wherever the processes went."""

import os
import signal
import subprocess
import sys

from anyaccel.linux import process
from anyaccel.linux.teardown import Teardown, combine_finds, find_tree
from holders import found_by
from waiting import until

CHAIN = """
import os, signal, sys
from anyaccel.linux import process
from anyaccel.linux.teardown import Teardown, find_tree

process.adopt_orphans()
read, write = os.pipe()
top = os.fork()
if not top:
    for _ in range(150):
        if os.fork():
            break
    else:
        os.write(write, b"x")
    signal.alarm(240)  # should the test fail
    signal.pause()
os.read(read, 1)
sys.setrecursionlimit(100)
rest = Teardown(find_tree({top: process.start_time(top)}), grace=1000)
rest.run()
process.reap_children()
print(len(rest.asked), process.children(os.getpid()))
"""


def start(script, **options):
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, **options)


def test_a_chain_of_processes_deeper_than_calls_may_be():
    done = subprocess.run([sys.executable, "-c", CHAIN], capture_output=True, text=True, check=False, timeout=200)
    assert (done.stdout, done.stderr) == ("151 []\n", "")


def test_a_tree_is_asked_to_end_and_what_does_not_is_killed():
    with start("trap '' TERM; sleep 1000 & echo ready; wait; exec sleep 1000") as stubborn:
        assert stubborn.stdout.readline() == "ready\n"
        rest = Teardown(find_tree({stubborn.pid: process.start_time(stubborn.pid)}), grace=1000)
        assert rest.step() is not None
        assert stubborn.pid in rest.asked
        assert stubborn.poll() is None
        rest.kill()
        rest.run()
        assert rest.own == {}
        assert stubborn.wait() == -signal.SIGKILL


def test_time_that_is_left_becomes_less_and_never_more():
    with start("trap '' TERM; echo ready; sleep 1000 & wait; exec sleep 1000") as stubborn:
        assert stubborn.stdout.readline() == "ready\n"
        rest = Teardown(find_tree({stubborn.pid: process.start_time(stubborn.pid)}), grace=float("inf"))
        rest.step()
        rest.allow(0.0)
        rest.allow(1000.0)
        rest.run()
        assert stubborn.wait() == -signal.SIGKILL


def test_an_orphan_of_the_process_group_is_of_the_tree_and_a_stranger_is_not():
    code = (
        "import os, subprocess\n"
        "from anyaccel.linux import process\n"
        "from anyaccel.linux.teardown import Teardown, find_tree\n"
        "process.adopt_orphans()\n"
        "script = '(sleep 1000 & echo $!); exec sleep 1000'\n"
        "run = [subprocess.Popen(['sh', '-c', script], stdout=-1, start_new_session=True) for _ in range(2)]\n"
        "orphans = [int(each.stdout.readline()) for each in run]\n"
        "rest = Teardown(find_tree({run[0].pid: process.start_time(run[0].pid)}), grace=1000)\n"
        "rest.run()\n"
        "print(rest.asked >= {run[0].pid, orphans[0]}, rest.asked & {run[1].pid, orphans[1]}, run[1].poll())\n"
        "print([process.gone(pid, 0) for pid in orphans])\n"
        "os.killpg(run[1].pid, 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert (done.stdout, done.stderr) == ("True set() None\n[True, False]\n", "")


def test_a_tree_is_found_by_either_way(monkeypatch):
    with start("sleep 1000 & sleep 1000 & echo ready; wait") as parent:
        assert parent.stdout.readline() == "ready\n"
        find = find_tree({parent.pid: process.start_time(parent.pid)})
        found = found_by(find)
        assert len(found) == 3
        monkeypatch.setattr(os.path, "exists", lambda _: False)  # a kernel without lists of children
        assert found_by(find) == found
        assert found_by(find_tree({parent.pid: process.start_time(parent.pid)})) == found
        monkeypatch.undo()
        Teardown(find, grace=0).run()


def test_a_process_is_ended_as_soon_as_it_is_found():
    """A process that replaces itself all the time has another id when a long scan is over."""
    with start("exec sleep 1000") as moving:

        def look_long(tell):
            find(tell)
            moving.wait(60)
            return True

        find = find_tree({moving.pid: process.start_time(moving.pid)})
        Teardown(look_long, grace=0).run()
        assert moving.wait() == -signal.SIGKILL


def test_a_number_that_another_process_got_is_left_alone():
    with start("sleep 1000") as stranger:
        rest = Teardown(find_tree({stranger.pid: process.start_time(stranger.pid) - 1}), grace=0)
        rest.run()
        assert (rest.asked, stranger.poll()) == (set(), None)
        stranger.kill()


def test_two_ways_to_find_are_one():
    with start("exec sleep 1000") as one, start("exec sleep 1000") as two:
        trees = [find_tree({each.pid: process.start_time(each.pid)}) for each in (one, two)]
        rest = Teardown(combine_finds(*trees), grace=1000)
        rest.run()
        assert rest.asked == {one.pid, two.pid}
        assert [one.wait(), two.wait()] == [-signal.SIGTERM] * 2


def test_children_that_have_ended_are_reaped_but_those_that_are_spared():
    one, two = (os.fork() or os._exit(0) for _ in range(2))
    until(lambda: process.gone(one, 0) and process.gone(two, 0), "the end of both")
    process.reap_children({two})
    assert one not in process.children(os.getpid())
    assert two in process.children(os.getpid())
    os.waitpid(two, 0)
