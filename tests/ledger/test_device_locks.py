"""The device lock: who has no directory in common still excludes each other from a device."""

import os
import shutil
import signal

import pytest
from claimant import ClaimantError, eventually
from sysfs import any_directories


@pytest.fixture
def device(tmp_path):
    """Stands for a device's directory in sysfs, which can be opened by everybody and locked."""
    path = tmp_path / "device"
    path.mkdir()
    return f"{{'a': (DeviceLock({str(path)!r}),)}}"


@pytest.fixture
def elsewhere(claim, tmp_path):
    """A claimant with another state directory."""
    return lambda: claim(tmp_path / "elsewhere")


def test_a_whole_device_is_excluded_across_directories(claim, elsewhere, device, ledger, files):
    here, there = claim(), elsewhere()
    there.do(f"take('a', device_locks={device})")
    for units in (10_000, 1):
        with pytest.raises(ClaimantError, match=f"a is in use outside of this ledger: process {there.pid} has locked"):
            here.do(f"take('a', units={units}, device_locks={device})")
    assert files() == []
    assert here.do(f"take('a', 'b', device_locks={device})") == {"b": 10_000}
    here.do("give()")
    here.begin(f"take('a', wait=60, device_locks={device})")
    assert here.busy(0.1)
    there.do("give()")
    assert here.end() == {"a": 10_000}


def test_shares_are_compatible_and_exclude_the_whole(claim, elsewhere, device):
    here, there = claim(), elsewhere()
    there.do(f"take('a', units=5000, device_locks={device})")
    assert here.do(f"take('a', units=5000, device_locks={device})") == {"a": 5000}
    assert here.do(f"take('a', units=5000, device_locks={device})") == {"a": 5000}
    here.do("give(); give()")
    with pytest.raises(ClaimantError, match="outside of this ledger"):
        here.do(f"take('a', device_locks={device})")


def test_it_lasts_as_long_as_the_lease(claim, elsewhere, device):
    here, there = claim(), elsewhere()
    there.do(f"take('a', device_locks={device})")
    worker = there.do("subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds, stdin=-3, stdout=-3).pid")
    there.kill()
    with pytest.raises(ClaimantError, match="outside of this ledger"):
        here.do(f"take('a', device_locks={device})")
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: here.do(f"bool(take('a', wait=30, device_locks={device}))"))


def test_an_explicit_end_frees_it_though_a_child_carries_it(claim, elsewhere, device):
    here, there = claim(), elsewhere()
    there.do(f"take('a', device_locks={device})")
    child = there.do("pid = os.fork()\nif pid == 0:\n    time.sleep(600)\n    os._exit(0)\nresult = pid")
    there.do("give()")
    assert here.do(f"take('a', device_locks={device})") == {"a": 10_000}
    os.kill(child, signal.SIGKILL)


def test_a_claim_that_fails_frees_it_though_a_child_carries_it(claim, elsewhere, device):
    here, there = claim(), elsewhere()
    child = there.do(
        "def mark(used):\n"
        "    global child\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(600)\n"
        "    raise KeyboardInterrupt\n"
        f"want = Want(candidates=frozenset('a'), device_locks={device}, mark=mark)\n"
        "try: ledger.acquire(want, chooser('a'), wait=0)\n"
        "except KeyboardInterrupt: result = child"
    )
    assert here.do(f"take('a', device_locks={device})") == {"a": 10_000}
    os.kill(child, signal.SIGKILL)


def test_it_outlasts_the_state_directory(claim, device, state):
    """Also where the holder's open files cannot be seen, as those of another user."""
    holder, rival = claim(), claim()
    holder.do(f"take('a', device_locks={device})")
    (marker,) = state.glob("checked.*")
    shutil.rmtree(state)
    state.mkdir(mode=0o700)
    marker.touch()  # what is still in force has been looked for, and was not seen
    with pytest.raises(ClaimantError, match="outside of this ledger"):
        rival.do(f"take('a', device_locks={device})")


def test_one_that_is_absent_or_closed_says_nothing(claim, tmp_path):
    holder = claim()
    assert holder.do(f"take('a', device_locks={{'a': (DeviceLock({str(tmp_path / 'none')!r}),)}})") == {"a": 10_000}
    assert holder.do("len(leases[0].fds)") == 1


def test_a_real_device_in_sysfs(claim, elsewhere):
    """Any directory there will do."""
    path = next(iter(any_directories(1)), None)
    if path is None:
        pytest.skip("there is no sysfs here")
    here, there = claim(), elsewhere()
    there.do(f"take('a', device_locks={{'a': (DeviceLock({path!r}),)}})")
    with pytest.raises(ClaimantError, match="outside of this ledger"):
        here.do(f"take('a', device_locks={{'a': (DeviceLock({path!r}),)}})")
