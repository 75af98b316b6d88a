"""A state directory, and processes that compete for devices in it."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from anyaccel.ledger import Ledger, make_block, tickets
from anyaccel.ledger.entries import boot
from claimant import SILENCE, Claimant, eventually


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No waiter is passed because it got no processor for some seconds, as in claimants."""
    monkeypatch.setattr(tickets, "_PATIENCE", SILENCE)


@pytest.fixture(scope="session")
def nest():
    """The process that forks claimants."""
    ours, theirs = socket.socketpair()
    script = str(Path(__file__).parent / "claimant.py")
    with subprocess.Popen([sys.executable, script], stdin=theirs, start_new_session=True) as process:
        theirs.close()
        with ours:
            yield ours
            ours.shutdown(socket.SHUT_RDWR)
        process.wait(30)


@pytest.fixture
def state():
    """A state directory, in which lost leases were looked for before (that has tests of its own).

    Other users get to where it is: each run of pytest closes what all runs have in common to them.
    """
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        directory = Path(parent) / "state"
        directory.mkdir(mode=0o700)
        (directory / f"checked.{boot()}.{os.geteuid()}").touch()
        yield directory


class BlockingLedger(Ledger):
    """A ledger that drains and reserves, as the commands of an extra do."""

    def block(self, devices, note="", **more):
        block = make_block(devices, note, **more)
        self.change_blocks(lambda blocks: [*blocks, block])
        return block

    def remove_blocks(self, ids):
        self.change_blocks(lambda blocks: [block for block in blocks if block.id not in ids])


@pytest.fixture
def ledger(state):
    return BlockingLedger.open({"ANYACCEL_STATE_DIR": str(state)})


@pytest.fixture
def claim(nest, state):
    """Start claimants."""
    claimants = []

    def claim(path=state):
        claimant = Claimant(nest)
        claimants.append(claimant)
        claimant.do(f"open_ledger({str(path)!r})")
        return claimant

    yield claim
    for claimant in claimants:
        claimant.close()


@pytest.fixture
def in_line(ledger):
    """Wait until so many wait, and none of them has the ledger locked any more, as each has while it gets in line."""

    def in_line(count):
        eventually(lambda: len(ledger.tickets()) == count)
        directory = os.open(ledger.path, os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_EX)
        os.close(directory)

    return in_line


@pytest.fixture
def files(state):
    """Names in the state directory, but for the marker of the search for lost leases."""
    return lambda: sorted(name for name in os.listdir(state) if not name.startswith("checked."))
