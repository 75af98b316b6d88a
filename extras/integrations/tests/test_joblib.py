"""joblib's own Parallel on our backend: batches hold devices, and joblib's promises are kept."""

import multiprocessing
import os
import subprocess
import sys
import time

import anyaccel as aa
import cloudpickle
import pytest

joblib = pytest.importorskip("joblib", reason="joblib is not installed")

from anyaccel_integrations.joblib import register_joblib  # noqa: E402
from joblib import Parallel, delayed, parallel_config  # noqa: E402

MACHINE = "sim:A1:3"


@pytest.fixture(autouse=True)
def registered(acme, request):
    register_joblib()
    cloudpickle.register_pickle_by_value(request.module)  # test modules cannot be imported by workers
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def devices(registered):
    """The backend with a device for each batch, whose workers need not import joblib each."""
    with parallel_config(backend="anyaccel", needs="A1:1", machine=MACHINE, preload=["joblib"]):
        yield


def seen(x=None):
    return x, os.environ["ACME_VISIBLE"], os.getpid()


def meet(directory, number):
    """Return once as many as that are here at the same time."""
    open(f"{directory}/{os.getpid()}", "w").close()
    while len(os.listdir(directory)) < number:
        time.sleep(0.005)
    return os.environ["ACME_VISIBLE"]


def fail_or_wait(x, directory):
    if x == 1:
        while not os.listdir(directory):
            time.sleep(0.005)
        raise KeyError("one")
    open(f"{directory}/{os.getpid()}", "w").close()
    time.sleep(1000)


def inner():
    nested = Parallel(n_jobs=2)(delayed(seen)(x) for x in range(4))
    return type(joblib.parallel.get_active_backend()[0]).__name__, os.getpid(), nested


def held():
    return aa.leases(aa.detect(MACHINE))


def test_every_batch_has_a_device_of_its_own(devices, tmp_path):
    assert joblib.effective_n_jobs() == joblib.effective_n_jobs(-1) == 3
    assert joblib.effective_n_jobs(-2) == 2
    assert joblib.effective_n_jobs(100) == 3
    masks = Parallel()(delayed(meet)(tmp_path, 3) for _ in range(3))
    assert len(set(masks)) == 3
    results = Parallel()(delayed(seen)(x) for x in range(8))
    assert [x for x, _, _ in results] == list(range(8))
    assert {mask for _, mask, _ in results} <= set(masks)
    assert len({pid for _, _, pid in results} - {os.getpid()}) == 8
    assert held() == ()


def test_as_options_of_one_parallel(acme):
    run = Parallel(n_jobs=-1, backend="anyaccel", needs="A1:0.5", machine=MACHINE, max_calls=0)
    pids = {pid for _, _, pid in run(delayed(seen)(x) for x in range(12))}
    assert os.getpid() not in pids
    assert len(pids) <= 6
    with pytest.raises(TypeError, match="no_such_option"):
        Parallel(backend="anyaccel", no_such_option=1)(delayed(seen)(x) for x in range(2))


def test_a_machine_with_one_device_uses_it(acme):
    """Where one call runs at a time, joblib would run it in its own process."""
    with parallel_config(backend="anyaccel", needs="A1:1", machine="sim:A1:1"):
        assert joblib.effective_n_jobs() == 1
        (first, *_), (second, *_) = (Parallel(n_jobs=n)(delayed(seen)() for _ in range(2)) for n in (1, -1))
        assert first[1] == second[1]
        assert os.getpid() not in {first[2], second[2]}
        with Parallel() as run:
            assert run([delayed(seen)()])[0][1] == first[1]


def test_without_needs(acme):
    """On the processors alone: one of them is none to share, and joblib then stays in its own process."""
    processors = len(os.sched_getaffinity(0))
    with parallel_config(backend="anyaccel", machine=MACHINE):
        assert joblib.effective_n_jobs() == processors
        if processors > 1:
            (_, mask, pid), _ = Parallel()(delayed(seen)() for _ in range(2))
            assert mask == ""
            assert pid != os.getpid()
        assert Parallel(n_jobs=1)(delayed(os.getpid)() for _ in range(2)) == [os.getpid()] * 2


def test_a_parallel_inside_shares_the_devices_of_its_batch(devices):
    for backend, pid, nested in Parallel()(delayed(inner)() for _ in range(2)):
        assert backend == "ThreadingBackend"
        assert {each for _, _, each in nested} == {pid}


def test_the_first_error_ends_the_others(devices, tmp_path):
    with pytest.raises(KeyError, match="one"):
        Parallel()(delayed(fail_or_wait)(x, tmp_path) for x in range(6))
    assert held() == ()
    assert len(Parallel()(delayed(seen)(x) for x in range(2))) == 2


def test_a_parallel_goes_on_after_an_error(devices, tmp_path):
    with Parallel() as run:
        with pytest.raises(KeyError):
            run(delayed(fail_or_wait)(x, tmp_path) for x in range(3))
        assert [x for x, _, _ in run(delayed(seen)(x) for x in range(4))] == [0, 1, 2, 3]
    assert held() == ()


def test_a_worker_that_dies(devices):
    with pytest.raises(aa.BrokenWorkerError, match="exit status 3"):
        Parallel()(delayed(os._exit)(3) for _ in range(2))


@pytest.mark.parametrize("kind", ["generator", "generator_unordered"])
def test_results_as_they_come(devices, kind):
    first, second = (Parallel(return_as=kind)(delayed(seen)(x) for x in range(5)) for _ in range(2))
    assert sorted(x for x, _, _ in second) == sorted(x for x, _, _ in first) == [0, 1, 2, 3, 4]
    assert held() == ()


def test_a_generator_that_is_thrown_away(devices):
    results = Parallel(return_as="generator")(delayed(time.sleep)(x) for x in (0, 1000, 1000, 1000, 1000))
    next(results)
    with pytest.warns(UserWarning, match="have been cancelled"):
        results.close()
    assert held() == ()


def test_arguments_that_cannot_be_made(devices):
    def arguments():
        yield from range(8)
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        Parallel()(delayed(seen)(x) for x in arguments())
    assert held() == ()


def test_arguments_that_come_from_a_pool(devices):
    """They are taken while batches end, by a thread that must not be the one on which pools depend."""
    with aa.Pool(machine=MACHINE) as pool:
        results = Parallel()(delayed(seen)(pool.submit(pow, 2, x).result()) for x in range(10))
    assert [x for x, _, _ in results] == [2**x for x in range(10)]


def test_a_time_limit(devices):
    with pytest.raises(multiprocessing.TimeoutError):
        Parallel(timeout=0.2)(delayed(time.sleep)(1000) for _ in range(2))
    assert held() == ()


def test_needs_that_can_never_be_met(acme):
    parallel = Parallel(backend="anyaccel", needs="A1:7", machine=MACHINE)
    with pytest.raises(aa.NeverFitsError, match="can never fit"):
        parallel(delayed(seen)() for _ in range(2))


@pytest.mark.parametrize("package", ["joblib", "optuna"])
def test_a_package_that_is_missing_is_named_with_its_extra(package):
    call = {"joblib": "register_joblib()", "optuna": "optimize(None, None)"}[package]
    code = f"""
import sys
sys.modules[{package!r}] = None
from anyaccel.errors import UsageError
from anyaccel_integrations.{package} import *
try:
    {call}
except UsageError as error:
    print(error, error.hint, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1:] == [f"pip install 'anyaccel[{package}]'"]
