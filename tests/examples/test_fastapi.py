"""The FastAPI service, served by uvicorn and asked over HTTP."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import anyaccel
import pytest
from example_programs import PATIENCE
from waiting import until

httpx = pytest.importorskip("httpx", reason="needs FastAPI, uvicorn and httpx (tox -e adoption)")
pytest.importorskip("fastapi", reason="needs FastAPI, uvicorn and httpx (tox -e adoption)")
pytest.importorskip("uvicorn", reason="needs FastAPI, uvicorn and httpx (tox -e adoption)")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def serve(start):
    """Serve the example; the server, and a client of it."""
    clients = []

    def serve():
        server = start("-m", "uvicorn", "--port", "0", "fastapi_service:app")

        def address():
            log = server.log.read_text()
            assert server.poll() is None, log
            return re.search(r"running on (http://[\d.:]+)", log)

        clients.append(httpx.Client(base_url=until(address, "the server", PATIENCE)[1], timeout=120))
        return server, clients[-1]

    yield serve
    for client in clients:
        client.close()


def device_of(client):
    answer = client.get("/score", params={"x": 21}).raise_for_status().json()
    assert answer["score"] == 42
    return answer["device"], answer["process"]


def test_requests_are_answered_by_a_model_on_each_device(serve):
    server, client = serve()
    until(lambda: len(anyaccel.leases(anyaccel.detect())) == 2, "both models", PATIENCE)
    seen = set()
    until(lambda: seen.add(device_of(client)) or len(seen) == 2, "an answer of both models", PATIENCE)
    with ThreadPoolExecutor(8) as threads:
        seen |= set(threads.map(lambda _: device_of(client), range(40)))
    assert len(seen) == 2  # two warm processes, whatever comes
    assert {device for device, _ in seen} == {device.id for device in anyaccel.detect().devices}
    with pytest.raises(anyaccel.NotFreeError):
        anyaccel.acquire("GPU:1", wait=0)
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    anyaccel.acquire("GPU:2", wait=30).release()


def test_a_model_that_is_lost_is_replaced(serve):
    _, client = serve()
    device, process = device_of(client)
    os.kill(process, signal.SIGKILL)
    statuses = set()

    def replaced():
        answer = client.get("/score", params={"x": 1})
        statuses.add(answer.status_code)
        return answer.status_code == 200 and answer.json()["device"] == device and answer.json()["process"] != process

    until(replaced, "another model on the device of the one that was killed", PATIENCE)
    assert statuses <= {200, 503}


def test_it_starts_while_another_program_has_a_device(serve, start):
    with anyaccel.acquire("GPU:1", machine="sim:H100:2") as lease:
        server, client = serve()
        assert {device_of(client)[0] for _ in range(3)}.isdisjoint({lease.devices[0].id})
        server.send_signal(signal.SIGTERM)  # also while the second model waits for its device
        server.wait(60)
        assert [each.id for each in anyaccel.leases(anyaccel.detect())] == [lease.id]
