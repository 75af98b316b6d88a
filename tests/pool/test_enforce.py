"""Pool(enforce=): the kernel refuses workers the device nodes of others.

Device nodes of this machine stand in for accelerators: A is /dev/zero, B is /dev/full.
"""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.launcher.sandbox import find_obstacle
from system_calls import FORBID

CONFINES = pytest.mark.skipif(bool(find_obstacle()), reason=f"workers cannot be confined here: {find_obstacle()}")

CARDS = (Path(__file__).parents[1] / "vendors" / "cards.py").read_text()
NODES = ("/dev/zero", "/dev/full", "/dev/null")


@pytest.fixture
def acme(install):
    """A simulated vendor whose device nodes are nodes of this machine."""
    return install("cards", CARDS)


def opened(*paths):
    """The name of the error of each, or an empty string."""
    found = []
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY))
            found.append("")
        except OSError as error:
            found.append(errno.errorcode[error.errno])
    return found


def opened_by_a_child(path):
    return subprocess.run(["cat", path], capture_output=True, text=True, check=False).stderr


class Opener:
    """An actor that notes what it could open when it was made."""

    def __init__(self):
        self.at_first = opened(*NODES)

    def look(self):
        return self.at_first, opened(*NODES), aa.current().confined


@CONFINES
@pytest.mark.parametrize("enforce", [True, "try"])
def test_a_worker_opens_its_own_device_alone(pool, enforce):
    confined = pool("A", "sim:A,B", enforce=enforce)
    future = confined.submit(opened, *NODES)
    assert future.result() == ["", "EACCES", ""]
    assert future.allocation.confined
    assert confined.options(needs="B").submit(opened, *NODES).result() == ["EACCES", "", ""]
    assert confined.options(needs=["A", "B"]).submit(opened, *NODES).result() == ["", "", ""]
    assert "Permission denied" in confined.submit(opened_by_a_child, "/dev/full").result()


def test_without_it_nothing_is_closed(pool):
    future = pool("A", "sim:A,B").submit(opened, *NODES)
    assert future.result() == ["", "", ""]
    assert (future.allocation.confined, future.allocation.gaps) == (False, ())


@CONFINES
def test_a_worker_without_devices_opens_none(pool):
    assert pool(None, "sim:A,B", enforce=True).submit(opened, *NODES).result() == ["EACCES", "EACCES", ""]


@CONFINES
def test_a_worker_that_is_kept_stays_confined(pool):
    kept = pool("A", "sim:A,B", enforce=True, max_calls=0)
    pids = set()
    for _ in range(3):
        future = kept.submit(lambda: (os.getpid(), opened(*NODES)))
        pid, seen = future.result()
        pids.add(pid)
        assert seen == ["", "EACCES", ""]
        assert future.allocation.confined
    assert len(pids) == 1


@CONFINES
def test_an_actor_is_confined_before_it_is_made(pool):
    actor = pool("B", "sim:A,B", enforce=True).actor(Opener)
    assert actor.look().result() == (["EACCES", "", ""], ["EACCES", "", ""], True)


@CONFINES
def test_an_initializer_and_a_sandbox_of_the_user_come_after(pool):
    def see():
        os.environ["SEEN"] = os.environ.get("SEEN", "") + opened("/dev/full")[0] + " "

    confined = pool("A", "sim:A,B", enforce=True, sandbox=see, initializer=see)
    assert confined.submit(os.getenv, "SEEN").result() == "EACCES EACCES "


@CONFINES
def test_what_stays_open_is_said_to_both_sides(pool):
    future = pool("A:1", "sim:A:2", enforce=True).submit(lambda: aa.current().gaps)
    (gap, *rest) = future.result()
    assert "is open to the worker: each of its device nodes is needed by a device that the worker holds" in gap
    assert future.allocation.gaps == (gap, *rest)


@CONFINES
@pytest.mark.parametrize("enforce", [False, True])
def test_status_shows_who_is_confined(pool, anyaccel, enforce):
    actor = pool("A", "sim:A,B", enforce=enforce).actor(Opener)
    actor.ready.result()
    shown = anyaccel("status", "--machine", "sim:A,B").stdout
    assert ("(confined)" in shown) == enforce, shown


def test_another_word_is_refused(acme):
    with pytest.raises(aa.UsageError, match="enforce must be one of True, False, 'try'"):
        aa.Pool("A", machine="sim:A,B", enforce="yes")


UNABLE = f"""
import errno, sys
import anyaccel as aa
from anyaccel.errors import EnforcementError
from anyaccel.linux import landlock, system
{FORBID}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="filters on system calls are a part of Linux")
def test_where_the_kernel_cannot_nothing_runs_or_it_is_said(script):
    process = script(
        UNABLE
        + textwrap.dedent("""
        forbid(system.LANDLOCK_CREATE_RULESET, errno.ENOSYS)
        try:
            aa.Pool("A", machine="sim:A,B", enforce=True)
        except EnforcementError as error:
            print(error)
        with aa.Pool("A", machine="sim:A,B", enforce="try") as pool:
            actor = pool.actor(list, "ab")
            actor.ready.result()
            print([record.confined for record in aa.leases(aa.detect("sim:A,B"))])
            actor.close()
            print(*pool.submit(lambda: (aa.current().confined, *aa.current().gaps)).result())
        """)
    )
    out, err = process.communicate(timeout=60)
    assert not err
    refused, recorded, tried = out.splitlines()
    reason = "this kernel has no Landlock, which came with Linux 5.13"
    assert refused.startswith(f"the worker cannot be confined to its devices: {reason}; ")
    assert tried == f"False the worker is not confined to its devices: {reason}"
    assert recorded == "[False]"


@CONFINES
def test_a_refusal_in_the_worker_breaks_the_pool_before_anything_runs(script, tmp_path):
    process = script(
        UNABLE
        + textwrap.dedent(f"""
        forbid(system.LANDLOCK_RESTRICT_SELF, errno.EPERM)
        with aa.Pool("A", machine="sim:A,B", enforce=True) as pool:
            error = pool.submit(open, {str(tmp_path / "ran")!r}, "w").exception(30)
            print(type(error).__name__, type(error.__cause__).__name__)
        """)
    )
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("BrokenPoolError EnforcementError\n", "")
    assert not (tmp_path / "ran").exists()
