"""Drains and reservations as the administrator makes them, and as every command and pool sees them."""

import grp
import json
import os
import pwd
import re
import time
from datetime import datetime

import anyaccel as aa
import preloaded
import pytest
from anyaccel.text import clock
from anyaccel_jobs import withhold
from waiting import until

MACHINE = "sim:Acme-Whole:2"
GROUP = next(each.gr_name for each in grp.getgrall() if each.gr_name not in {user.pw_name for user in pwd.getpwall()})
"""A group without a user of its name."""


def run(*arguments, code=0):
    """Run a command on the machine; its output and its messages."""
    done = preloaded.run(arguments, env={**os.environ, "ANYACCEL_MACHINE": MACHINE})
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def read(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code)[0])


def test_a_drained_device_is_seen_by_all(acme):
    drain = read("drain", "acme/1", "--note", "the fan is loud")
    assert (drain["devices"], drain["reason"]) == (["acme/acme-1"], "the fan is loud")
    said = run("drain", "acme/0-1")[1].splitlines()
    assert said[0] == "anyaccel: drained: acme/0-1; 'anyaccel undrain acme/0-1' ends that"
    assert re.fullmatch(
        r"anyaccel: acme/1: already drained by .*: the fan is loud; 'anyaccel undrain' ends both", said[1]
    )
    assert run(*said[0].split("'")[1].split()[1:])[1] == "anyaccel: no longer drained: acme/0-1\n"
    drain = read("drain", "acme/1", "--note", "the fan is loud")
    first, second = read("status", "--no-stats")["devices"]
    assert (first["free"], first["holders"]) == (1, [])
    assert second["free"] == 0
    (holder,) = second["holders"]
    assert (holder["state"], holder["lease"]) == ("drained", None)
    assert "the fan is loud" in holder["reason"]
    out, _ = run("why", "APU:2", code=4)
    assert "drained by" in out
    assert f"anyaccel undrain {drain['drain']}" in out
    assert "undrain" not in run("why", "APU,id=other", code=3)[0], "no end of a drain would help"
    (withheld,) = read("queue")["withheld"]
    assert (withheld["state"], withheld["device"]) == ("drained", "acme-1")
    assert "acme/1: drained by" in run("queue")[1]
    assert re.search(r"^acme/1 .*drained .*the fan is loud", run("status", "--no-stats")[0], re.MULTILINE)
    assert "drained by" not in run("status", "--no-stats")[0]
    assert run("run", "APU", "--", "sh", "-c", "echo $ACME_VISIBLE")[0] == "acme-0\n"
    with aa.Pool("APU", machine=MACHINE) as pool:
        assert {each.result(60) for each in [pool.submit(os.getenv, "ACME_VISIBLE") for _ in range(4)]} == {"acme-0"}
    scheduler = aa.open_scheduler(aa.detect(MACHINE), shared=True)
    assert "drained by" in str(scheduler.why("APU:2"))
    ticket = scheduler.submit("APU:2")
    assert ticket.allocation is None
    assert "no longer drained: acme/1" in run("undrain", "acme/1")[1]
    until(lambda: ticket.allocation, "the ticket")
    scheduler.release(ticket.allocation)
    assert "acme/1 is not drained" in run("undrain", "acme/1", code=2)[1]


def test_a_drained_device_is_draining_until_its_lease_has_ended(acme):
    def states():
        shown = run("status", "--no-stats", "--columns", "device,state")[0]
        return re.findall(r"^acme/\d  (\w+)$", shown, re.MULTILINE)

    with aa.acquire("acme/0", machine=MACHINE):
        drain = read("drain", "acme/0-1", "--note", "a move")
        assert states() == ["draining", "drained"]
    assert states() == ["drained", "drained"]
    found = preloaded.run(["doctor"], env={**os.environ, "ANYACCEL_MACHINE": MACHINE}).stdout
    assert re.search(rf"ok +acme/0-1: drained by .*: a move  ->  'anyaccel undrain {drain['drain']}' ends it", found)


def test_a_reservation_begins_and_ends_at_times_and_after_durations(acme):
    me = str(os.geteuid() + 1)
    for begin, end in (("1h", "4h"), ("2030-12-02", "2030-12-02T18:00"), ("now", "2h")):
        (made,) = read("reserve", "APU:1", "--from", begin, "--to", end, "--for", me)["blocks"]
        first, last = (datetime.fromisoformat(made[key]).timestamp() for key in ("from", "to"))
        if end.endswith("h"):
            assert last - first in {3600 * int(end[0]) + rounding for rounding in (-1, 0, 1)}
            shown = run("status", "--no-stats", "--columns", "device,until")[0]
            assert (f"  {clock(last)}\n" in shown) == (begin == "now")
        else:
            assert time.localtime(first)[:5] == (2030, 12, 2, 0, 0)
            assert time.localtime(last)[:5] == (2030, 12, 2, 18, 0)
        assert read("reserve", "--remove", made["id"])["removed"] == [made["id"]]


def test_a_drain_of_no_device_is_refused(acme):
    with pytest.raises(aa.UsageError, match="a drain needs a device"):
        withhold.drain(aa.detect(MACHINE), [], "the fan")


def test_a_reservation_is_for_a_group_behind_an_at_sign(acme):
    (made,) = read("reserve", "APU:1", "--from", "now", "--to", "4h", "--for", "@daemon", "--note", "course")["blocks"]
    assert (made["user"], made["group"]) == (None, "daemon")
    assert "acme/0: reserved for @daemon from" in run("reserve")[0]
    assert "acme/0 is reserved for @daemon until" in run("why", "APU:2", code=4)[0]
    assert [each["user"] for each in read("queue")["withheld"]] == ["@daemon"]
    assert "acme/0: reserved for @daemon from" in run("queue")[1]
    assert re.search(r"^acme/0 .*reserved .*@daemon", run("status", "--no-stats")[0], re.MULTILINE)
    wrong = run("reserve", "APU:1", "--from", "now", "--to", "4h", "--for", "@no-such-group", code=2)[1]
    assert "there is no group 'no-such-group'" in wrong


def test_devices_that_are_reserved_for_oneself_stay_free(acme):
    run("reserve", "APU:1", "--from", "1h", "--to", "1h", "--for", str(os.geteuid()))
    run("reserve", "APU:1", "--from", "1h", "--to", "1h", "--for", str(os.geteuid() + 1))
    states = [line.split(maxsplit=1)[1] for line in run("status", "--columns", "device,state")[0].splitlines()[1:3]]
    assert sorted(state.rpartition(" ")[0] for state in states) == ["", "free until"]


def test_a_reservation_is_listed_kept_and_removed(acme):
    begin = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + 86400))
    me = str(os.geteuid() + 1)
    (made,) = read("reserve", "APU:2", "--from", begin, "--to", "4h", "--for", me, "--note", "course")["blocks"]
    assert (made["kind"], made["devices"], made["reason"]) == ("reservation", ["acme/acme-0", "acme/acme-1"], "course")
    assert read("reserve")["blocks"] == [made]
    assert f"{made['id']}  acme/0-1: reserved for" in run("reserve")[0]
    assert "acme/0-1: reserved for" in run("status", "--no-stats")[1]
    assert "acme/0-1: reserved for" in run("queue")[1]
    from_then = clock(datetime.fromisoformat(made["from"]).timestamp())
    assert run("status", "--no-stats", "--columns", "device,state")[0].count(f" free until {from_then}\n") == 2
    assert run("why", "APU:2", code=4)[0].count("reserved for") == 1  # not once for each device
    assert read("why", "APU", "--time", "1h")["fits_now"]
    assert run("run", "APU", "--time", "1h", "--", "echo", "yes")[0] == "yes\n"
    assert "cannot be reserved" in run("reserve", "APU", "--from", begin, "--to", "1h", "--for", me, code=4)[1]
    said = run("undrain", made["id"], code=2)[1]
    assert f"{made['id']} is a reservation" in said
    assert f"'anyaccel reserve --remove {made['id']}' removes it" in said
    (other,) = read("reserve", "APU:1", "--from", "2030-01-01", "--to", "4h", "--for", me)["blocks"]
    assert run("reserve", "--remove", made["id"], other["id"])[1].endswith(f"removed: {made['id']}, {other['id']}\n")
    assert run("reserve")[0] == "No device is drained or reserved.\n"


def test_a_device_whose_lease_may_not_have_ended_by_then_is_not_reserved(acme):
    arguments = ("--from", "1h", "--to", "4h", "--for", str(os.geteuid() + 1))
    with aa.acquire("APU:2", inventory=aa.detect(MACHINE)):
        assert "cannot be reserved" in run("reserve", "APU", *arguments, code=4)[1]
    with aa.acquire("APU:2", inventory=aa.detect(MACHINE), time=600):
        (made,) = read("reserve", "APU:2", *arguments)["blocks"]
        assert len(made["devices"]) == 2
        run("reserve", "--remove", made["id"])
        assert "cannot be reserved" in run("reserve", "APU", "--from", "now", *arguments[2:], code=4)[1]


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("drain", "acme/0", "--reason", "new fan"), "unrecognized arguments: --reason", 2),
        (("drain", "acme/7"), "no device of this machine is 'acme/7'", 2),
        (("drain", "APU:2"), "must say which devices, not how many (got 'APU:2')", 2),
        (("drain", "APU/0 APU/1"), "must say which devices, not how many", 2),
        (("reserve", "APU"), "must have --from and --to and --for", 2),
        (("reserve", "APU", "--from", "noon", "--to", "4h", "--for", "root"), "366d, or now (got 'noon')", 2),
        (("reserve", "APU:0.5", "--from", "now", "--to", "4h", "--for", "root"), "must be of whole devices", 2),
        (("reserve", "APU", "--from", "now", "--to", "2001-01-01", "--for", "root"), "must end after its start", 2),
        (("reserve", "APU", "--from", "now", "--to", "4h", "--for", "no-such-user"), "there is no user", 2),
        (("reserve", "APU", "--from", "now", "--to", "4h", "--for", GROUP), f"for the members of a group: @{GROUP}", 2),
        (("reserve", "APU:9", "--from", "now", "--to", "4h", "--for", "root"), "can never fit", 3),
        (("reserve", "--remove", "abc"), "there is no drain or reservation 'abc'", 2),
    ],
)
def test_what_makes_no_sense_is_refused(acme, anyaccel, arguments, words, code):
    done = anyaccel(*arguments, env={"ANYACCEL_MACHINE": MACHINE}, here=True)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
