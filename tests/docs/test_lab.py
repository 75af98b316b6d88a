"""The page of a lab does what it says, with several real users at once on one machine.

The machine is one of its own: a mount namespace with empty directories where leases, jobs and homes lie, and a process
namespace, which ends with all that the users have left running. The comment ``<!-- user: NAMES -->`` above a block says
who types it; each user has one shell for the whole page.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from empty_folders import NEEDED
from pages import matches, steps_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "lab.md"
USERS = {"anna": 61_101, "ben": 61_102, "chloe": 61_103}
SCRIPT = ROOT / "tests" / "support" / "users.py"


@pytest.mark.full  # tests/cli and ledger have several users as well
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as several users")
@pytest.mark.timeout(300)
def test_the_page_of_a_lab_does_what_it_says():
    steps = [(user, step) for step in steps_of(PAGE) for user in step.users]
    assert {user for user, _ in steps} == {"root", *USERS}
    given = {
        "users": USERS,
        "keep": NEEDED,
        "environ": {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "COLUMNS": "100",
            "PYTHONUNBUFFERED": "1",
        },
        "check": "python -c 'import anyaccel'",
        "commands": [(user, step.command) for user, step in steps],
    }
    inner = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, str(SCRIPT)]  # bash reaps orphans
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *inner]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=280, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "skip" in answer:
        pytest.skip(answer["skip"])
    faults = [
        f"{PAGE.name}:{step.line}: {user}$ {step.command}\n{printed}(exit status {status})"
        for (user, step), (status, printed) in zip(steps, answer["results"], strict=True)
        if status != 0 or not matches(step.output or "", printed)
    ]
    assert not faults, "\n\n".join(faults)
