"""Help: of every command, with examples that the command takes."""

import json
import re
import shlex
import sys

import pytest
from anyaccel.cli.commands import COMMANDS, GROUPS, module_of
from anyaccel.cli.help import EXIT_STATUSES
from anyaccel.cli.parser import UNLISTED, dispatch, parse
from our_commands import INSTALLED
from terminals import assert_plain, run_on_terminal


@pytest.mark.parametrize("command", INSTALLED)
def test_help_of_a_command_is_the_same_both_ways_and_ends_with_examples(command, capsys):
    with pytest.raises(SystemExit) as ended:
        dispatch(["help", command])
    assert not ended.value.code
    told = capsys.readouterr().out
    with pytest.raises(SystemExit):
        dispatch([command, "--help"])
    assert capsys.readouterr().out == told
    _, _, examples = told.partition("\nexamples:\n")
    assert examples.count("\n      ") >= 2
    assert EXIT_STATUSES[:20] not in told


@pytest.mark.parametrize("command", INSTALLED)
def test_the_command_takes_its_examples(command):
    module = module_of(command)
    for line, told in module.EXAMPLES:
        assert told[0].islower()
        assert not told.endswith(".")
        words = shlex.split(
            line.replace('eval "$(', "").removeprefix("sudo ").replace(')"', "").partition(" > ")[0].partition(" | ")[0]
        )
        assert words[0] == "anyaccel"
        words = words[: words.index("--")] if "--" in words else words
        own = [word for word in words[1:] if word != command]
        parse(command, module, own)  # it raises when an argument is wrong


def test_help_of_run_is_grouped_and_fits_two_screens():
    status, data = run_on_terminal([sys.executable, "-m", "anyaccel", "run", "--help"], columns=80)
    lines = assert_plain(data).splitlines()
    assert (status, len(lines) <= 2 * 40) == (0, True), len(lines)
    titles = [line for line in lines if line.endswith(":") and line[:1].islower()]
    of_jobs = ["several processes:", "jobs:"] if "jobs" in INSTALLED else []
    groups = ["waiting:", "time limit:", *of_jobs, "rare options:", "common options:"]
    assert titles == ["positional arguments:", "options:", *groups, "examples:"]
    assert lines[0] == "usage: anyaccel run [OPTIONS] REQUEST [REQUEST ...] [-- CMD ...]"


@pytest.mark.parametrize("command", ["run", "hold"])
def test_help_of_a_time_limit_names_the_forms_of_a_duration(command, capsys):
    with pytest.raises(SystemExit):
        dispatch([command, "--help"])
    assert "90 (seconds), 10m or 1:30:00;" in " ".join(capsys.readouterr().out.split())


def test_help_without_a_command_lists_all(capsys):
    assert dispatch(["help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {command} " in told for command in INSTALLED)
    titles = [line.removesuffix(":") for line in told.splitlines() if line[:1].isupper() and line.endswith(":")]
    groups = [title for title in GROUPS if title in titles]  # without an extra, one of them may have no command
    assert groups == titles[: len(groups)]
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))
    assert told.count("exit status: 0 done") == 1


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", [[], ["run"], ["hold"]], ids=["all", "run", "hold"])
def test_help_is_as_wide_as_the_terminal(command, columns):
    _, data = run_on_terminal([sys.executable, "-m", "anyaccel", *command, "--help"], columns=columns)
    told, _, _ = assert_plain(data).partition("\nexamples:\n")
    assert columns - 20 < max(map(len, told.splitlines())) <= columns


def test_help_of_what_is_no_command_names_those_there_are(capsys):
    assert dispatch(["help", "nosuch"]) == 2
    told = capsys.readouterr().err
    assert "there is no command 'nosuch'" in told
    assert "release" in told


def test_verbose_says_how_each_vendor_fared(acme, anyaccel):
    told = anyaccel("-v", "--machine", "sim:A1:1").stderr
    assert re.search(r"^anyaccel: acme: ok in \d+\.\d{3} s", told, re.MULTILINE)


def test_verbose_gives_no_time_for_a_vendor_that_was_not_asked(acme, anyaccel):
    acme.with_suffix(".presence.json").write_text(json.dumps({"resource": "APU", "paths": ["/sys/class/nothing"]}))
    assert anyaccel("-v").stderr == "anyaccel: acme: not asked\n"


@pytest.mark.parametrize(("name", "option"), [each for each in UNLISTED.items() if each[0] in INSTALLED])
def test_help_offers_no_option_that_the_command_refuses(name, option, capsys):
    with pytest.raises(SystemExit):
        dispatch([name, "--help"])
    assert option not in capsys.readouterr().out
