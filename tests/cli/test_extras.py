"""Without an extra: what is asked for says which one brings it, and all else works."""

import os
import subprocess
import sys
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from anyaccel import extras

NEEDED = ("anyaccel", "argcomplete", "cloudpickle", "msgpack", "pluggy")


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
    """Run an interpreter that sees the core and what it needs, and nothing else that is installed here."""
    site = tmp_path_factory.mktemp("site")
    for name in NEEDED:
        (site / name).symlink_to(Path(find_spec(name).origin).parent)
    offered = "".join(f"Provides-Extra: {name}\n" for name in metadata("anyaccel").get_all("Provides-Extra"))
    (site / "anyaccel-0.dist-info").mkdir()
    (site / "anyaccel-0.dist-info" / "METADATA").write_text(f"Name: anyaccel\nVersion: 0\n{offered}")

    def run(*arguments):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "PYTHON"))}
        environ |= {"PYTHONPATH": str(site), "ANYACCEL_STATE_DIR": str(site / "state")}
        return subprocess.run(
            [sys.executable, "-S", *arguments], env=environ, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        *(((command,), extra) for command, extra in extras.COMMANDS.items()),
        *((("help", command), extra) for command, extra in extras.COMMANDS.items()),
        *((("run", option, "GPU", "--", "true"), extra) for option, extra in extras.OPTIONS.items()),
    ],
)
def test_a_command_says_what_to_install(core_alone, arguments, extra):
    done = core_alone("-m", "anyaccel", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    said, remedy = done.stderr.splitlines()
    assert f"is in the extra '{extra}', which is not installed" in said
    assert remedy == f"anyaccel: pip install 'anyaccel[{extra}]'"


@pytest.mark.parametrize("arguments", [("why", "TPU"), ("--machine", "sim:TPU-V4:4")])
def test_a_name_says_which_plug_in_to_install(core_alone, arguments):
    done = core_alone("-m", "anyaccel", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'anyaccel[tpu]'" in done.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import anyaccel; anyaccel.Pool(engine='ray')", "ray"),
        ("import anyaccel; anyaccel.Pool(engine='dask')", "dask"),
        ("import anyaccel; anyaccel.load_ipython_extension(None)", "notebook"),
    ],
)
def test_python_says_what_to_install(core_alone, code, extra):
    done = core_alone("-c", code)
    assert done.returncode == 1
    assert f"pip install 'anyaccel[{extra}]'" in done.stderr.splitlines()[-1]


def test_a_notebook_shows_what_to_install_without_a_traceback(core_alone):
    """IPython asks an error for its lines by this method."""
    code = """
import anyaccel
try:
    anyaccel.load_ipython_extension(None)
except anyaccel.UsageError as error:
    print(*error._render_traceback_(), sep="\\n")
"""
    assert core_alone("-c", code).stdout.splitlines() == [
        "anyaccel: the magic %accel is in the extra 'notebook', which is not installed",
        "anyaccel: pip install 'anyaccel[notebook]'",
    ]


def test_help_lists_what_is_there_and_names_the_rest(core_alone):
    told = core_alone("-m", "anyaccel", "--help").stdout
    for command in extras.COMMANDS:
        assert f"\n  {command} " not in told
        assert f"{command} (anyaccel[{extras.COMMANDS[command]}])" in " ".join(told.split())
    assert "\n  run " in told


def test_an_engine_that_does_not_exist_names_all_that_do(core_alone):
    done = core_alone("-c", "import anyaccel; anyaccel.Pool(engine='rey')")
    assert done.returncode == 1
    assert "engine must be one of 'dask', 'local', 'ray' (got 'rey')" in done.stderr


def test_a_command_of_ours_comes_from_its_extra_alone(acme, anyaccel):
    """Another distribution cannot take its name."""
    site = acme.parent
    (site / "taken.py").write_text("raise SystemExit('taken')")
    info = site / "aaa_taken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-taken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anyaccel.commands]\ncheck = taken\nnew = taken\nray = taken\n")
    for command in extras.COMMANDS:
        assert "taken" not in anyaccel(command, "--help").stderr
