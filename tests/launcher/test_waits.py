"""What a wait in Python says, and that a program does not wait for what it holds itself.

Each program is a process of its own: that of pytest may have threads of which nothing is known here.
"""

import os
import re
import subprocess
import sys
import textwrap
from itertools import product

import anyaccel as aa
import pytest
from anyaccel.launcher.hold import take
from anyaccel.launcher.verdicts import describe_wait
from anyaccel.ledger import Ledger
from anyaccel.linux.mark import draw
from waiting import PATIENCE, until

BEGIN = """\
import logging, sys, threading
import anyaccel as aa
from anyaccel.errors import DeadlockError, NotFreeError
machine = {"declare": {"GPU": 2}}
"""
LINES = BEGIN.count("\n")


@pytest.fixture
def program(tmp_path):
    """Start a program that has so many lines in front of its own."""

    def program(text):
        path = tmp_path / "program.py"
        path.write_text(BEGIN + textwrap.dedent(text).lstrip("\n"))
        command = [sys.executable, str(path)]
        return subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)

    return program


def output(process):
    out, err = process.communicate(timeout=PATIENCE)
    return out, err


HELD_BEFORE = {
    "acquire": 'held = aa.acquire("declared:2", **machine)',
    "a statement": 'aa.acquire("declared:2", **machine)',
    "scheduler": 'scheduler = aa.open_scheduler(aa.detect(**machine), shared=True); scheduler.allocate("declared:2")',
}
WAITS = {
    "acquire": 'aa.acquire("declared:1", **machine)',
    "run": 'aa.run("declared:1", ["true"], **machine)',
    "use": 'aa.use("declared:1", **machine)',
}


@pytest.mark.parametrize(
    ("before", "then"), [*product(["acquire"], WAITS), *product(["a statement", "scheduler"], ["run"])]
)
def test_a_wait_for_what_the_program_itself_holds_is_an_error_with_the_place(program, before, then):
    out, err = output(
        program(
            f"""
            {HELD_BEFORE[before]}
            try:
                {WAITS[then]}
            except DeadlockError as error:
                print(error.exit_code, error.verdict.ever_fits, error.hint)
                print(error)
            """
        )
    )
    first, second = out.splitlines()[0], out.splitlines()[1]
    assert first.startswith("4 True release that first, or ask for all devices at once"), err
    assert re.fullmatch(
        r"declared:1 can be served only once this process gives back what it holds itself:"
        rf" lease \w+, taken at /\S+/program\.py:{LINES + 1}\.",
        second,
    )
    assert err == ""


def test_what_others_may_give_back_is_waited_for(program):
    """Others hold one device and the program holds the other: one may come back, two can not."""
    with take("declared:1", draw, declare={"GPU": 2}) as other:
        process = program(
            """
            held = aa.acquire("declared:1", **machine)
            try:
                aa.acquire("declared:2", **machine)
            except DeadlockError:
                print("refused")
            with aa.acquire("declared:1", **machine) as more:
                print(len(more.devices))
            """
        )
        said = process.stderr.readline()
        other.release()
    out, err = output(process)
    assert out == "refused\n1\n"
    assert said == f"anyaccel: waiting (1st): you have 1, this process ({process.args[1]}:{LINES + 1}) 1\n"
    assert err == ""


def test_another_thread_may_give_back_and_a_time_out_ends_any_wait(program):
    out, err = output(
        program(
            """
            held = aa.acquire("declared:2", **machine)
            try:
                aa.acquire("declared:1", wait=0.1, **machine)
            except NotFreeError as error:
                print(type(error).__name__)
            waits = threading.Event()
            threading.Thread(target=lambda: (waits.wait(), held.release())).start()
            with aa.acquire("declared:1", on_wait=lambda place, holders: waits.set(), **machine) as more:
                print(len(more.devices))
            """
        )
    )
    assert out == "NotFreeError\n1\n"
    assert err.count("\n") == err.count("anyaccel: waiting (1st)") <= 1, err  # only of the wait with a time-out


def test_on_an_event_loop_another_task_may_give_back(program):
    out, err = output(
        program(
            """
            import asyncio

            async def main():
                held = await aa.acquire_async("declared:2", **machine)
                waits = asyncio.Event()

                async def give_back():
                    await waits.wait()
                    held.release()

                task = asyncio.create_task(give_back())
                more = await aa.acquire_async("declared:1", on_wait=lambda *_: waits.set(), **machine)
                print(len(more.devices))
                await task

            asyncio.run(main())
            """
        )
    )
    assert (out, err) == ("1\n", "")


def test_each_call_says_once_what_it_waits_for_where_the_program_wants_it(program):
    """By the logger anyaccel.wait: on standard error, or where the program leads it, or nowhere."""
    run = 'aa.run("declared:1", ["true"], **machine)'
    calls = {
        "run": run,
        "acquire": 'aa.acquire("declared:1", **machine).release()',
        "use": 'aa.use("declared:1", **machine).release()',
        "silent": f'logging.getLogger("anyaccel.wait").setLevel(logging.ERROR); {run}',
        "redirected": "logging.getLogger('anyaccel.wait').setLevel(logging.INFO);"
        f' logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s"); {run}',
    }
    process = program(
        f"""
        for call in sys.stdin:
            exec({calls!r}[call.strip()])
            print("done", flush=True)
        """
    )
    said = {}
    for call in calls:
        with aa.acquire("declared:2", declare={"GPU": 2}):
            process.stdin.write(f"{call}\n")
            process.stdin.flush()
            until(Ledger.open().tickets, "the ticket")
            if call == "redirected":
                said[call] = process.stdout.readline()
            elif call != "silent":
                said[call] = process.stderr.readline()
        assert process.stdout.readline() == "done\n"
    assert output(process) == ("", "")
    sentence = "anyaccel: waiting (1st): you have 2"
    assert all(said[call].rstrip("\n").endswith(sentence) for call in WAITS), said
    assert said["redirected"] == f"anyaccel.wait: {sentence}\n"


def test_a_lease_that_another_thread_is_closing_is_not_intact(acme):
    with aa.acquire("APU", machine="sim:A1") as lease:
        (descriptor, *_) = lease.fds
        kept = os.dup(descriptor)
        os.close(descriptor)
        assert not lease.lease.intact
        os.dup2(kept, descriptor)
        os.close(kept)
        assert lease.lease.intact


def test_the_next_request_without_a_lease_in_the_way_names_use_without_one():
    assert describe_wait(1, (), ()) == "waiting (1st): the devices are in use without a lease"
    assert describe_wait(2, (), ()) == "waiting (2nd): 1 earlier request is ahead"
