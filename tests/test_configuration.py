"""The files in which administrators and users write down what holds."""

import os
import subprocess
import sys

import pytest
from anyaccel import configuration
from anyaccel.errors import ConfigurationError


@pytest.fixture
def machine_file(tmp_path):
    return tmp_path / "config.toml"


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def as_machine(path):
    """Read a file as the machine's; it belongs to the user who runs the tests, root or not."""
    return configuration._read(str(path), "machine", {os.geteuid()})


def test_without_a_file_everything_has_its_default(machine_file):
    found = configuration.machine(str(machine_file))
    assert (found.found, dict(found.values)) == (False, {})
    assert found.get("queue.backfill") == 0
    assert found.get("queue.fair_shares") is False
    assert found.get("limits.devices") is None


def test_what_it_says_is_read_with_its_units(machine_file):
    write(
        machine_file,
        """
        [queue]
        backfill = "15m"
        fair_shares = true
        [limits]
        devices = 2.5
        time = "1d12h"
        [users."a.b"]
        priority = 10
        weight = 2
        """,
    )
    found = as_machine(machine_file)
    assert dict(found.values) == {
        "queue.backfill": 900.0,
        "queue.fair_shares": True,
        "limits.devices": 2.5,
        "limits.time": 129600.0,
        "users.a.b.priority": 10,
        "users.a.b.weight": 2,
    }
    assert found.get("users.a.b.weight") == 2
    assert found.found


def test_a_change_is_seen_at_once(machine_file):
    write(machine_file, "[limits]\ndevices = 1\n")
    assert as_machine(machine_file).get("limits.devices") == 1
    write(machine_file, "[limits]\ndevices = 22\n")
    assert as_machine(machine_file).get("limits.devices") == 22


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[queue]\nbackfil = 0", "there is no setting 'queue.backfil'", "did you mean queue.backfill"),
        ("[queue]\nbackfill = 5", "queue.backfill must be 0, or a duration .*got 5", "by how much"),
        ("[queue]\nbackfill = 'soon'", "queue.backfill must be 0, or a duration .*got 'soon'", "by how much"),
        ("[queue]\nbackfill = false", "queue.backfill must be", "by how much"),
        ("[queue]\nfair_shares = 1", r"queue.fair_shares must be true or false \(got 1\)", "serve the user first"),
        ("[queue]\nhalf_life = '7d'", "queue.half_life needs queue.fair_shares = true", "set both, or neither"),
        ("[queue]\nfair_shares = true\nhalf_life = '0s'", "queue.half_life must be a duration", "device-hours"),
        ("[groups.lab]\ndevices = -1", "groups.lab.devices must be a number of devices", "each member"),
        (
            "[groups.lab]\ntotal_devices = '2'",
            r"groups.lab.total_devices must be a number of devices .*'2'",
            "together",
        ),
        (
            "[limits]\ntotal_devices = 2",
            "there is no setting 'limits.total_devices'",
            r"did you mean groups.*.total_devices?",
        ),
        ("[limits]\ndevices = true", "limits.devices must be a number of devices", "at once"),
        ("[limits]\ndevices = nan", "limits.devices must be a number of devices", "at once"),
        ("[limits]\ntime = '0s'", "limits.time must be a duration", "longest"),
        ("[limits]\npriority = 1.5", "limits.priority must be a whole number", "highest"),
        ("[users.eve]\nweight = 0", r"users.eve.weight must be a number from 0.001 to 1000 \(got 0\)", "fair share"),
        ("limits = 3", "there is no setting 'limits'", "limits"),
        ("[limits", "must be TOML in UTF-8", "correct it"),
        pytest.param("a = " + "[" * 100_000, "must be TOML in UTF-8", "correct it", id="nested"),
    ],
)
def test_what_is_wrong_is_told_with_file_key_rule_value_and_way_out(machine_file, text, message, hint):
    write(machine_file, text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        as_machine(machine_file)
    assert str(machine_file) in str(caught.value)
    assert hint in caught.value.hint


EVERYTHING = """\
[queue]
backfil = 0         # no setting

[limits]
devices = "x"
time = ["1h"]

[users]
"a.b" = { weight = 0, devices = 2 }
eve.devices = -1

[defaults]
mask = "id"         # of users
[[limitz]]
devices = 1
"""


def test_all_that_is_wrong_is_told_with_the_key_of_each(machine_file):
    write(machine_file, EVERYTHING.replace("\n", "\r\n"))
    with pytest.raises(ConfigurationError) as caught:
        as_machine(machine_file)
    found = [str(each).removeprefix(f"{str(machine_file)!r}: ") for each in (caught.value, *caught.value.further)]
    assert [" ".join(each.split()[:5]) for each in found] == [
        "there is no setting 'queue.backfil'",
        "limits.devices must be a number",
        "limits.time must be a duration",
        "users.a.b.weight must be a number",
        "users.eve.devices must be a number",
        "defaults.mask is for the files",
        "there is no setting 'limitz'",
    ]
    assert caught.value.hint == "did you mean queue.backfill?"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[limits]\ndevices = = 2\n", r"Invalid value \(at line 2, column 11\)"),
        (b"\n[limits]\n[limits]\n", r"Cannot declare .* twice \(at line 3, "),
        (b"[limits]\ntime = [\n'1h',\n", r".*\(at end of document\)"),
        (b"[limits]\n# \xff\n", "'utf-8' codec can't decode byte 0xff in position 11"),
    ],
)
def test_what_is_no_toml_is_told_with_its_position(machine_file, content, told):
    machine_file.write_bytes(content)
    machine_file.chmod(0o644)
    with pytest.raises(ConfigurationError, match=f"config.toml' must be TOML in UTF-8: {told}"):
        as_machine(machine_file)


def test_a_directory_is_no_file(machine_file):
    machine_file.mkdir()
    with pytest.raises(ConfigurationError, match="must be a regular file"):
        as_machine(machine_file)


def test_what_others_can_write_is_refused(machine_file):
    write(machine_file, "", mode=0o646)
    with pytest.raises(ConfigurationError, match=r"must be writable by root only \(its mode is 0646\)") as caught:
        as_machine(machine_file)
    assert caught.value.hint == f"sudo chmod go-w {machine_file}"


def test_a_file_of_another_user_is_not_the_machines(machine_file):
    write(machine_file, "")
    if os.geteuid() == 0:
        os.chown(machine_file, 1000, 1000)
    with pytest.raises(ConfigurationError, match=r"must belong to root \(it belongs to user \d+\)"):
        configuration.machine(str(machine_file))


def test_what_is_no_regular_file_is_refused_and_not_waited_for(machine_file):
    os.mkfifo(machine_file)
    with pytest.raises(ConfigurationError, match="must be a regular file"):
        as_machine(machine_file)


def test_the_users_file_is_where_the_base_directory_specification_says(tmp_path):
    write(tmp_path / ".config" / "anyaccel" / "config.toml", "[limits]\ndevices = 1\n")
    with pytest.raises(ConfigurationError, match=r"limits.devices is for the administrator, in /etc/anyaccel"):
        configuration.user({"HOME": str(tmp_path)})
    assert configuration.user({"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}).found is False
    assert configuration.user_file({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}) == "/h/.config/anyaccel/config.toml"
    assert configuration.user({}).found is False


def test_no_variable_leads_to_another_machines_file(tmp_path):
    """Limits hold whatever a user's environment says."""
    write(tmp_path / "anyaccel" / "config.toml", "[limits]\ndevices = 99\n")
    code = "from anyaccel import configuration as c; print(c.machine().path, c.machine().get('limits.devices'))"
    environ = {"XDG_CONFIG_DIRS": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [configuration.MACHINE_FILE, "None"]
