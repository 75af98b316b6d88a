"""The command line: data on standard output, the rest on standard error, documented exit statuses, no traceback."""

import json
import os

import pytest
from anyaccel.errors import LeaseNotFoundError

WHOLE = "sim:Acme-Whole:4"


def run(anyaccel, *arguments, **options):
    done = anyaccel(*arguments, **options)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def test_status_lists_devices_for_people(acme, anyaccel):
    status, out, err = run(anyaccel, "--machine", "sim:A1:2")
    assert status == 0
    assert [line.split()[:4] for line in out.splitlines()] == [
        ["DEVICE", "TYPE", "MEM/GiB", "LOAD"],
        ["acme/0", "Acme-One", "-/16.0", "-"],
        ["acme/1", "Acme-One", "-/16.0", "-"],
        ["2", "devices,", "2", "free"],
    ]
    assert err == "anyaccel: simulated machine sim:A1:2\n"


def test_status_is_json_in_base_units_with_null_for_unknown(acme, anyaccel, record):
    status, out, err = run(anyaccel, "--json", "--machine", record({}, {"health": "unhealthy", "reason": "lost"}))
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "anyaccel.status/1"
    assert found["time"].endswith("Z")
    (vendor,) = found["vendors"]
    assert (vendor["vendor"], vendor["state"], vendor["reason"], vendor["driver_version"]) == (
        "acme",
        "ok",
        None,
        "7.1",
    )
    first, second = found["devices"]
    expected = {
        "vendor": "acme", "id": "acme-s0", "index": 0, "type": "Acme-One", "tags": ["Acme-One", "A1", "ACME"],
        "resource": "APU", "kind": "apu", "memory_bytes": 1 << 34, "memory_used_bytes": 1 << 30, "utilization": 0.5,
        "temperature_celsius": None, "power_watts": None, "visible": True, "health": "unknown", "health_reason": None,
        "fractional": "shared", "free": 1.0, "holders": [], "declared": False, "pci_bus_id": None,
        "processes": [{"pid": 7, "memory_bytes": 1 << 30}], "nodes": ["/dev/acme0"],
    }  # fmt: skip
    assert {key: first[key] for key in expected} == expected
    assert (second["health"], second["health_reason"], second["free"]) == ("unhealthy", "lost", 0.0)


def test_a_machine_without_devices_says_what_was_probed(acme, anyaccel):
    status, out, _ = run(anyaccel)
    assert status == 0
    assert out.startswith("No accelerators were found.\nacme: probed in ")
    assert "no hardware of this vendor" in out


def test_no_plugin_at_all(anyaccel):
    status, out, _ = run(anyaccel, env={"ANYACCEL_PLUGINS": "none"})
    assert status == 0
    assert "No plug-in is installed" in out


def test_a_broken_vendor_is_listed_with_its_reason(acme, install, anyaccel, record):
    install("bad", "import os; os._exit(9)", distribution="third-party-bad", version="0.3")
    status, out, _ = run(anyaccel, "--json", "--machine", record({}))
    assert status == 0
    found = json.loads(out)
    assert [device["vendor"] for device in found["devices"]] == ["acme"]
    bad = next(vendor for vendor in found["vendors"] if vendor["vendor"] == "bad")
    assert (bad["state"], bad["distribution"], bad["version"]) == ("failed", "third-party-bad", "0.3")
    assert bad["reason"] == "its process ended with exit status 9 before it answered."
    assert bad["problem"]["kind"] == "died"
    status, out, err = run(anyaccel, "plugins", "bad")
    assert (status, "bad: its process ended with exit status 9" in err) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--machine", WHOLE, "--mask", "index", "run", "APU:2"),
        ("run", "--machine", WHOLE, "--mask=index", "APU:2"),
        ("run", "APU:2", "--mask", "index", "--machine", WHOLE),
        ("--mask", "index", "run", "APU:2", f"--machine={WHOLE}"),
    ],
)
def test_options_stand_before_or_after_the_request(arguments, acme, anyaccel):
    assert run(anyaccel, *arguments, "--", "sh", "-c", 'echo "$ACME_VISIBLE" -- "$1"', "x", "--json") == (
        0, "0,1 -- --json\n", "",
    )  # fmt: skip


def test_why(acme, anyaccel):
    status, out, _ = run(anyaccel, "--machine", "sim:A1:2", "why", "APU:2")
    assert (status, out) == (0, "APU:2 fits now.\n")
    status, out, err = run(anyaccel, "--machine", "sim:A1:2", "why", "APU:5")
    assert (status, err) == (3, "")
    assert "APU:5 can never fit: this machine has 2 APU" in out
    assert "nearest that fits: APU:2" in out
    status, out, _ = run(anyaccel, "why", "APU:5", "--machine", "sim:A1:2", "--json")
    verdict = json.loads(out)
    assert (status, verdict["schema"], verdict["nearest"]) == (3, "anyaccel.why/1", "APU:2")


@pytest.mark.parametrize("command", [("why",), ("select",), ("env",), ("run", "--", "true")])
def test_an_alternative_that_nothing_knows_is_reported_beside_the_chosen_one(command, acme, anyaccel):
    data = {"resource": "APU", "paths": ["/sys/class/acme"], "names": ["A1", "A2"]}
    acme.with_suffix(".presence.json").write_text(json.dumps(data))
    name, *rest = command
    status, _, err = run(anyaccel, "--machine", "sim:A1:2", name, "A1|Al|a2:1", *rest)
    assert status == 0
    assert err.startswith("anyaccel: unknown in A1|Al|a2:1: Al; no device and no installed plug-in has such a name\n")
    assert "unknown" not in run(anyaccel, "--machine", "sim:A1:2", name, "A1|a2|acme:1", *rest)[2]


def test_a_vendors_rule_is_quoted(acme, anyaccel):
    status, out, _ = run(anyaccel, "--machine", "sim:A1:8", "why", "APU:3")
    assert status == 3
    assert "an Acme bus connects 1, 2 or 4 devices, never 3" in out
    assert "nearest that fits: APU:2" in out or "nearest that fits: APU:4" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ("run", "APU:1.5", "--", "true"),
            2,
            "a quantity above one device must be whole (got 1.5); ask for APU:1 or APU:2",
        ),
        (("why", "APX"), 2, "unknown name 'APX': no device and no installed plug-in goes by it; did you mean APU?"),
        (("run", "CPU:1", "--", "true"), 2, "the CPU is what a request may fall back to, as in GPU:1,else=cpu"),
        (("run", "APU:9", "--", "true"), 3, "APU:9 can never fit: this machine has 4 APU"),
        (("run", "APU"), 2, "a command to run must follow '--'"),
        (("run", "--", "true"), 2, "the following arguments are required: REQUEST"),
        (("select", "APU", "--", "true"), 2, "a command after '--' belongs to 'anyaccel run'"),
        (("stauts",), 2, "there is no command 'stauts'; did you mean status"),
        (("frobnicate",), 2, "the commands are status, top, queue"),
        (("status", "--nope"), 2, "unrecognized arguments: --nope"),
        (("run", "APU", "--wiat", "9s", "--", "true"), 2, "; did you mean --wait?"),
        (("run", "APU", "--no-wait=2", "--", "true"), 2, "argument --no-wait takes no value (got '2')"),
        (("select", "APU", "--format", "bus"), 2, "invalid choice: 'bus'"),
        (
            ("why", "APU", "--probe-timeout", "nan"),
            2,
            "must be a duration such as 90s, 15m, 2h, 1h30m or 1:30:00 (got 'nan')",
        ),
        (("why", "APU", "--declare", "APU"), 2, "'APU'"),
        (("why", ""), 2, "a request must name at least one device"),
        (("run", "APU", "--", "no-such-command"), 127, "the command 'no-such-command' was not found"),
        (("run", "APU", "--", "/etc/passwd"), 126, "the command '/etc/passwd' cannot be run: Permission denied"),
        (("record", "/tmp/x"), 2, "a simulated machine has no facts to record"),
        (("plugins", "nope"), 2, "no plug-in for 'nope' is installed (installed: acme)"),
    ],
)
def test_bad_input_gets_one_message_and_the_documented_status(arguments, status, message, acme, anyaccel):
    here = status in (2, 3)  # else it is refused by the kernel, when all is prepared
    got, out, err = run(anyaccel, "--machine", WHOLE, *arguments, here=here)
    assert (got, out) == (status, "")
    assert message in err
    assert err.startswith("anyaccel: ")
    got, out, err = run(anyaccel, "--machine", WHOLE, "--json", *arguments, here=here)
    assert (got, err) == (status, "")
    assert message in json.loads(out)["error"]["message"]


def test_a_machine_that_does_not_exist(acme, anyaccel):
    status, _, err = run(anyaccel, "--machine", "/no/such", "status")
    assert status == 2
    assert err.startswith("anyaccel: there is no machine '/no/such': it must be 'host'")


def test_the_machine_can_come_from_the_environment(acme, anyaccel):
    status, out, _ = run(anyaccel, "select", "APU:2", env={"ANYACCEL_MACHINE": WHOLE})
    assert (status, out) == (0, "acme-0\nacme-1\n")


def test_select_prints_ids_and_says_that_nothing_is_held(acme, anyaccel):
    status, out, err = run(anyaccel, "--machine", WHOLE, "select", "APU:2", "--format", "index")
    assert (status, out) == (0, "0\n1\n")
    assert err == "anyaccel: nothing is held: another program may take these devices\n"
    status, out, _ = run(anyaccel, "--machine", "sim:A1:1", "select", "APU:0.5", "--json")
    (share,) = json.loads(out)["devices"]
    assert (share["share"], share["enforced_by"], share["memory_bytes"]) == (0.5, "by agreement", 8 << 30)


def test_env_can_be_evaluated_by_a_shell(acme, anyaccel):
    import subprocess
    import sys

    command = (
        f'eval "$({sys.executable} -m anyaccel --machine {WHOLE} env APU:2)"; echo "$ACME_VISIBLE ${{ACME_ORDER-none}}"'
    )
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "ACME_ORDER": "x"}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("acme-0,acme-1 none\n", "")
    _, out, _ = run(anyaccel, "--machine", WHOLE, "env", "APU", "--json", env={"ACME_ORDER": "x"})
    edits = json.loads(out)
    assert (edits["set"]["ACME_VISIBLE"], edits["unset"]) == ("acme-0", ["ACME_ORDER"])


def test_cpu_fallback_is_asked_for_and_said(acme, anyaccel):
    code = 'echo "[$ACME_VISIBLE] [$ANYACCEL_DEVICES]"'
    status, out, err = run(anyaccel, "--machine", WHOLE, "run", "APU:9,else=cpu", "--", "sh", "-c", code)
    assert (status, out) == (0, "[] []\n")
    assert err == (
        "anyaccel: APU:9,else=cpu can never fit: this machine has 4 APU (4 Acme-Whole). It runs on the CPU instead.\n"
    )


def test_each_released_lease_is_named_even_if_a_later_one_does_not_exist(acme, anyaccel):
    lease = anyaccel("hold", "--machine", "sim:Acme-Whole:1", "APU:1").stdout.strip()
    done = anyaccel("release", lease, lease, "0" * 12)
    assert done.returncode == LeaseNotFoundError.exit_code
    assert f"{lease} is released; signalled: " in done.stderr
    assert "0" * 12 in done.stderr


def test_more_devices_can_be_declared_than_exist(acme, anyaccel):
    status, out, _ = run(anyaccel, "--machine", WHOLE, "--declare", "APU=6", "--json")
    devices = json.loads(out)["devices"]
    assert (status, len(devices), [device["declared"] for device in devices]) == (0, 6, [False] * 4 + [True] * 2)
    status, _, _ = run(anyaccel, "--machine", WHOLE, "--declare", "APU=6", "why", "APU:6,mixed")
    assert status == 0
    status, _, _ = run(anyaccel, "--machine", WHOLE, "--declare", "APU=2", "why", "APU:3")
    assert status == 3


def test_a_recording_replays(acme, anyaccel, record, tmp_path):
    directory = tmp_path / "again"
    status, out, _ = run(anyaccel, "--machine", record({}, {}), "record", str(directory))
    assert (status, out) == (0, f"{directory}/machine.json\n")
    _, out, _ = run(anyaccel, "--machine", str(directory), "--json")
    assert [device["id"] for device in json.loads(out)["devices"]] == ["acme-s0", "acme-s1"]
    status, _, err = run(anyaccel, "record", str(directory))
    assert (status, "exists and is not overwritten" in err) == (2, True)
    status, _, err = run(anyaccel, "record", "/proc/no/where")
    assert (status, "cannot be written" in err) == (2, True)


def test_plugins_lists_what_is_installed(acme, anyaccel):
    status, out, _ = run(anyaccel, "plugins")
    assert status == 0
    assert out.splitlines()[1].split() == ["acme", "ok", "APU", "anyaccel-acme", "1.2.3"]
    _, out, _ = run(anyaccel, "plugins", "acme", "--json")
    (plugin,) = json.loads(out)["plugins"]
    assert (plugin["state"], plugin["env_vars"]) == ("ok", ["ACME_VISIBLE", "ACME_ORDER"])


def test_help_and_version(anyaccel):
    from anyaccel import __version__

    for arguments in (("--version",), ("-V",)):
        assert run(anyaccel, *arguments) == (0, f"anyaccel {__version__}\n", "")
    status, out, _ = run(anyaccel, "--help")
    assert (status, "exit status:" in out) == (0, True)
    for command in ("status", "run", "select", "why", "env", "plugins", "record"):
        status, out, err = run(anyaccel, command, "--help")
        assert (status, err) == (0, "")
        assert out.startswith(f"usage: anyaccel {command}")


def test_a_reader_that_has_enough_is_no_error(acme):
    import subprocess
    import sys

    command = f"{sys.executable} -m anyaccel --machine sim:A1:900 --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.parametrize("given", ["-5s", "1_000", "\u0663", "1.5", "-1000001", "9" * 5000, ""])
def test_a_priority_that_cannot_be_is_refused_with_the_rule(given, acme, anyaccel):
    done = anyaccel("why", "A1", "--machine", "sim:A1:1", f"--priority={given}")
    assert done.returncode == 2
    assert "argument --priority: must be a whole number from -1000000 to 1000000 (got " in done.stderr
    assert len(done.stderr) < 250


def test_a_priority_may_be_negative(acme, anyaccel):
    assert anyaccel("why", "A1", "--machine", "sim:A1:1", "--priority=-3").returncode == 0
