"""Completion, as a shell asks for it."""

import json
import os
import shutil
import subprocess
import sys

import anyaccel as aa
import pytest

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "from anyaccel.cli import program; program()"


def completions(line, **variables):
    """What the command offers at the end of a line."""
    environ = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "fish",  # it has no characters that end a word early
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    reading, writing = os.pipe()
    with os.fdopen(reading) as answer:
        # argcomplete writes to descriptor 8
        script = f'exec "$0" -c "$1" 8>&{writing}'
        done = subprocess.run(
            ["bash", "-c", script, sys.executable, PROGRAM],
            env=environ | variables,
            pass_fds=[writing],
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        os.close(writing)
        assert done.returncode == 0
        return {entry.partition("\t")[0] for entry in answer.read().splitlines()}


def test_commands_are_completed():
    assert completions("anyaccel re") >= {"release", "record"}
    assert "release" in completions("anyaccel help re")


def test_options_of_the_command_are_completed():
    assert "--wait" in completions("anyaccel run --w")
    assert "--wait" not in completions("anyaccel why --w")
    assert completions("anyaccel run GPU:1 --mask ") >= {"id", "index"}


def test_requests_are_completed_with_what_is_here(acme):
    here = {"ANYACCEL_MACHINE": "sim:A1:2"}
    assert completions("anyaccel run ", **here) >= {"APU", "acme", "A1", "acme/0", "acme/1"}
    assert completions("anyaccel run acme/", **here) == {"acme/0", "acme/1"}
    assert completions("anyaccel run --machine sim:A1:3 acme/") == {"acme/0", "acme/1", "acme/2"}
    assert completions("anyaccel run APU:1,", **here) >= {"APU:1,mem=", "APU:1,linked", "APU:1,else=cpu"}


def test_what_can_be_cancelled_is_completed(acme):
    assert completions("anyaccel cancel ") & {"--all", "pyproject.toml"} == {"--all"}, "no files"
    with aa.acquire("APU", machine="sim:A1:2") as hold:
        assert hold.id in completions("anyaccel cancel ")
        assert hold.id in completions("anyaccel release ")


def test_a_machine_that_cannot_be_detected_costs_no_more_than_its_names():
    assert "APU" not in completions("anyaccel run ", ANYACCEL_MACHINE="/nowhere")


def test_simulations_are_completed_with_known_products(acme):
    assert "sim:Acme-One:" in completions("anyaccel --machine sim:A")
    assert "sim:A1:4,Acme-One:" in completions("anyaccel --machine sim:A1:4,")


def test_the_script_is_printed_also_as_json(anyaccel):
    script = anyaccel("completion", "bash").stdout
    assert json.loads(anyaccel("completion", "bash", "--json").stdout)["script"].strip() == script.strip()
    done = anyaccel("completion", "csh")
    assert done.returncode == 2
    assert "csh" in done.stderr


BASH = """
source <(anyaccel completion bash)
COMP_LINE="anyaccel hel" COMP_POINT=12 COMP_TYPE=9 COMP_WORDS=(anyaccel hel) COMP_CWORD=1
_python_argcomplete anyaccel hel anyaccel
printf '%s\n' "${COMPREPLY[@]}"
"""
SCRIPTS = {
    "bash": BASH,
    "zsh": 'autoload -Uz compinit; compinit -D; eval "$(anyaccel completion zsh)"; whence -w _python_argcomplete',
    "fish": "anyaccel completion fish | source; complete -C 'anyaccel hel'",
}
EXPECTED = {"bash": "help", "zsh": "_python_argcomplete: function", "fish": "help"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_the_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    program = tmp_path / "anyaccel"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    program.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    command = [shell, "-c", SCRIPTS[shell]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert EXPECTED[shell] in done.stdout.split("\n")[0], done.stderr
