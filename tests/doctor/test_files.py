"""What doctor and 'config --check' say of the files of configuration: what makes other commands fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILE = "/etc/anyaccel/config.toml"
TYPO = "[queue]\nbackfill = 0\n\n[limits]\ndevises = 4\ntime = 3\n"
MACHINES = [
    (
        TYPO, 0o644, 2,
        [
            f"fail  '{FILE}': there is no setting 'limits.devises'  ->  did you mean limits.devices?",
            (f"fail  '{FILE}': limits.time must be a duration such as '90s', '15m', '2h' or '1h30m' (got 3)"
            "  ->  limits.time: ..."),
        ],
    ),
    (
        "\n[limits\n", 0o644, 2,
        [
            (f"fail  '{FILE}' must be TOML in UTF-8:"
            " Expected ']' at the end of a table declaration (at line 2, column 8)"
            "  ->  correct it, or move it away")
        ],
    ),
    (
        "[limits]\ndevices = 4\n", 0o666, 2,
        [
            f"fail  '{FILE}' must be writable by root only (its mode is 0666)  ->  sudo chmod go-w {FILE}",
        ],
    ),
    (
        "[users.erika]\nweight = 2\n[users]\nerica.devices = 4\n7777.devices = 1\n", 0o644, 0,
        [
            (f"warn  '{FILE}': there is no user 'erica'; the entry has no effect"
            "  ->  did you mean erika?")
        ],
    ),
    (
        "[users.'\\u0000']\nweight = 2\n".replace("'", '"'), 0o644, 0,
        [
            (f"warn  '{FILE}': there is no user '\\x00'; the entry has no effect"
            "  ->  correct the name, or remove the entry")
        ],
    ),
    ("[users.erika]\nweight = 2\n", 0o644, 0, []),
]  # fmt: skip
"""What the machine's file says, its mode, the status of 'run' then, and what doctor and 'config --check' say of it."""
MOUNTS = """
set -e
cp /etc/passwd /etc/group "$1"
echo 'erika:x:61105:61105::/nonexistent:/bin/sh' >> "$1/passwd"
mount -n -t tmpfs none /etc
cp "$1/passwd" "$1/group" /etc
mkdir /etc/anyaccel
shift
exec "$@"
"""
TRY = """
import json, os, sys, tempfile
from anyaccel.cli import main
FILE, machines = sys.argv[1], json.loads(sys.argv[2])
def ask(*words):  # a fork has imported what a new interpreter would import again
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.exit(main(words))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [file.seek(0) or file.read() for file in (out, errors)]
    return status, texts[0].splitlines(), texts[1]
told = []
for text, mode in machines:
    with open(FILE, "w") as file:
        file.write(text)
    os.chmod(FILE, mode)
    told.append((ask("run", "APU:1", "--", "true"), ask("doctor", "--quiet"), ask("config", "--check", FILE)))
json.dump(told, sys.stdout)
"""


@pytest.mark.timeout(420)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare(1)")
def test_doctor_says_what_makes_commands_of_all_users_fail(acme, tmp_path):
    """The real file in its real place, in a private mount namespace."""
    asked = json.dumps([(text, mode) for text, mode, _, _ in MACHINES])
    inner = ["sh", "-c", MOUNTS, "sh", str(tmp_path), sys.executable, "-c", TRY, FILE, asked]
    environ = {**os.environ, "ANYACCEL_MACHINE": "sim:A1:1"}
    command = ["unshare", "--mount", *inner]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    for (_, _, run_status, wanted), (run, doctor, check) in zip(MACHINES, json.loads(done.stdout), strict=True):
        assert (run[0], "Traceback" in run[2]) == (run_status, False), run
        assert doctor[0] == check[0] == bool(wanted), (doctor, check)
        well = [f"'{FILE}' is valid, as the machine's file"]
        for lines in (doctor[1], check[1] if wanted else []):
            assert len(lines) == len(wanted), lines
            for line, beginning in zip(lines, wanted, strict=True):
                assert line.startswith(beginning.removesuffix("...")), line
        assert wanted or check[1] == well
        if run_status:  # the first of them is what the command says
            assert wanted[0].removeprefix("fail  ").partition("  ->  ")[0] in run[2]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write the user's file; returns its path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def own(text):
        path = tmp_path / "config" / "anyaccel" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return own


def test_doctor_works_where_a_users_own_file_is_wrong(acme, own, anyaccel):
    path = own('[defaults]\nmachine = "sim:A1:1"\nmusk = 1\n')
    done = anyaccel("doctor", "--quiet")
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line == f"fail  '{path}': there is no setting 'defaults.musk'  ->  did you mean defaults.mask?"
    (finding,) = json.loads(anyaccel("doctor", "--quiet", "--json").stdout)["findings"]
    assert (finding["severity"], finding["fix"]) == ("fail", "did you mean defaults.mask?")


def test_doctor_has_the_defaults_that_a_user_configured(acme, own, anyaccel):
    own('[defaults]\nmachine = "sim:A1:3"\n')
    done = anyaccel("doctor")
    assert (done.returncode, done.stderr) == (0, "anyaccel: simulated machine sim:A1:3\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[limits]\ndevices = 3\n", "' is valid, as the machine's file"),
        ('[defaults]\nmask = "index"\n[journal]\nkeep = false\n', "' is valid, as a file of your own"),
        ('[defaults]\nmusk = "index"\n', "': there is no setting 'defaults.musk'"),
        (
            '[limits]\ndevices = 3\n[defaults]\nmask = "id"\n',
            "': defaults.mask is for the files of users",
        ),
        ("[users.there-is-no-such-user]\ndevices = 3\n", "': there is no user 'there-is-no-such-user'"),
        ("[groups.there-is-no-such-group]\ndevices = 3\n", "': there is no group 'there-is-no-such-group'"),
    ],
)
def test_a_file_is_checked_before_it_is_put_in_its_place(text, told, anyaccel, tmp_path):
    path = tmp_path / "new.toml"
    path.write_text(text)
    path.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(path, 61_106, 61_106)  # whose it is does not matter yet
    done = anyaccel("config", "--check", str(path))
    assert done.stdout.removeprefix("fail  ").removeprefix("warn  ").startswith(f"'{path}{told}")
    assert (done.returncode, done.stderr) == ("is valid" not in told, "")
    document = json.loads(anyaccel("config", "--check", str(path), "--json").stdout)
    assert (document["schema"], document["path"]) == ("anyaccel.config_check/1", str(path))
    assert document["well"] == ("is valid" in told) == (document["findings"] == [])
    assert document["whose"] == ("user" if "[defaults]" in text and "[limits]" not in text else "machine")


def test_a_file_that_is_not_there_or_that_others_may_change_is_not_well(anyaccel, tmp_path):
    path = tmp_path / "new.toml"
    missing = anyaccel("config", "--check", str(path))
    assert missing.returncode == 2
    assert f"--check must be a file (got '{path}', which cannot be found)" in missing.stderr
    path.write_text("[limits]\ndevices = 3\n")
    path.chmod(0o666)
    done = anyaccel("config", "--check", str(path))
    assert (done.returncode, "must be writable by the user or root only" in done.stdout) == (1, True)
    assert anyaccel("config", "--check", str(Path("/"))).returncode == 1
