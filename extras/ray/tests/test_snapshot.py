"""What a node keeps of its inventory, and what is believed of such a file."""

import json
import os
from dataclasses import replace
from pathlib import Path

import anyaccel
import pytest
from anyaccel.errors import StateDirectoryError, UsageError
from anyaccel.launcher.verdicts import leases
from anyaccel_ray.snapshot import read_snapshot, write_snapshot


@pytest.fixture
def inventory(acme, record):
    return anyaccel.detect(record({}, {"health": "unhealthy", "reason": "it fell off the bus."}))


def test_what_was_written_is_read(inventory):
    written = read_snapshot(write_snapshot(inventory))
    assert written.devices == inventory.devices
    assert written.vendors == tuple(replace(report, seconds=0.0) for report in inventory.vendors)


def test_the_same_devices_leave_one_file_that_no_other_user_reads(inventory):
    path = write_snapshot(inventory)
    assert write_snapshot(inventory) == path
    assert [str(entry) for entry in Path(os.environ["ANYACCEL_STATE_DIR"]).glob("ray-*")] == [path]
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_leases_are_not_disturbed_by_it(inventory):
    write_snapshot(inventory)
    with anyaccel.acquire("APU:1", inventory=inventory) as hold:
        assert len(hold.allocation.devices) == 1
    assert leases(inventory) == ()


def test_a_directory_that_cannot_be_written_is_named(inventory, tmp_path, monkeypatch):
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "missing" / "leases"))
    with pytest.raises(StateDirectoryError, match="must be in a directory"):
        write_snapshot(inventory)


def damage(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.chmod(0o622), "writable by you alone"),
        (lambda path: path.write_text("{"), "is damaged: Expecting property name"),
        (lambda path: path.write_text("[" * 100_000), "is damaged"),
        (lambda path: path.write_text("7"), "the schema must be anyaccel.ray-node/1"),
        (lambda path: damage(path, schema="anyaccel.ray-node/2"), "the schema must be anyaccel.ray-node/1"),
        (lambda path: damage(path, inventory={"machine": "host", "devices": [{"id": 7}]}), "is damaged: inventory"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "cannot be read"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "must be a regular file"),
        (lambda path: os.truncate(path, 65 << 20), "must have at most 67108864 bytes"),
    ],
)
def test_a_file_that_may_be_another_users_work_is_refused(spoil, reason, inventory):
    name = os.path.basename(write_snapshot(inventory))
    spoil(Path(os.environ["ANYACCEL_STATE_DIR"]) / name)
    with pytest.raises(UsageError, match=reason) as raised:
        read_snapshot(str(Path(os.environ["ANYACCEL_STATE_DIR"]) / name))
    assert "start the node anew with 'anyaccel ray start'" in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it gives a file to another user")
def test_a_file_of_another_user_is_refused(inventory):
    path = write_snapshot(inventory)
    os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match="belong to you or to root"):
        read_snapshot(path)
