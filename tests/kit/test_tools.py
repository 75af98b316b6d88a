"""Tools of a vendor: answers, and failures."""

from __future__ import annotations

import re

import pytest
from anyaccel.kit import FaultError, Tool
from anyaccel.kit.tools import pairs

TOOL = Tool("acme-tool", package="acme-utils", hung="look for acme in 'dmesg'", failed="load the driver")


def fault(ctx, *arguments):
    with pytest.raises(FaultError) as caught:
        TOOL.ask(ctx, *arguments)
    return caught.value.fault


def test_what_it_prints_is_taken(program):
    assert TOOL.ask(program('echo "$@"'), "-a", "b c") == "-a b c\n"


def test_a_tool_that_is_not_installed_is_no_fault(machine):
    for ask in (TOOL.run, TOOL.ask, TOOL.json):
        assert ask(machine()) is None
    assert TOOL.rows(machine(), ("id", "load")) is None
    assert TOOL.sections(machine(), r"(\d)") is None


def test_the_places_where_it_may_be_are_tried_in_turn(program):
    tool = Tool("/opt/acme/bin/acme-tool", "acme-tool")

    assert tool.name == "acme-tool"
    assert tool.ask(program("echo here")) == "here\n"


def test_half_of_the_time_is_left_for_the_report(program):
    found = fault(program("exec sleep 60", seconds=2.0))

    given = re.search(r"acme-tool did not end within (\d\.\d) s", found.reason)
    assert float(given[1]) <= 1.0
    assert found.remedy == "run 'acme-tool' by hand and look for acme in 'dmesg'"


@pytest.mark.parametrize(
    ("script", "reason", "remedy"),
    [
        ("echo 'no driver' >&2; exit 3", "acme-tool failed with exit status 3 (no driver)", "load the driver"),
        ("echo out; exit 1", "exit status 1 (out)", "load the driver"),
        ("kill -9 $$", "exit status -9 (without a message)", "load the driver"),
    ],
)
def test_a_tool_that_fails_says_why(program, script, reason, remedy):
    found = fault(program(script))

    assert reason in found.reason
    assert found.remedy == remedy


def test_a_tool_that_cannot_be_run_is_a_fault(program, tmp_path):
    ctx = program("")
    (tmp_path / "acme-tool").write_bytes(b"\x7fELF of another machine")

    assert fault(ctx).remedy == "reinstall acme-utils"


@pytest.mark.parametrize("text", ['{"a": [1]}', 'Welcome to acme\n{"a": [1]}'])
def test_json_is_read_with_or_without_a_banner(program, text):
    assert TOOL.json(program(f"cat <<'EOF'\n{text}\nEOF")) == {"a": [1]}


@pytest.mark.parametrize("text", ["", "no devices", "[1, 2", "[" * 100_000])
def test_what_is_no_json_is_a_fault(machine, text):
    ctx = machine(commands=[{"argv": ["acme-tool", "-j"], "returncode": 0, "stdout": text, "stderr": ""}])

    with pytest.raises(FaultError) as caught:
        TOOL.json(ctx, "-j")

    assert caught.value.fault.reason.startswith("acme-tool must answer JSON (got ")
    assert caught.value.fault.remedy == "run 'acme-tool -j' by hand"


FIELDS = ("id", "load", "name")


def test_rows_come_in_any_order_with_units_and_header(program):
    ctx = program('[ "$2" = id,load,name ] && printf "id, load [%%], name\\nB1, 50 %%, x\\na0, N/A, \\n"')

    rows = TOOL.rows(ctx, FIELDS, "-q", "{fields}", key="[ab][01]")

    assert list(rows) == ["b1", "a0"]
    assert (rows["b1"].number("load"), rows["b1"].text("name"), rows["b1"].text("other")) == (50.0, "x", None)
    assert (rows["a0"].number("load"), rows["a0"].text("name")) == (None, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a0, 1", "one line of 3 values (id, load, name) per device (got 'a0, 1')"),
        ("zz, 1, x", "one line of 3 values"),
        ("| ACME |", "one line of 3 values"),
        (r"\377\376\000", "one line of 3 values"),
        (r"a0, 1, x\na0, 1, x", "name each device once (got a0 twice)"),
    ],
)
def test_a_table_of_another_form_is_a_fault(program, text, reason):
    with pytest.raises(FaultError) as caught:
        TOOL.rows(program(f"printf '{text}'"), FIELDS, key="[ab][01]")

    assert reason in caught.value.fault.reason
    assert "by hand" in caught.value.fault.remedy


def test_a_word_where_a_number_belongs_is_a_fault(program):
    rows = TOOL.rows(program("echo a0, -1.5, zero"), FIELDS)

    assert rows["a0"].number("load") == -1.5
    for ask, reason in (
        (lambda: rows["a0"].count("load"), "a count for load of a0 (got '-1.5')"),
        (lambda: rows["a0"].number("name"), "a number for name of a0 (got 'zero')"),
    ):
        with pytest.raises(FaultError) as caught:
            ask()
        assert reason in caught.value.fault.reason


@pytest.mark.parametrize("written", ["35", "35C", "35 C", "35 °C", "35℃", "+35.0 ℃"])
def test_a_number_may_have_a_unit(program, written):
    assert TOOL.rows(program(f"echo 'a0, {written}, x'"), FIELDS)["a0"].number("load") == 35


LISTING = "Acme 1.2\n[0] card\n  Power : 50 W\n  Power : 31 W\n  Temp: N/A\n[1] card\n  Power : 7\n"


def test_sections_are_told_apart_by_their_first_line(program):
    found = TOOL.sections(program(f"cat <<'EOF'\n{LISTING}EOF"), r"\[(\d+)\] card")

    assert {name: row.number("Power") for name, row in found.items()} == {"0": 50.0, "1": 7.0}
    assert found["0"].number("Temp") is None


def test_lines_of_names_and_values_are_read():
    assert pairs("A: 1\nB : x:y\nno colon\nC:\nA: 2") == {"A": "1", "B": "x:y", "C": None}


TABLE = """+----+
| 0  One    | 0000:19:00.0 | 12% |
| 1  One XT | 0000:1A:00.0 | N/A |
"""
CELLS = r"^\|\s*(?P<index>\d+)\s+(?P<name>\S.*?)\s*\|\s*(?P<key>[0-9a-f:.]+)\s*\|\s*(?P<busy>\S+)\s*\|(?P<rest>x)?"


def test_a_table_for_people_is_read_by_a_pattern(program):
    rows = TOOL.scan(program(f"cat <<'E'\n{TABLE}E"), CELLS)

    assert {key: (row.count("index"), row.text("name")) for key, row in rows.items()} == {
        "0000:19:00.0": (0, "One"),
        "0000:1a:00.0": (1, "One XT"),
    }
    assert rows["0000:19:00.0"].measures(busy="busy")["utilization"] == 0.12
    assert rows["0000:1a:00.0"].measures(busy="busy")["utilization"] is None
    assert rows["0000:1a:00.0"].text("rest") is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo nothing of the kind", "must answer a table of devices (got 'nothing of the kind')"),
        (f"cat <<'E'\n{TABLE}{TABLE}E", "must name each device once (got 0000:19:00.0 twice)"),
    ],
)
def test_a_table_without_devices_or_with_one_twice_is_a_fault(program, script, reason):
    with pytest.raises(FaultError, match=re.escape(reason)):
        TOOL.scan(program(script), CELLS)


def test_json_may_stand_between_lines_of_a_log(program):
    assert TOOL.json(program("echo 'W: old firmware'; echo ' {\"a\": 1}'; echo done")) == {"a": 1}


def test_a_tool_gets_the_libraries_that_it_does_not_find(program, machine):
    tool = Tool("acme-tool", libraries="/opt/acme/lib")

    assert tool.ask(program('echo "$LD_LIBRARY_PATH"')) == "/opt/acme/lib\n"
    assert tool.ask(machine()) is None


def test_a_tool_whose_libraries_are_missing_is_installed_and_fails(program):
    tool = Tool("acme-tool", libraries="/opt/acme/lib", package="acme-utils")

    with pytest.raises(FaultError, match=r"exit status 127 \(libacme\.so: cannot open"):
        tool.ask(program("echo 'libacme.so: cannot open shared object file' >&2; exit 127"))
    with pytest.raises(FaultError, match="acme-tool did not end within"):
        tool.ask(program("exec sleep 60", seconds=1.0))
