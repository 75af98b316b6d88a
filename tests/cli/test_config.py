"""Configuration: defaults of options from the user's file, what holds and whence, and the set-up of a machine."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import empty_folders
import pytest
from anyaccel import configuration, settings


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Write the user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def configured(text):
        path = tmp_path / "config" / "anyaccel" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return configured


def test_an_option_has_the_default_that_the_user_configured(acme, configured, anyaccel):
    configured('[defaults]\nmachine = "sim:A1:2"\nmask = "index"\n')
    run = ("run", "APU:1", "--", "printenv", "ACME_VISIBLE")
    assert anyaccel(*run).stdout == "0\n"
    assert "2 devices" in anyaccel().stdout
    assert anyaccel(*run[:2], "--mask", "id", *run[2:]).stdout != "0\n"
    assert "3 devices" in anyaccel("status", "--machine", "sim:A1:3").stdout
    assert "4 devices" in anyaccel("status", env={"ANYACCEL_MACHINE": "sim:A1:4"}).stdout


def test_durations_are_shown_with_units_as_they_are_written(configured, anyaccel):
    configured('[defaults]\nwait = "90s"\n')
    shown = {words[0]: words[1] for line in anyaccel("config").stdout.splitlines() if (words := line.split())}
    assert shown["defaults.wait"] == "1m30s"
    assert (shown["queue.backfill"], shown["queue.patience"]) == ("0s", "1d")
    settings = json.loads(anyaccel("config", "--json").stdout)["settings"]
    assert {each["key"]: each["value"] for each in settings}["defaults.wait"] == 90.0


def test_a_wait_that_is_configured_is_overridden_by_none(acme, configured, anyaccel):
    configured('[defaults]\nwait = "1h"\nmachine = "sim:A1:1"\n')
    lease = anyaccel("hold", "APU:1").stdout.strip()
    assert anyaccel("run", "APU:1", "--no-wait", "--", "true").returncode == 4
    assert anyaccel("run", "APU:1", "--wait", "0.1s", "--", "true").returncode == 4
    anyaccel("release", lease)


def test_busy_devices_are_avoided_unless_the_command_line_says_otherwise(acme, configured, anyaccel):
    configured('[defaults]\navoid_busy = true\nmachine = "sim:A1:1"\n')
    assert anyaccel("run", "APU:1", "--", "true").returncode == 0
    assert anyaccel("run", "APU:1", "--no-avoid-busy", "--", "true").returncode == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[defaults]\nmask = "name"\n', "defaults.mask must be 'id' or 'index' (got 'name')"),
        ("[defaults]\nmusk = 1\n", "there is no setting 'defaults.musk'"),
        ("[queue]\nbackfill = 0\n", "queue.backfill is for the administrator, in /etc/anyaccel/config.toml"),
        ("[defaults]\nprobe_timeout = 0\n", "defaults.probe_timeout must be seconds, from 0.001 to 3600"),
        ("[defaults\n", "must be TOML in UTF-8"),
    ],
)
def test_a_wrong_file_is_told_in_one_message(text, told, acme, configured, anyaccel):
    path = configured(text)
    for arguments in ((), ("run", "APU:1", "--", "true"), ("config",)):
        done = anyaccel(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
        assert path in done.stderr
        assert "Traceback" not in done.stderr
    assert anyaccel("help", "run").returncode == 0
    assert anyaccel("run", "--help").returncode == 0


def test_config_says_what_holds_and_whence(configured, anyaccel):
    path = configured("[defaults]\nprobe_timeout = 3\n")
    rows = [line.split() for line in anyaccel("config").stdout.splitlines()]
    assert ["defaults.probe_timeout", "3", path] in rows
    assert ["defaults.mask", "-", "default"] in rows
    document = json.loads(anyaccel("config", "--json").stdout)
    assert {"key": "defaults.probe_timeout", "value": 3.0, "from": path} in document["settings"]
    assert {"path": path, "found": True} in document["files"]


@pytest.mark.parametrize("whose", ["machine", "user"])
def test_a_template_has_every_setting_and_counts_once_its_comment_signs_are_gone(whose, anyaccel, tmp_path, configured):
    text = anyaccel("config", "--template", whose).stdout
    active = re.sub(r"^#(?! )", "", text, flags=re.MULTILINE)
    if whose == "user":
        configured(text)
        assert not configuration.user().values
        configured(active)
        found = configuration.user()
    else:
        path = tmp_path / "machine.toml"
        path.write_text(active)
        path.chmod(0o644)
        if os.geteuid() != 0:
            pytest.skip("the machine's file must be root's, and this is not root")
        found = configuration.machine(str(path))
    refused = anyaccel("config", "--template", whose, "--json")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (2, "usage")
    known = {each.key for each in settings.settings_of(whose)}
    assert {re.sub(r"\.NAME\.", ".*.", key) for key in found.values} == known


def test_setup_makes_an_image_that_is_ready(tmp_path, anyaccel):
    made = anyaccel("setup", "--root", str(tmp_path))
    assert made.returncode == 0
    config, tmpfiles = tmp_path / "etc/anyaccel/config.toml", tmp_path / "etc/tmpfiles.d/anyaccel.conf"
    assert tmpfiles.read_text().splitlines()[-1] == "d /run/anyaccel 1777 root root -"
    assert stat.S_IMODE(config.stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "var/lib/anyaccel/journal").stat().st_mode) == 0o1777
    config.write_text("# mine\n")
    again = anyaccel("setup", "--root", str(tmp_path), "--json")
    assert [step["state"] for step in json.loads(again.stdout)["steps"]] == ["there", "there", "there"]
    assert config.read_text() == "# mine\n"


def test_setup_takes_no_file_for_the_directory_that_it_makes(tmp_path, anyaccel):
    journal = tmp_path / "var/lib/anyaccel/journal"
    journal.parent.mkdir(parents=True)
    journal.touch()
    journal.chmod(0o1777)
    done = anyaccel("setup", "--root", str(tmp_path))
    assert f"{journal} cannot be made: File exists" in done.stderr
    assert done.returncode != 0


def test_a_dry_run_changes_nothing(tmp_path, anyaccel):
    done = anyaccel("setup", "--dry-run", "--root", str(tmp_path))
    assert done.stdout.count("to be made") == 3
    assert list(tmp_path.iterdir()) == []


MOUNTS = """
set -e
cp -a /etc /dev/shm/etc
mount -n --bind /dev/shm/etc /etc
mkdir /dev/shm/lib
mount -n --bind /dev/shm/lib /var/lib
exec "$0" "$@"
"""
SHARES = """
import os, subprocess, sys
os.environ.pop("ANYACCEL_STATE_DIR", None)
run = lambda *arguments: subprocess.run([sys.executable, "-m", "anyaccel", *arguments], capture_output=True, text=True)
def as_user():
    os.setgroups([]); os.setgid(65533); os.setuid(65533)
def ask(*arguments):
    home = {"HOME": "/nonexistent", "XDG_STATE_HOME": "/dev/shm/home"}
    return subprocess.run([sys.executable, "-m", "anyaccel", *arguments], capture_output=True, text=True,
                          preexec_fn=as_user, env=os.environ | home)
os.mkdir("/dev/shm/home"); os.chmod("/dev/shm", 0o1777); os.chown("/dev/shm/home", 65533, 65533)
declared = ("--declare", "APU=1")
first, second = ask("run", "APU:1", *declared, "--", "true"), ask("run", "APU:1", *declared, "--", "true")
assert "sudo anyaccel setup" in first.stderr, first
assert "sudo anyaccel setup" not in second.stderr, second
run("queue"), run()
assert not os.path.exists("/run/anyaccel")
held = ask("hold", "APU:1", *declared)
assert held.returncode == 0, held
made = run("setup")
assert made.returncode == 0, made
assert os.stat("/run/anyaccel").st_mode & 0o7777 == 0o1777
assert os.stat("/var/lib/anyaccel/journal").st_mode & 0o7777 == 0o1777
assert os.path.exists("/etc/anyaccel/config.toml") and os.path.exists("/etc/tmpfiles.d/anyaccel.conf")
assert ask("run", "APU:1", *declared, "--no-wait", "--", "true").returncode == 4
assert run("run", "APU:1", *declared, "--no-wait", "--", "true").returncode == 4
refused = ask("setup")
assert refused.returncode == 2 and "must be run by root" in refused.stderr, refused
assert run("release", held.stdout.strip(), "--force").returncode == 0
assert "setup" not in ask("run", "APU:1", *declared, "--", "true").stderr
print("all shown")
"""


def readable_by_all(path):
    """Whether another user can run what is at a path, also where a link on the way leads out of a closed directory."""
    ways = [Path(path), Path(os.path.realpath(path))]
    return all(each.stat().st_mode & stat.S_IXOTH for way in ways for each in (way, *way.parents))


def test_setup_lets_users_see_each_other_and_without_it_they_are_told_once():
    if os.geteuid() != 0:
        pytest.skip("only root can set up a machine, and make one to try that on")
    package = os.path.dirname(configuration.__file__)
    if not readable_by_all(sys.executable) or not readable_by_all(package):
        pytest.skip(f"other users cannot run {sys.executable} here, or cannot read {package}")
    emptied = [sys.executable, empty_folders.__file__, "/run", "/dev/shm", "--"]
    command = ["unshare", "--mount", *emptied, "sh", "-c", MOUNTS, sys.executable, "-c", SHARES]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "XDG_"))}
    environ |= {"PYTHONPATH": os.path.dirname(package), "ANYACCEL_PLUGINS": "none"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    assert done.stdout.endswith("all shown\n"), done.stdout + done.stderr
