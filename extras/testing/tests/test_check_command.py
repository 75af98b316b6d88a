"""``anyaccel check``: the same checks without pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anyaccel_testing import CHECKS

ACME = (Path(__file__).parents[3] / "tests" / "vendors" / "acme.py").read_text()


def states(text):
    return {line[:3]: line.split()[1] for line in text.splitlines()}


def test_one_line_per_check(anyaccel, install, recordings):
    install("acme", ACME)
    done = anyaccel("check", "acme", "--recordings", str(recordings(ACME)))
    assert done.returncode == 0, done.stdout
    skipped = dict.fromkeys(("C23", "C28", "C29", "C30"), "skipped")
    assert states(done.stdout) == {check.id: "ok" for check in CHECKS} | skipped
    assert done.stderr == f"anyaccel: {len(CHECKS)} checks: {len(CHECKS) - 4} ok, 0 failed, 4 skipped\n"


def test_a_failure_names_the_machine_and_the_way_out(anyaccel, install, recordings):
    install("acme", ACME.replace("def anyaccel_env(", "def anyaccel_env(").replace("never 3", "never\\n3"))
    done = anyaccel("check", "acme", "--recordings", str(recordings(ACME)))
    assert done.returncode == 1
    (failed,) = [line for line in done.stdout.splitlines() if " failed " in line]
    assert failed.startswith("C21  failed   quad: anyaccel_validate must give one sentence with the rule")
    assert failed.endswith("(and on 1 more machine, see --json)")


def test_json_holds_every_result(anyaccel, install, recordings):
    install("acme", ACME)
    done = anyaccel("check", "acme", "--json", "--recordings", str(recordings(ACME)))
    document = json.loads(done.stdout)
    assert (document["schema"], document["vendor"], document["passed"]) == ("anyaccel.check/1", "acme", True)
    by_machine = {(result["check"], result["machine"]): result["state"] for result in document["results"]}
    assert by_machine["C07", "driver-only"] == by_machine["C20", "products"] == by_machine["C01", None] == "ok"


def test_recordings_are_found_beside_the_source(anyaccel, install, recordings):
    install("acme", ACME)
    assert states(anyaccel("check", "acme").stdout)["C07"] == "skipped"
    directory = recordings(ACME)
    assert (directory.parent / "site").is_dir()  # where the module is installed
    assert states(anyaccel("check", "acme").stdout)["C07"] == "ok"


def test_one_recording_alone(anyaccel, install, recordings):
    install("acme", ACME)
    results = json.loads(anyaccel("check", "acme", "--recordings", f"{recordings(ACME)}/quad", "--json").stdout)[
        "results"
    ]
    assert {result["machine"] for result in results if result["check"] == "C08"} == {"quad"}


def test_the_projects_recordings_win_over_the_copy_of_an_editable_install(
    anyaccel, install, recordings, tmp_path, monkeypatch
):
    """An editable install copies the recordings to site-packages, beside a path to the source."""
    install("acme", ACME, entry="anyaccel_acme_editable")
    project = recordings(ACME).parent
    package = project / "src" / "anyaccel_acme_editable"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ACME)
    (tmp_path / "site" / "anyaccel_acme_editable" / "recordings" / "old").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{package.parent}")
    results = json.loads(anyaccel("check", "acme", "--json").stdout)["results"]
    assert {result["machine"] for result in results if result["check"] == "C08"} == {"driver-only", "pair", "quad"}


def test_this_host(anyaccel, install):
    here = """
    @hookimpl
    def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
        node = ctx.node("/dev/null")
        if node is None:
            return None
        return Detected(devices=(Device(id="acme-null", index=0, model="Acme One", nodes=(node.path,)),))

    def unused(ctx: ProbeContext) -> Detected | None:
    """.replace("\n    ", "\n")
    # /dev/null is a device node that every host has.
    source = ACME.replace(
        "@hookimpl\ndef anyaccel_detect(ctx: ProbeContext) -> Detected | None:\n", here.rstrip() + "\n"
    )
    install("acme", source)
    done = anyaccel("check", "acme", "--real", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, document
    hosts = {
        result["check"] for result in document["results"] if result["machine"] == "host" and result["state"] == "ok"
    }
    assert {"C07", "C08", "C13", "C14", "C16", "C19"} <= hosts


def test_this_host_where_a_replay_differs(anyaccel, install):
    source = ACME.replace(
        '    if not ctx.exists("/sys/class/acme"):\n        return None\n',
        # ctx.root is empty on the host alone: a fact that no recording holds.
        '    import os\n    if os.path.exists("/dev/null"):\n        ctx.read("/proc/self/stat")\n'
        '    return Detected(devices=(Device(id=f"acme-{ctx.root or 7}", index=0, model="Acme One"),))\n',
    )
    install("acme", source)
    done = anyaccel("check", "acme", "--real")
    assert done.returncode == 1
    assert "C07  failed   host: a replay must give what the machine itself gave" in done.stdout


def test_this_host_where_detection_dies(anyaccel, install):
    source = ACME.replace('    if not ctx.exists("/sys/class/acme"):\n', "    import os\n    os._exit(7)\n    if 1:\n")
    install("acme", source)
    done = anyaccel("check", "acme", "--real")
    assert done.returncode == 1
    assert "C07  failed   host: its process ended with exit status 7 before it answered" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("other",), "no plug-in for 'other' is installed (installed: acme)"),
        (("acme", "--real", "--recordings", "/"), "--real checks on this host and --recordings on recorded machines"),
        (("acme", "--recordings", "/dev"), "/dev must hold recordings, one directory with a machine.json each"),
        (("acme", "--force"), "--force goes with --write-expected"),
        (("acme", "--real", "--write-expected"), "--write-expected is for recordings; record this host"),
        (("acme", "--write-expected"), "no recording of acme is found; name their directory with --recordings DIR"),
        (("acme", "--machine", "sim:Acme-One:2"), "takes --recordings DIR or --real instead of --machine"),
    ],
)
def test_arguments_that_make_no_sense(anyaccel, acme, arguments, said):
    done = anyaccel("check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_an_inventory_is_written_for_recordings_that_have_none(anyaccel, install, recordings):
    install("acme", ACME)
    directory = recordings(ACME)
    before = (directory / "quad" / "expected.json").read_text()
    for name in ("pair", "driver-only"):
        (directory / name / "expected.json").unlink()
    done = anyaccel("check", "acme", "--write-expected", env={"ACME_VISIBLE": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{directory}/driver-only/expected.json: no device",
        f"{directory}/pair/expected.json: 2 Acme One",
    ]
    assert "1 of 3 have one already, which --force replaces" in done.stderr
    assert (directory / "quad" / "expected.json").read_text() == before
    written = json.loads((directory / "pair" / "expected.json").read_text())
    assert written["visible"] == {"acme": ["acme-s0", "acme-s1"]}
    assert states(anyaccel("check", "acme").stdout)["C07"] == "ok"
    assert anyaccel("record", "--verify", str(directory / "pair")).returncode == 0


def test_an_inventory_is_replaced_by_force_and_keeps_its_form_and_other_vendors(anyaccel, install, recordings):
    install("acme", ACME)
    directory = recordings(ACME)
    pair, quad = (directory / name / "expected.json" for name in ("pair", "quad"))
    right = json.loads(pair.read_text())
    # Two forms exist: of describe() for one vendor, and of anyaccel record for all vendors.
    pair.write_text("null")
    quad.write_text(
        json.dumps(
            {"schema": "anyaccel.expected/1", "vendors": {"acme": None, "zeta": None}, "visible": {}, "failed": {}}
        )
    )
    done = anyaccel("check", "acme", "--write-expected", "--force", "--json")
    document = json.loads(done.stdout)
    assert (document["kept"], document["written"][str(quad)]) == ([], "4 Acme One")
    assert json.loads(pair.read_text()) == right
    assert json.loads(quad.read_text())["vendors"].keys() == {"acme", "zeta"}


def test_nothing_is_written_for_a_plugin_that_does_not_load(anyaccel, install, recordings):
    install("acme", "import no_such_library\n" + ACME)
    directory = recordings(ACME)
    before = {path: path.read_text() for path in directory.glob("*/expected.json")}
    done = anyaccel("check", "acme", "--write-expected", "--force")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the plug-in of acme does not load: " in done.stderr
    assert "ModuleNotFoundError: No module named 'no_such_library'" in done.stderr
    assert "nothing was written" in done.stderr
    # The files of a correct plug-in are still there: --force alone must not replace them by failures.
    assert {path: path.read_text() for path in directory.glob("*/expected.json")} == before


def test_recordings_without_a_usable_device_are_told(anyaccel, install, recordings):
    warning = "warning: no recording of acme has a usable device, so nothing that needs one was checked"
    source = ACME.replace('facts.get("health", "unknown")', '"unhealthy"').replace(
        '"reason", ""', '"reason", "it is dead"'
    )
    assert source.count("it is dead") == 1
    install("acme", source)
    recordings(ACME)
    written = anyaccel("check", "acme", "--write-expected", "--force")
    assert warning in written.stderr
    assert warning in anyaccel("check", "acme").stderr


def test_an_inventory_says_what_fails(anyaccel, install, recordings):
    install("acme", ACME.replace('id=f"acme-{facts[', 'id=f"acme {facts['))
    (recordings(ACME) / "pair" / "expected.json").unlink()
    done = anyaccel("check", "acme", "--write-expected")
    assert "pair/expected.json: detection fails: anyaccel_detect: Device.id must" in done.stdout


HIDES_NOTHING = ACME.replace(
    "    names = [", "    if not devices:\n        return EnvEdits(unset=frozenset({'ACME_VISIBLE'}))\n    names = ["
)


def declare(recordings, declared):
    directory = recordings(ACME)
    (directory / "expected_failures.json").write_text(json.dumps(declared))
    return str(directory)


def test_a_known_failure_is_declared_beside_the_recordings(anyaccel, install, recordings):
    install("acme", HIDES_NOTHING)
    done = anyaccel("check", "acme", "--recordings", declare(recordings, {"C17": "no value for none, acme/runtime#7"}))
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("C17")]
    assert line.startswith("C17  expected pair: no value for none, acme/runtime#7 (anyaccel_env for no device must")
    assert "0 failed, 1 failed as expected, 4 skipped" in done.stderr


def test_a_known_failure_that_is_gone_is_to_be_taken_out(anyaccel, install, recordings):
    install("acme", ACME)
    done = anyaccel("check", "acme", "--recordings", declare(recordings, {"C17": "acme/runtime#7"}))
    assert done.returncode == 1
    assert "C17 no longer fails: take it out of the expected failures" in done.stdout


def test_a_known_failure_that_cannot_be_looked_at_is_skipped(anyaccel, install, recordings):
    install("acme", "import no_such_library\n" + ACME)
    done = anyaccel("check", "acme", "--recordings", declare(recordings, {"C17": "acme/runtime#7"}))
    found = states(done.stdout)
    assert (done.returncode, found["C01"], found["C17"]) == (1, "failed", "skipped")


@pytest.mark.parametrize("declared", [[], {"C99": "why"}, {"C17": " "}, {"C17": 7}])
def test_a_declaration_without_check_or_reason_is_refused(anyaccel, install, recordings, declared):
    install("acme", ACME)
    done = anyaccel("check", "acme", "--recordings", declare(recordings, declared))
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected_failures.json: expected failures must map ids of checks" in done.stderr
