"""Which engine a pool gets, and what it says where that cannot be."""

import subprocess
import sys

import anyaccel as aa
import pytest


def test_an_engine_that_does_not_exist():
    with pytest.raises(aa.UsageError, match=r"engine must be one of 'local', 'ray' \(got 'rey'\)"):
        aa.Pool(engine="rey")


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(aa.UsageError, match=r"pip install 'anyaccel\[ray\]'"):
        aa.Pool(engine="ray")


def test_without_ray_everything_else_works(acme, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with aa.Pool("A1:1", engine="local", machine="sim:A1:1") as pool:
        assert pool.submit(pow, 2, 5).result(60) == 32


@pytest.mark.parametrize("options", [{"machine": "sim:A1:1"}, {"declare": {"GPU": 1}}])
def test_arguments_for_one_machine(options):
    (name,) = options
    with pytest.raises(aa.UsageError, match=f"{name} is for engine='local'"):
        aa.Pool(engine="ray", **options)


def test_arguments_for_a_cluster():
    with pytest.raises(aa.UsageError, match="address is for the engines of a cluster"):
        aa.Pool(address="127.0.0.1:6379")


def test_pools_on_this_machine_never_import_ray():
    program = "import sys, anyaccel as aa; aa.Pool().submit(abs, 1).result(60); sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
