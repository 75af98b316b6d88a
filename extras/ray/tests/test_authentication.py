"""Ray's authentication tokens: used by the nodes and the pools that have one, refused clearly, and never printed."""

import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import anyaccel as aa
import psutil
import pytest
from anyaccel_ray.authentication import token_source, variables
from ray_nodes import (
    SECONDS,
    carries,
    environment,
    free_port,
    head_options,
    listening,
    run_program,
    short_directory,
    started_node,
    uses_ray,
)

SECRET = "5ecre7-0f-the-test-and-of-nothing-else"
MAKE_ONE = "make one with 'ray get-auth-token --generate', or take that of the cluster: copy its ~/.ray/auth_token here"
OTHER = "an0ther-5ecre7-of-the-same-test"


def home(where, token=None):
    """A home directory, with a token of Ray's or without one."""
    (where / ".ray").mkdir(parents=True)
    if token is not None:
        (where / ".ray" / "auth_token").write_text(token)
        (where / ".ray" / "auth_token").chmod(0o600)
    return str(where)


def user(home, **changes):
    """The environment of a user who has set no mode."""
    environ = environment(HOME=home)
    del environ["RAY_AUTH_MODE"]
    return {**environ, **changes}


@pytest.fixture
def where(tmp_path):
    """A named file with a token, and home directories with and without one."""
    (tmp_path / "named").write_text(SECRET)
    (tmp_path / "blank").write_text(" \n")
    return SimpleNamespace(
        named=str(tmp_path / "named"),
        blank=str(tmp_path / "blank"),
        absent=str(tmp_path / "absent"),
        having=home(tmp_path / "having", SECRET),
        lacking=home(tmp_path / "lacking"),
        blanks=home(tmp_path / "blanks", "\n"),
    )


# What Ray 2.60 finds; test_ray_finds_what_we_say_it_does compares.
SOURCES = [
    ({"HOME": "having"}, "~/.ray/auth_token"),
    ({"HOME": "lacking"}, ""),
    ({"HOME": "blanks"}, ""),
    ({"HOME": "absent"}, ""),
    ({"RAY_AUTH_TOKEN": "=secret", "HOME": "lacking"}, "RAY_AUTH_TOKEN"),
    ({"RAY_AUTH_TOKEN": "=secret", "RAY_AUTH_TOKEN_PATH": "absent"}, "RAY_AUTH_TOKEN"),
    ({"RAY_AUTH_TOKEN": "= ", "HOME": "lacking"}, ""),
    ({"RAY_AUTH_TOKEN": "=", "HOME": "having"}, "~/.ray/auth_token"),
    ({"RAY_AUTH_TOKEN_PATH": "named", "HOME": "having"}, "named"),
    ({"RAY_AUTH_TOKEN_PATH": "=", "HOME": "having"}, "~/.ray/auth_token"),
    ({"RAY_AUTH_TOKEN_PATH": "absent", "HOME": "having"}, None),
    ({"RAY_AUTH_TOKEN_PATH": "blank", "HOME": "having"}, None),
]
IDS = [" ".join(f"{name}={value}" for name, value in environ.items()) for environ, _ in SOURCES]


def written(environ, where):
    return {
        name: value.removeprefix("=") if value.startswith("=") else getattr(where, value)
        for name, value in environ.items()
    }


@pytest.mark.parametrize(("environ", "source"), SOURCES, ids=IDS)
def test_where_the_token_is(environ, source, where):
    environ = written(environ, where)
    if source is None:
        with pytest.raises(aa.UsageError, match="RAY_AUTH_TOKEN_PATH must name a file that holds a token") as caught:
            token_source(environ)
        assert "unset it" in caught.value.hint
    else:
        assert token_source(environ) == (where.named if source == "named" else source)


@pytest.mark.parametrize(("home", "source"), [("having", "~/.ray/auth_token"), ("lacking", "")])
def test_without_home_it_is_in_the_directory_of_the_account(home, source, where, monkeypatch):
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_dir=str(getattr(where, home))))
    assert token_source({}) == source


@uses_ray
def test_ray_finds_what_we_say_it_does(where, tmp_path):
    program = """
import json, os, sys
from ray._raylet import AuthenticationTokenLoader
for environ in json.loads(sys.argv[1]):
    for name in ("HOME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    try:
        print(loader.has_token(ignore_auth_mode=True))
    except Exception:
        print(None)
"""
    cases = [written(environ, where) for environ, _ in SOURCES]
    log = tmp_path / "log"
    found = run_program(program, [json.dumps(cases)], environ=environment(), log=log).split()
    assert found == [str(None if source is None else bool(source)) for _, source in SOURCES]


@pytest.mark.parametrize("mode", ["token", "disabled", "TOKEN", ""])
def test_a_mode_that_the_user_has_set_stays(mode, where):
    assert variables({"HOME": where.having, "RAY_AUTH_MODE": mode}) == {}


def test_a_token_that_is_there_is_used(where):
    assert variables({"HOME": where.having}) == {"RAY_AUTH_MODE": "token"}
    assert variables({"HOME": where.lacking}) == {}


def test_a_token_is_asked_for_and_there_is_none(where, anyaccel):
    environ = {"HOME": where.lacking, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None}
    done = anyaccel("ray", "start", "--dry-run", "--head", env=environ)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "anyaccel: RAY_AUTH_MODE=token is set and there is no token of Ray's",
        f"anyaccel: {MAKE_ONE}",
    ]


def test_the_dry_run_says_the_mode_and_not_the_token(where, anyaccel):
    environ = {"HOME": where.having, "RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": SECRET, "RAY_AUTH_TOKEN_PATH": None}
    done = anyaccel("ray", "start", "--dry-run", "--head", env=environ)
    assert "RAY_AUTH_MODE=token" in done.stdout
    assert "requires Ray's token in RAY_AUTH_TOKEN" in done.stderr
    assert SECRET not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A cluster of 'anyaccel ray start' by a user who has a token in the home directory, and nothing else set."""
    there = tmp_path_factory.mktemp("secured")
    owner = user(home(there / "owner", SECRET), ANYACCEL_PLUGINS="", ANYACCEL_STATE_DIR=str(there / "leases"))
    port = free_port()
    with short_directory() as files, contextlib.ExitStack() as nodes:
        start = [sys.executable, "-m", "anyaccel", "ray", "start", "--num-cpus=1", "--declare", "GPU=1"]
        head = [*start, *head_options(port, files)]
        log = there / "head"
        node = nodes.enter_context(started_node(head, owner, log))
        yield SimpleNamespace(
            address=f"127.0.0.1:{port}",
            owner=owner,
            stranger=user(home(there / "stranger"), ANYACCEL_PLUGINS="", ANYACCEL_STATE_DIR=str(there / "others")),
            head=node,
            start=start,
            said=log.read_text(),
            nodes=nodes,
            log=there,
        )


POOL = """
import sys
{before}
import anyaccel
def held():
    return len(anyaccel.current().devices)
try:
    with anyaccel.Pool("GPU:1", engine="ray", address=sys.argv[1]) as pool:
        print("held", pool.submit(held).result(100))
except anyaccel.UsageError as error:
    print("refused:", error)
    print("way out:", error.hint)
"""


@uses_ray
@pytest.mark.parametrize("before", ["", "import ray"], ids=["alone", "Ray is imported before"])
def test_a_pool_of_the_same_user_is_admitted_by_address(before, secured, tmp_path):
    """Ray reads its variables when it is imported, which a program may do before it makes a pool."""
    program = POOL.format(before=before)
    log = tmp_path / "log"
    printed = run_program(program, [secured.address], environ=secured.owner, log=log, needs=secured.head)
    assert "held 1" in printed


@uses_ray
def test_a_second_node_of_the_same_user_is_admitted(secured, tmp_path):
    again = {**secured.owner, "ANYACCEL_STATE_DIR": str(tmp_path / "leases")}
    with started_node([*secured.start, f"--address={secured.address}"], again, tmp_path / "node") as node:
        assert node.poll() is None


@uses_ray
@pytest.mark.parametrize(
    ("changes", "reason", "way_out"),
    [
        ({}, "wants its authentication token, and there is none here", "copy ~/.ray/auth_token of the user who"),
        ({"RAY_AUTH_TOKEN": OTHER}, "and the one in RAY_AUTH_TOKEN is another", "copy ~/.ray/auth_token of the user"),
        ({"RAY_AUTH_MODE": "disabled"}, "and RAY_AUTH_MODE=disabled keeps Ray from using one", "unset RAY_AUTH_MODE"),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE=token is set and there is no token of Ray's", "make one with"),
    ],
    ids=["none", "another", "disabled", "asked for"],
)
def test_who_lacks_the_token_is_told_so_at_once(changes, reason, way_out, secured, tmp_path):
    environ = {**secured.stranger, **changes}
    log = tmp_path / "log"
    printed = run_program(POOL.format(before=""), [secured.address], environ=environ, log=log, needs=secured.head)
    # In our words: Ray itself says after 20 seconds that it could not connect.
    refused, remedy = printed[printed.index("refused: ") :].splitlines()
    assert reason in refused
    assert remedy.startswith(f"way out: {way_out}")
    assert SECRET not in printed
    assert OTHER not in printed


@uses_ray
def test_a_node_that_lacks_the_token_is_told_so_at_once(secured):
    command = [*secured.start, "--address", secured.address]
    done = subprocess.run(command, env=secured.stranger, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert f"the Ray cluster at '{secured.address}' wants its authentication token, and there is none" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@uses_ray
def test_the_token_stands_in_no_command_line_and_no_message(secured):
    mark = psutil.Process(secured.head.pid).environ()["STARTED_BY_A_TEST"]
    running = [each for each in psutil.process_iter() if carries(each, mark)]
    assert len(running) > 3
    for each in running:
        with contextlib.suppress(psutil.Error):
            assert SECRET not in " ".join(each.cmdline())
    assert SECRET not in secured.said
    assert "this node requires Ray's token in ~/.ray/auth_token" in secured.said


@uses_ray
def test_any_other_cluster_listens_on_all_addresses(secured):
    """The page warns of it; when this fails, Ray has become safer, and the page should say so."""
    assert {"::", "0.0.0.0"} & listening(secured.head)
