"""Limits of the machine's configuration: six commands and calls give one answer about them, for a real user.

The machine is one of its own, as in tests/support/users.py: the configuration lies where it lies everywhere.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from anyaccel.text import clock

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to write a configuration and act as a user")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "users.py"
MACHINE = "--declare THING=4"

# What the configuration says, what the user holds, what is asked for, the answer, and the exit status.
LIMITS = {
    "devices, reached": ("[limits]\ndevices = 2", 2, ("1",), "you are at your limit of 2 devices", 4),
    "devices, in part": (
        "[limits]\ndevices = 2", 1, ("2",), "you hold 1 device, and 2 more are over your limit of 2", 4,
    ),
    "devices, never": ("[limits]\ndevices = 1", 0, ("2",), "2 devices are over your limit of 1", 3),
    "devices of a user": (
        "[limits]\ndevices = 8\n[users.bob]\ndevices = 0.5", 0, ("1",), "1 device is over your limit of 0.5", 3,
    ),
    "time": ("[limits]\ntime = '30s'", 0, ("1", "--time 1h"), "a time of 1h is over your limit of 30s", 3),
    "priority": ("[limits]\npriority = 0", 0, ("1", "--priority 5"), "a priority of 5 is over your limit of 0", 3),
}  # fmt: skip

OF_THE_SAME_KIND = sorted(LIMITS.keys() - {"devices, reached", "time"})
"""Limits that other limits stand for: tests/test_policy.py and scheduler say what each of them says."""

ACQUIRE = """
import sys, anyaccel
count, *words = sys.argv[1:]
terms = {word.strip("-"): {"1h": 3600, "5": 5}[value] for word, value in zip(words[::2], words[1::2])}
try:
    anyaccel.acquire(f"declared:{count}", declare={"THING": 4}, wait=0, **terms)
except anyaccel.PlacementError as error:
    print(f"anyaccel: {error}")
    assert [each.code.value for each in error.verdict.reasons] == ["limit"]
    sys.exit(error.exit_code)
"""


CALLS = """
import contextlib, io, json, sys
from anyaccel.cli import main
done = []
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(arguments)
    done.append((status, said.getvalue()))
print(json.dumps(done))
"""


def in_one_process(commands):
    """Command lines of anyaccel as one command, which prints exit status and output of each."""
    return f'python -c "$CALLS" {shlex.quote(json.dumps([shlex.split(line) for line in commands]))}'


def of_users(commands, users=("bob",)):
    """Have users type commands on a machine of several users; the exit status and output of each."""
    given = {
        "users": {name: 61_201 + number for number, name in enumerate(users)},
        "keep": sorted({str(ROOT), sys.prefix, sys.base_prefix}),
        "environ": {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "ACQUIRE": ACQUIRE,
            "CALLS": CALLS,
        },
        "check": "python -c 'import anyaccel'",
        "commands": [("root", "mkdir -m 1777 /run/anyaccel && mkdir -p /etc/anyaccel"), *commands],
    }
    inner = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, str(SCRIPT)]  # bash reaps what users leave behind
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *inner]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=280, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "skip" in answer:
        pytest.skip(answer["skip"])
    return [tuple(result) for result in answer["results"][1:]]


def in_background(command):
    """A command that goes on beside what is typed next, once it has said something."""
    return f"rm -f said; {command} 2>said & echo $! >pid; until [ -s said ]; do sleep 0.05; done; cat said"


def configure(text):
    return "root", f"printf '%s' \"{text}\" >/etc/anyaccel/config.toml"


QUEUES = ("queue", "queue --json")
LOOKS = {
    "why": "why {}",
    "why --json": "why {} --json",
    "run --no-wait": "run {} --no-wait -- true",
    "run --json": "run {} --no-wait --json -- true",
    "select": "select {}",
    "select --json": "select {} --json",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "limit", ["devices, reached", "time", *(pytest.param(each, marks=pytest.mark.full) for each in OF_THE_SAME_KIND)]
)
def test_six_commands_and_calls_give_one_answer_about_a_limit(limit):
    configuration, holds, (count, *terms), answer, status = LIMITS[limit]
    asked = f"declared:{count} {MACHINE} {' '.join(terms)}"
    waiting = in_background(f"anyaccel run {asked} -- true")
    rest = 4 - holds
    typed = {
        # A request that waits when the limit comes. It is stopped, so that 'queue' is asked before it notices.
        "bob holds": ("bob", f"anyaccel hold declared:{holds} {MACHINE}" if holds else "true"),
        "root holds": ("root", f"anyaccel hold declared:{rest} {MACHINE} >lease"),
        "waits": ("bob", f"{waiting}; kill -STOP $(cat pid)"),
        "configured": configure(configuration),
        "queues": ("bob", in_one_process(QUEUES)),
        "released": ("root", "anyaccel release $(cat lease)"),
        "goes on": ("bob", "kill -CONT $(cat pid); " + ("wait; cat said; false" if status == 3 else "kill $(cat pid)")),
        "run": ("bob", waiting if status == 4 else f"anyaccel run {asked} -- true"),
        "acquire": ("bob", f'python -c "$ACQUIRE" {count} {" ".join(terms)}'),
        "looks": ("bob", in_one_process(line.format(asked) for line in LOOKS.values())),
    }
    done = dict(zip(typed, of_users(typed.values()), strict=True))
    for names, key in ((QUEUES, "queues"), (LOOKS, "looks")):
        done |= {name: tuple(each) for name, each in zip(names, json.loads(done.pop(key)[1]), strict=True)}
    verdict = f"declared:{count} {'does not fit now' if status == 4 else 'can never fit'}: {answer}."
    refused = {"why": "", "run --no-wait": "anyaccel: ", "acquire": "anyaccel: "}
    if status == 3:
        refused |= {"run": "anyaccel: ", "select": "anyaccel: "}
    for call, prefix in refused.items():
        assert (done[call][0], done[call][1].splitlines()[0]) == (status, prefix + verdict), call
    if status == 4:
        assert done["run"] == (0, f"anyaccel: waiting (1st): {answer}\n")
        assert done["select"][0] == 0  # it says what would serve, although it is held
        assert f"anyaccel: {verdict}\n" in done["select"][1]
        assert json.loads(done["select --json"][1])["limits"] == [answer]
    else:
        assert f"anyaccel: {verdict}\n" in done["goes on"][1]
        assert json.loads(done["select --json"][1])["error"]["message"] == verdict
    assert re.search(rf"  {re.escape(answer)}  ", done["queue"][1], re.MULTILINE), done["queue"]
    assert [ticket["reason"] for ticket in json.loads(done["queue --json"][1])["tickets"]] == [answer]
    for call in ("why --json", "run --json"):
        found = json.loads(done[call][1])
        found = found.get("error", found)
        reasons = [(reason["code"], reason["message"]) for reason in found["reasons"]]
        assert (found["message"], reasons) == (verdict, [("limit", answer)]), call
        assert (found["fits_now"], found["ever_fits"]) == (False, status == 4)
    assert not re.search(r"[0-9a-f]{8}\|", json.dumps(done))


TWICE = """
import anyaccel
from anyaccel.errors import DeadlockError

def print_nothing(*_):  # the lease of the command before lasts until its monitor has ended
    pass

held = anyaccel.acquire("declared:1", declare={"THING": 4}, on_wait=print_nothing)
try:
    anyaccel.run("declared:1", ["true"], declare={"THING": 4})
except DeadlockError as error:
    print(error.verdict.reasons[0].message)
"""


@pytest.mark.timeout(300)
def test_a_limit_counts_what_a_user_holds_once_and_not_for_other_users():
    inner = f"anyaccel run declared:1 {MACHINE} --no-wait -- echo inside"
    waiting = in_background(f"anyaccel run declared:1 {MACHINE} -- true")
    typed = {
        "configured": configure("[limits]\ndevices = 1"),
        "inside": ("bob", f"anyaccel run declared:1 {MACHINE} -- {inner}"),
        "twice": ("bob", f"python -c '{TWICE}'"),
        "held": ("bob", f"anyaccel hold declared:1 {MACHINE}"),
        "waits": ("bob", waiting),
        "queue": ("alice", "anyaccel queue"),
        "why": ("alice", f"anyaccel why declared:1 {MACHINE}"),
        "run": ("alice", f"anyaccel run declared:1 {MACHINE} --no-wait -- echo served"),
        "root": ("root", f"anyaccel run declared:2 {MACHINE} --no-wait -- echo served"),
    }
    done = dict(zip(typed, of_users(typed.values(), users=("alice", "bob")), strict=True))
    assert done["inside"] == (0, "inside\n")
    assert done["twice"] == (0, "you are at your limit of 1 device\n")
    assert done["waits"] == (0, "anyaccel: waiting (1st): you are at your limit of 1 device\n")
    assert done["queue"][1].splitlines()[1].partition("  bob is at the limit of 1 device  ")[1]
    assert done["why"] == (0, "declared:1 fits now.\n")
    assert done["run"] == done["root"] == (0, "served\n")


@pytest.mark.needs("jobs")
@pytest.mark.timeout(300)
def test_a_wait_is_explained_by_users_times_and_withheld_devices():
    """``run`` and ``queue`` have the same words, and a lease without a time limit has no time."""
    typed = {
        "long": (
            "alice",
            f"anyaccel hold declared:0.5 {MACHINE} --for 1h; anyaccel hold declared:1 {MACHINE} --for 2h",
        ),
        "lasting": ("root", f"anyaccel hold declared:0.25 {MACHINE}"),
        "drained": ("root", f"anyaccel drain declared/3 {MACHINE}"),
        "reserved": (
            "root",
            f"anyaccel reserve declared/2 {MACHINE} --from 2030-12-02T09:00 --to 2h --for alice",
        ),
        "time": ("bob", f"anyaccel why declared/2 {MACHINE}"),
        "why": ("bob", in_one_process(f"why declared:4 {MACHINE} {each}" for each in ("", "--json"))),
        "root": ("root", f"anyaccel why declared:4 {MACHINE}"),
        "waits": ("bob", in_background(f"anyaccel run declared:4 {MACHINE} -- true")),
        "behind": ("bob", in_background(f"anyaccel run declared:4 {MACHINE} -- true")),
        "at": ("alice", f"anyaccel status {MACHINE} --json --no-stats"),
        "queue": ("bob", "anyaccel queue --json"),
        "own": ("alice", "anyaccel queue --json"),
    }
    done = dict(zip(typed, of_users(typed.values(), users=("alice", "bob")), strict=True))
    assert done["reserved"][0] == done["drained"][0] == 0, done
    records = [record for device in json.loads(done["at"][1])["devices"] for record in device["holders"]]
    ends = [record["until"] for record in records if record["lease"] and record["user"] == "alice"]
    later = clock(datetime.fromisoformat(max(ends)).timestamp())
    rest = "; 1 drained; 1 reserved for alice from 2030-12-02"
    taken = f"alice has 1.5 until {later}, root 0.25{rest}"
    for place, waits in {"1st": "waits", "2nd": "behind"}.items():
        assert done[waits][1] == f"anyaccel: waiting ({place}): {taken}\n"
    reasons = [ticket["reason"] for ticket in json.loads(done["queue"][1])["tickets"]]
    assert reasons == [taken, "1 earlier request is ahead"]
    assert json.loads(done["own"][1])["tickets"][0]["reason"].startswith("you have 1.5 until ")
    blocks = "declared/2 is reserved for alice from 2030-12-02"
    assert done["time"][1].splitlines() == [
        f"declared/2:1 does not fit now: 0 of 1 declared free; {blocks}.",
        "fits now with --time 366d",
        "It would start by 2030-12-02, if all leases last until their time limits.",
    ]
    why, as_json = (answer[1] for answer in json.loads(done["why"][1]))
    (reason,) = (each["message"] for each in json.loads(as_json)["reasons"])
    blocks = f"{blocks}; declared/3 is drained by root"
    assert re.fullmatch(
        r"0 of 4 declared free, 1 in part; root has 0.25 of declared/0 \(declared:0.25, lease \w+\); "
        r"alice has 0.5 of declared/0 until [-0-9:]+ ?[0-9:]* \(.*; " + re.escape(blocks),
        reason,
    ), reason
    assert "undrain" not in why
    assert "--remove" not in why
    assert "'anyaccel undrain " in done["root"][1]


@pytest.mark.timeout(300)
def test_a_groups_total_counts_all_its_members_for_each_of_them():
    """Members by the database of groups: a process with the group's id, and with no other one, is none."""
    limits = "[groups.staff]\ntotal_devices = 2"
    asked = f"declared:1 {MACHINE}"
    typed = {
        "members": ("root", "sed -i s/^staff:.*/staff:x:50:alice,bob/ /etc/group"),
        "configured": configure(limits),
        "shown": ("alice", "anyaccel config"),
        "held": ("bob", f"anyaccel hold declared:2 {MACHINE} >lease"),
        "waits": ("alice", in_background(f"anyaccel run {asked} -- true")),
        "queue": ("bob", "anyaccel queue"),
        "why": ("alice", f"anyaccel why {asked}"),
        "claims": (
            "root",
            f"setpriv --reuid 61203 --regid 50 --clear-groups anyaccel run {asked} --no-wait -- echo got",
        ),
        "never": ("alice", f"anyaccel why declared:3 {MACHINE}"),
        "released": ("bob", "anyaccel release $(cat lease)"),
        "served": ("alice", "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done; anyaccel queue"),
    }
    done = dict(zip(typed, of_users(typed.values(), users=("alice", "bob", "carol")), strict=True))
    full = "group staff is at the limit of 2 devices"
    assert "groups.staff.total_devices" in done["shown"][1]
    assert done["waits"] == (0, f"anyaccel: waiting (1st): {full}\n")
    assert full in done["queue"][1]
    assert done["why"][1].startswith(f"declared:1 does not fit now: {full}.\n")
    assert done["claims"] == (0, "got\n")
    assert done["never"][1].startswith("declared:3 can never fit: 3 devices are over group staff's limit of 2.\n")
    assert done["served"] == (0, "No request waits.\n"), done


OPENED = """
import sys
sys.addaudithook(lambda event, values: event == "open" and print("opens", values[0]))
from anyaccel.cli import main
main(["status", *sys.argv[1:]])
"""


@pytest.mark.timeout(300)
def test_fair_shares_with_a_half_life_serve_the_user_first_who_used_less():
    """By leases that have ended, also of a user who keeps no journal; groups have limits."""
    waiting = in_background(f"anyaccel run declared:4 {MACHINE} --note $USER -- true")
    rules = "[queue]\nfair_shares = true\nhalf_life = '7d'\n[groups.alice]\nweight = 2\n[groups.bob]\ndevices = 4"
    no_journal = "mkdir -p .config/anyaccel && printf '[journal]\\nkeep = false\\n' >.config/anyaccel/config.toml"
    typed = {
        "configured": configure(rules),
        "warned": ("root", "anyaccel config"),
        "journal": ("root", "mkdir -p -m 755 /var/lib/anyaccel && mkdir -m 1777 /var/lib/anyaccel/journal"),
        "not warned": ("root", "anyaccel config"),
        "used": ("bob", f"umask 077; {no_journal}; anyaccel run declared:4 {MACHINE} --note secret -- true"),
        "line": (
            "alice",
            "cd /var/lib/anyaccel/journal; until grep -sq . *.jsonl; do sleep 0.05; done; cat *.jsonl; cd",
        ),
        "held": ("root", f"anyaccel hold declared:1 {MACHINE} >lease"),
        "over": ("bob", "anyaccel run declared:5 --declare THING=5 --no-wait -- true"),
        "bob waits": ("bob", waiting),
        "alice waits": ("alice", waiting),
        "queue": ("alice", "anyaccel queue --json"),
        "status": ("alice", f"python -c '{OPENED}' --no-stats {MACHINE}"),
        "why": ("bob", f"anyaccel why declared:3 {MACHINE}"),
    }
    done = dict(zip(typed, of_users(typed.values(), users=("alice", "bob")), strict=True))
    missing = "queue.half_life counts no ended lease: root has not made the directory /var/lib/anyaccel/journal"
    assert missing in " ".join(done["warned"][1].split())
    assert "counts no ended lease" not in done["not warned"][1]
    assert done["used"] == (0, "")
    (line,) = map(json.loads, done["line"][1].splitlines())
    assert (line["request"], line["note"], line["program"], line["held"] > 0) == ("", "", "", True)
    assert "5 devices are over your limit of 4" in done["over"][1]
    assert "waiting (1st)" in done["alice waits"][1]
    tickets = json.loads(done["queue"][1])["tickets"]
    assert [(ticket["user"], ticket["behind"]) for ticket in tickets] == [("alice", 0), ("bob", 1)]
    assert tickets[0]["used_device_seconds"] == 0 < tickets[1]["used_device_seconds"]
    assert "2 waiting" in done["status"][1]
    assert "opens t1." in done["status"][1]
    assert "/var/lib" not in done["status"][1]
    words = "2 earlier requests are ahead, and fair shares count .* device-hours of yours"
    assert re.search(words, " ".join(done["why"][1].split()))


@pytest.mark.timeout(300)
def test_a_lease_in_a_directory_of_ones_own_is_no_use_of_the_machine():
    """Its line is in the journal of the user, and not in that of the machine."""
    common, own = "/var/lib/anyaccel/journal", ".local/state/anyaccel/journal.jsonl"

    def run(note, journal):
        """Run a command, and wait for its line, which the monitor writes."""
        return (
            f"anyaccel run declared:1 {MACHINE} --note {note} -- true; until grep -qs {note} {journal}; do sleep 0.05;"
            f" done; grep -ls {note} {common}/* {own}; true"
        )

    made, public, private = of_users([
        ("root", f"mkdir -p {common} && chmod 1777 {common}"),
        ("bob", run("public", f"{common}/*")),
        ("bob", f"export ANYACCEL_STATE_DIR=$HOME/leases; {run('private', own)}"),
    ])  # fmt: skip
    assert made == (0, "")
    assert public[1].splitlines()[-1] == f"{common}/61201.jsonl"
    assert private[1].splitlines()[-1] == own
    assert common not in private[1]
