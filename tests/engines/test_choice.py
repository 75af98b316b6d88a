"""Which engine a pool gets, and what it says where that cannot be."""

import subprocess
import sys

import anyaccel as aa
import pytest


def test_an_engine_that_does_not_exist():
    with pytest.raises(aa.UsageError, match=r"engine must be one of 'dask', 'local', 'ray' \(got 'rey'\)"):
        aa.Pool(engine="rey")


THIRD = """
from anyaccel.model import replace
from anyaccel.pool.dispatcher import open_engine as open_local

def open_engine(settings):
    if settings.address != "nowhere":
        raise ValueError(settings.address)
    engine = open_local(replace(settings, address=None))
    submit = engine.submit
    engine.submit = lambda options, function, args, kwargs: submit(options, name, (function, *args), kwargs)
    return engine

def name(function, *args, **kwargs):
    return "third", function(*args, **kwargs)
"""


def test_a_third_engine_is_found_by_its_entry_point(acme, tmp_path, monkeypatch):
    site = tmp_path / "third"
    info = site / "third-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "third_engine.py").write_text(THIRD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anyaccel.engines]\nthird = third_engine:open_engine\n")
    monkeypatch.syspath_prepend(str(site))
    with aa.Pool("A1:1", engine="third", machine="sim:A1:1", address="nowhere") as pool:
        assert pool.submit(pow, 2, 5).result(60) == ("third", 32)
    with pytest.raises(aa.UsageError, match="'dask', 'local', 'ray', 'third'"):
        aa.Pool(engine="fourth")


@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_without_it_the_message_says_what_to_install(monkeypatch, engine):
    for name in ("ray", "distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(aa.UsageError) as caught:
        aa.Pool(engine=engine)
    assert f"pip install 'anyaccel[{engine}]'" in f"{caught.value} {caught.value.hint}"


def test_without_ray_everything_else_works(acme, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with aa.Pool("A1:1", engine="local", machine="sim:A1:1") as pool:
        assert pool.submit(pow, 2, 5).result(60) == 32


@pytest.mark.parametrize("engine", [pytest.param(each, marks=pytest.mark.needs(each)) for each in ("ray", "dask")])
@pytest.mark.parametrize("options", [{"machine": "sim:A1:1"}, {"declare": {"GPU": 1}}])
def test_arguments_for_one_machine(engine, options):
    (name,) = options
    with pytest.raises(aa.UsageError, match=f"{name} is for engine='local'"):
        aa.Pool(engine=engine, **options)


def test_arguments_for_a_cluster():
    with pytest.raises(aa.UsageError, match="address is for the engines of a cluster"):
        aa.Pool(address="127.0.0.1:6379")


def test_pools_on_this_machine_never_import_a_cluster():
    program = (
        "import sys, anyaccel as aa; aa.Pool().submit(abs, 1).result(60);"
        " sys.exit(bool({'ray', 'dask', 'distributed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
