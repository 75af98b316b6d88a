"""The Celery tasks, in a worker with two processes, over a broker in files."""

import json
import signal
import textwrap

import anyaccel
import pytest
from example_programs import PATIENCE
from waiting import until

pytest.importorskip("celery", reason="needs Celery (tox -e adoption)")

pytestmark = pytest.mark.timeout(300)
TASKS = """
    import os, pathlib, signal, time
    from celery_tasks import OnDevice, app, score

    @app.task(base=OnDevice)
    def meet(directory, number):
        (pathlib.Path(directory) / str(os.getpid())).touch()
        until = time.monotonic() + 200
        while len(os.listdir(directory)) < number:
            assert time.monotonic() < until
            time.sleep(0.02)
        return os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()

    @app.task(base=OnDevice)
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
"""
CLIENT = """
    import json, os, sys
    from celery.exceptions import WorkerLostError
    from tasks_of_test import die, meet, score

    def together(directory, number):
        os.mkdir(directory)
        calls = [meet.delay(os.path.abspath(directory), number) for _ in range(number)]
        return [call.get(timeout=200) for call in calls]

    told = {"first": together("first", 2), "scores": [score.delay(x).get(timeout=200) for x in range(6)]}
    try:
        die.delay().get(timeout=200)
    except WorkerLostError:
        told["second"] = together("second", 2)
    json.dump(told, open("told.json", "w"))
"""


def test_each_process_of_a_worker_has_a_device_of_its_own(start, tmp_path):
    (tmp_path / "tasks_of_test.py").write_text(textwrap.dedent(TASKS))
    (tmp_path / "client.py").write_text(textwrap.dedent(CLIENT))
    worker = start("-m", "celery", "-A", "tasks_of_test", "worker", "--concurrency", "2", "--loglevel", "INFO")
    until(lambda: " ready." in worker.log.read_text() or worker.poll() is not None, "the worker", PATIENCE)
    assert anyaccel.leases(anyaccel.detect()) == ()  # a device is taken with the first task
    client = start("client.py")
    assert client.wait(240) == 0, client.log.read_text() + worker.log.read_text()
    told = json.loads((tmp_path / "told.json").read_text())
    ids = {device.id for device in anyaccel.detect().devices}
    assert {device for device, _ in told["first"]} == ids
    assert [answer["score"] for answer in told["scores"]] == [0, 2, 4, 6, 8, 10]
    assert {(answer["device"], answer["process"]) for answer in told["scores"]} <= set(map(tuple, told["first"]))
    assert {device for device, _ in told["second"]} == ids  # the process that died was replaced, with its device
    assert len({process for _, process in told["first"] + told["second"]}) == 3
    with pytest.raises(anyaccel.NotFreeError):
        anyaccel.acquire("GPU:1", wait=0)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    anyaccel.acquire("GPU:2", wait=30).release()
