"""The Prefect flow, with a server that Prefect starts for it."""

import json
import textwrap

import anyaccel
import pytest

pytest.importorskip("prefect", reason="needs Prefect (tox -e adoption)")

pytestmark = pytest.mark.timeout(400)
FLOW = """
    import json, os, time
    import prefect_flow
    from prefect_flow import search, train

    def meet(directory):
        \"\"\"Stands for 'fit'; returns once two are running at the same time.\"\"\"
        import os, time
        open(f"{directory}/{os.getpid()}", "w").close()
        until = time.monotonic() + 200
        while len(os.listdir(directory)) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def die_once(path):
        import os, signal
        if not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5

    from prefect import flow

    @flow
    def several():
        prefect_flow.fit = meet
        told["masks"] = train.map([os.path.abspath("here")] * 4).result()
        prefect_flow.fit = die_once
        told["again"] = train(os.path.abspath("died"))

    told = {"best": search([1.0, 0.1, 0.5, 0.01])}
    os.mkdir("here")
    several()
    json.dump(told, open("told.json", "w"))
"""


def test_tasks_wait_for_devices_of_their_own(start, tmp_path):
    (tmp_path / "flow.py").write_text(textwrap.dedent(FLOW))
    settings = {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",
    }
    flow = start("flow.py", **settings)
    assert flow.wait(350) == 0, flow.log.read_text()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["best"] == 0.1
    assert set(told["masks"]) == {device.id for device in anyaccel.detect().devices}
    assert told["again"] == 0.5  # Prefect tried again, with a device again
    assert anyaccel.leases(anyaccel.detect()) == ()
