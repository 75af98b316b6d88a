"""The options that the functions have in common: one list of names, and one message for a name that is not in it."""

import asyncio
from functools import partial

import anyaccel as aa
import pytest
from anyaccel.errors import UnknownOptionError
from anyaccel.linux.process import boot_seconds

MACHINE = "sim:A1:2"


@pytest.fixture
def of_a_pool():
    """The pool of which a function is another with other options."""
    with aa.Pool(shared=False) as pool:
        yield pool.options


FUNCTIONS = {
    "run": partial(aa.run, "A1", ["true"]),
    "acquire": partial(aa.acquire, "A1"),
    "acquire_async": lambda **options: asyncio.run(aa.acquire_async("A1", **options)),
    "use": partial(aa.use, "A1"),
    "prepare": partial(aa.prepare, "A1"),
    "Pool": partial(aa.Pool, "A1"),
}


@pytest.mark.parametrize("function", [*FUNCTIONS, "Pool.options"])
def test_a_mistyped_option_is_refused_with_the_nearest_name(function, acme, of_a_pool):
    call = FUNCTIONS.get(function, of_a_pool)
    typed, meant = ("timeuot", "timeout") if function == "Pool.options" else ("memroy", "memory")
    for kind in (UnknownOptionError, aa.UsageError, TypeError):
        with pytest.raises(kind) as caught:
            call(**{typed: 1})
        assert str(caught.value) == f"{function}() has no option {typed!r}"
        assert caught.value.hint == f"did you mean {meant}?"
    assert aa.leases(aa.detect(MACHINE)) == ()


def test_an_option_that_is_like_none_gets_the_list(acme, of_a_pool):
    with pytest.raises(UnknownOptionError) as caught:
        of_a_pool(zzz=1)
    assert caught.value.hint == "its options are needs, timeout, max_calls, retries, max_concurrency, ahead"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_value_that_makes_no_sense_is_refused_by_each_function_alike(function, acme):
    for name, values in {"mask": "one of 'id', 'index'", "enforce": "one of True, False, 'try'"}.items():
        with pytest.raises(aa.UsageError) as caught:
            FUNCTIONS[function](**{name: "much"})
        assert str(caught.value) == f"{name} must be {values} (got 'much')"
    with pytest.raises(aa.UsageError, match="memory must be a number with a unit"):
        FUNCTIONS[function](memory="much")


def test_what_is_for_a_process_that_starts_is_refused_by_use(acme):
    for name, value in {"memory": "1GiB", "enforce": True, "environ": {}}.items():
        with pytest.raises(aa.UsageError, match=f"^{name} applies to a process that is about to start"):
            aa.use("A1", machine=MACHINE, **{name: value})


def test_run_takes_the_options_of_subprocess_and_those_of_acquire(acme):
    program = "import os; print(os.environ['ACME_VISIBLE'], os.getcwd())"
    done = aa.run(
        "A1", ["python3", "-c", program], machine=MACHINE, mask="index", avoid_busy=True, cwd="/", check=True,
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout == "0 /\n"


def test_durations_may_be_texts(acme):
    with aa.acquire("A1:2", machine=MACHINE, time="1:30:00") as lease:
        assert 0 < lease.lease.until - boot_seconds() <= 5400
        with pytest.raises(aa.NotFreeError):
            aa.acquire("A1", machine=MACHINE, wait="0.01s", time="90")
        assert not aa.why("A1", machine=MACHINE, time="2h").fits_now
    done = aa.run("A1", ["sleep", "1000"], machine=MACHINE, time="0.1s", grace="1m", timeout="1h")
    assert done.timed_out


@pytest.mark.parametrize(("name", "value"), [("time", "1:30"), ("wait", "soon"), ("time", "0s")])
@pytest.mark.parametrize("function", ["run", "acquire", "acquire_async", "use"])
def test_a_text_that_is_no_duration_is_refused(function, name, value, acme):
    with pytest.raises(aa.UsageError, match=f"^{name} must be (a duration such as 90s|more than 0)"):
        FUNCTIONS[function](machine=MACHINE, **{name: value})


@pytest.mark.parametrize(
    "call",
    [
        lambda: aa.leases("sim:H100:2"),
        lambda: aa.why("GPU", inventory="sim:H100:2"),
        lambda: aa.acquire("GPU", inventory="sim:H100:2"),
        lambda: aa.run("GPU", ["true"], inventory="sim:H100:2"),
    ],
)
def test_the_name_of_a_machine_is_no_inventory(call):
    with pytest.raises(aa.UsageError, match=r"inventory must be what anyaccel\.detect\(\) returns") as refused:
        call()
    assert refused.value.hint == "machine= takes the name of a machine"


def test_a_path_is_no_machine(tmp_path):
    with pytest.raises(aa.MachineError, match=r"a machine must be text such as 'host' or 'sim:H100:8' \(got PosixPath"):
        aa.detect(tmp_path)


@pytest.mark.parametrize("note", [["x"], {"a": 1}, 5, None])
def test_a_note_that_is_no_text_is_none(note, acme):
    inventory = aa.detect(MACHINE)
    with aa.acquire("A1", inventory=inventory, note=note):
        assert [record.note for record in aa.leases(inventory)] == [""]
