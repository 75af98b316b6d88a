"""The driver is killed at random moments, while claims come and go and people ask for devices."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyaccel
import grpc
import pytest
from anyaccel_export.slices import device_names

FULL = bool(os.environ.get("ANYACCEL_TEST_FULL"))
STRIDE = 25 if FULL else 50
KILLS = int(os.environ.get("ANYACCEL_TEST_KILLS", "30" if FULL else "6"))
"""A kill takes about a second; ``pytest -o faulthandler_timeout=0`` with more of them than fit into five minutes."""


class Person(threading.Thread):
    """Asks for a device over and over, whose pod runs all the time."""

    def __init__(self, inventory, device):
        super().__init__(daemon=True)
        self.inventory, self.request = inventory, anyaccel.request_devices([device])
        self.ended, self.tries, self.got = threading.Event(), 0, 0

    def run(self):
        while not self.ended.is_set():
            self.tries += 1
            self.got += is_free(self.inventory, self.request)


def is_free(inventory, request):
    try:
        anyaccel.acquire(request, inventory=inventory, wait=0).release()
    except anyaccel.NotFreeError:
        return False
    return True


@pytest.fixture
def agents(node):
    """Start a driver, which is killed at a step of the next claim if one is given; the function returns its id."""
    node.machine = "sim:H100:4"
    script = str(Path(__file__).parent / "nest.py")
    with (node.root / "nest.log").open("w") as log:
        nest = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    arguments = ["kubernetes", "dra", "--machine", node.machine, "--kubelet", str(node.kubelet.root), "--node", "n1",
                 "--cdi", str(node.cdi), "--server", node.api.url]  # fmt: skip

    def start(step=0):
        nest.stdin.write(json.dumps([arguments, step]) + "\n")
        nest.stdin.flush()
        return int(nest.stdout.readline())

    yield start
    nest.stdin.close()
    nest.stdout.close()
    nest.wait(60)


def end(pid):
    """Kill a process, and wait until it has left the kernel."""
    with open(os.pidfd_open(pid), "rb") as process:
        signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
        select.select([process], [], [], 60)


def ask(node, method, name, uid):
    """Ask the driver to prepare or unprepare; return whether it has."""
    node.kubelet.endpoint = str(node.kubelet.root / "plugins/anyaccel.dev/dra.sock")
    try:
        getattr(node.kubelet, method)(name, uid)
    except (grpc.RpcError, RuntimeError):
        return False
    return True


def kill_meanwhile(node, agent, chance, moment, arguments):
    """Ask the driver, and kill it: while it starts, while it answers, or after that; return whether it has answered."""
    if moment == "answered":
        answers = [node.wait_for(lambda: ask(*arguments))]
        end(agent)
        return answers[0]
    if moment == "serving":
        node.wait_for(lambda: ask(node, "unprepare", "none", "none"))
    answers = []
    caller = threading.Thread(target=lambda: answers.append(ask(*arguments)))
    caller.start()
    if chance.random() < 0.5:
        assert not ask(node, "prepare", "x0", "x-0")  # the device of the pod that runs
    threading.Event().wait(chance.random() * 0.3)  # the moment of the kill
    end(agent)
    caller.join()
    return answers[0]


@pytest.mark.timeout(1800 + 10 * KILLS)
def test_no_device_is_held_twice_and_none_is_lost(node, agents):
    seed = int(os.environ.get("ANYACCEL_TEST_SEED", "7"))
    chance = random.Random(seed)
    inventory = anyaccel.detect(node.machine)
    names = device_names(inventory)
    requests = [anyaccel.request_devices([device]) for device in inventory.devices]
    for number, device in enumerate(inventory.devices):
        node.api.allocate(f"c{number}", f"u-{number}", [names[device.id]], pods=[f"p{number}"])
        node.api.allocate(f"x{number}", f"x-{number}", [names[device.id]])  # claims that must be refused meanwhile
    agent = agents()
    node.wait_for(lambda: ask(node, "prepare", "c0", "u-0"))
    person = Person(inventory, inventory.devices[0])
    person.start()
    answered = 0
    prepared = dict.fromkeys(range(1, 4), False)  # None: not known, since the driver was killed meanwhile
    for kill in range(KILLS):
        number = chance.randint(1, 3)
        # However slow the machine is: at least one claim is prepared before a kill.
        moment = chance.choice(("early", "serving", "answered")) if kill else "answered"
        method = chance.choice(("prepare", "unprepare")) if kill else "prepare"
        arguments = node, method, f"c{number}", f"u-{number}"
        before, prepared[number] = prepared[number], None
        answer = kill_meanwhile(node, agent, chance, moment, arguments)
        answered += answer
        if answer:
            prepared[number] = method == "prepare"
        elif before is (method == "prepare"):
            prepared[number] = before  # it could not change anything
        for each, known in prepared.items():
            if known is not None:
                assert is_free(inventory, requests[each]) is not known, (each, known, seed)
        agent = agents()
    person.ended.set()
    person.join()
    assert answered, "no claim was ever prepared"
    assert person.got == 0, f"{person.got} of {person.tries}"
    for number in range(4):
        node.wait_for(lambda n=number: ask(node, "unprepare", f"c{n}", f"u-{n}"))
        assert is_free(inventory, requests[number])
    end(agent)
    assert node.leases() == {}
    assert not list(node.cdi.glob("*.json"))
    print(f"{KILLS} kills, {answered} after an answer; the device of the pod was tried {person.tries} times")


@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_at_any_step_finds_its_way(node, agents):
    """Of prepare and of unprepare: the device is held from the first answer to the last, and free after it."""
    inventory = anyaccel.detect(node.machine)
    device = inventory.devices[0]
    request = anyaccel.request_devices([device])
    node.api.allocate("train", "u-1", [device_names(inventory)[device.id]], pods=["train"])

    def survives(method, step):
        """Let a driver be killed at a step; return whether it came to the end before."""
        pid = agents(step)
        process = os.pidfd_open(pid)
        try:
            while not select.select([process], [], [], 0)[0]:
                if ask(node, method, "train", "u-1"):
                    return True
            return False
        finally:
            os.close(process)
            with contextlib.suppress(ProcessLookupError):
                end(pid)

    for method, free in (("prepare", False), ("unprepare", True)):
        step = 1
        while not survives(method, step):
            assert step < 5_000  # so many of the longest looks at the processes of a busy machine
            agent = agents()
            node.wait_for(lambda m=method: ask(node, m, "train", "u-1"))
            assert is_free(inventory, request) is free
            if method == "unprepare":
                node.wait_for(lambda: ask(node, "prepare", "train", "u-1"))
            else:
                node.wait_for(lambda: ask(node, "unprepare", "train", "u-1"))
                assert is_free(inventory, request)
            end(agent)
            step += STRIDE
        assert is_free(inventory, request) is free
    assert not list(node.cdi.glob("*"))
