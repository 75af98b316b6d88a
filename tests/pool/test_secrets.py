"""What a program was given as arguments, module path or environment is not shown to other users by what it starts."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look as another user")

SECRET = f"s3cr3t-t0k3n-{os.getpid()}"
STRANGER = 61_003
WATCH = """
import os, select
from pathlib import Path
os.setgroups([]), os.setresgid(*3 * [{user}]), os.setresuid(*3 * [{user}])
seen, before = {{}}, set(os.listdir("/proc"))
print("watching", flush=True)
told = False
while not select.select([0], [], [], 0)[0]:  # until the test closes it
    if not told and sum(b"gc.disable()" in line and process not in before for process, _, line in seen) >= 2:
        told = True
        print("seen", flush=True)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            start = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[19]
            seen.setdefault((process, start, Path("/proc", process, "cmdline").read_bytes()), None)
        except OSError:
            continue
print(*seen, sep="\\n")
"""
PROGRAM = """
import os, sys
import anyaccel as aa
assert len(aa.detect().devices) == 0  # in guarded processes of the plug-ins
with aa.Pool("A1:1", machine="sim:A1:2", preload=["json"]) as pool:
    assert pool.submit(lambda: sys.argv[1:]).result() == sys.argv[1:]
    actor = pool.actor(list, "ab")
    print(*actor.ready.result() and "ok", sep="")
    sys.stdin.read()
"""


def test_other_users_read_no_secret_in_the_command_line_of_what_a_pool_starts(acme, tmp_path, monkeypatch):
    acme.write_text(acme.read_text() + "\nimport time\ntime.sleep(0.5)\n")  # so that every process is seen
    site = tmp_path / f"site-{SECRET}"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{site}")
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / f"leases-{SECRET}"))
    monkeypatch.setenv("API_TOKEN", SECRET)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with subprocess.Popen(
        [sys.executable, "-c", WATCH.format(user=STRANGER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        done = subprocess.Popen(
            [sys.executable, str(program), f"--token={SECRET}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watcher.stdout.readline() == "seen\n"
        out, err = done.communicate(timeout=60)
        seen, _ = watcher.communicate(timeout=60)
    assert (out, err) == ("ok\n", "")
    own = "\\x00".join((sys.executable, str(program), f"--token={SECRET}"))  # also that of a child before its exec
    lines = [line for line in seen.splitlines() if own not in line]
    assert [line for line in lines if SECRET in line] == []
