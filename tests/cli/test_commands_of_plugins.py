"""Commands that a distribution brings: found by an entry point, with the parts that ours have."""

import json
import re

import pytest

COMMAND = '''
"""Greet a person. Nothing is held."""
from anyaccel.cli import output
EXAMPLES = (("anyaccel greet you", "a greeting"), ("anyaccel greet you --json", "the same for programs"))
def add_arguments(parser):
    parser.add_argument("whom", help="who is greeted")
def main(args):
    if args.json:
        output.print_json("greet/1", {"whom": args.whom})
    else:
        output.print_line(f"hello {args.whom}")
    return 7
'''


@pytest.fixture
def bring(acme):
    """Install a distribution that brings a command."""

    def bring(source, name="greet", summary=""):
        site = acme.parent
        (site / "greeting.py").write_text(source)
        info = site / "greeting-1.0.dist-info"
        info.mkdir()
        metadata = "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n" + (
            f"Summary: {summary}\n" if summary else ""
        )
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[anyaccel.commands]\n{name} = greeting\n")

    return bring


def test_a_command_of_a_plugin_is_one_of_ours(bring, anyaccel):
    bring(COMMAND)
    done = anyaccel("greet", "you")
    assert (done.returncode, done.stdout, done.stderr) == (7, "hello you\n", "")
    assert json.loads(anyaccel("--json", "greet", "you").stdout)["schema"] == "anyaccel.greet/1"
    assert anyaccel("greet").returncode == 2


def test_it_is_shown_where_commands_are(bring, anyaccel):
    bring(COMMAND, summary="Plug-in for a vendor")
    assert re.search(
        r"^Commands of plug-ins:\n  greet +greet a person \(greeting\)$", anyaccel("--help").stdout, re.MULTILINE
    )
    shown = anyaccel("help", "greet")
    assert "Greet a person." in shown.stdout
    assert "anyaccel greet you --json" in shown.stdout


def test_one_that_says_nothing_is_described_by_its_distribution(bring, anyaccel):
    bring(COMMAND.replace('"""Greet a person. Nothing is held."""', ""), summary="greet persons")
    assert "greet       greet persons (greeting)\n" in anyaccel("--help", timeout=60).stdout


def test_no_distribution_takes_the_place_of_a_command(bring, anyaccel):
    bring(COMMAND, name="env")
    assert "hello" not in anyaccel("env", "A1:1", "--machine", "sim:A1:1").stdout


def test_a_broken_one_costs_itself(bring, anyaccel):
    bring("raise RuntimeError('no\x1b[2J luck')")
    done = anyaccel("greet", "you", timeout=60)  # in a process that has not imported another one of this name
    assert done.returncode == 126
    assert "the command 'greet' of greeting cannot be loaded: RuntimeError: no" in done.stderr
    assert "\x1b" not in done.stderr
    assert anyaccel("plugins").returncode == 0
    assert "greet       a command of greeting" in anyaccel("--help", timeout=60).stdout
    unknown = anyaccel("gret")
    assert (unknown.returncode, "there is no command 'gret'" in unknown.stderr) == (2, True)
