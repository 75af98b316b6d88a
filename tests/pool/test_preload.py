"""Modules that do more than define when they are imported: they are preloaded, and workers end and calculate right."""

import os
import sys

import anyaccel as aa
import pytest
from waiting import PATIENCE


def threads():
    return len(os.listdir("/proc/self/task"))


def multiply(size):
    loaded = "numpy" in sys.modules
    import numpy as np

    a = np.arange(size * size, dtype=float).reshape(size, size) % 7
    before = threads()
    right = all((a @ a)[row, 3] == sum(a[row] * a[:, 3]) for row in (0, size - 1))
    return loaded, before, threads(), right


def solve(size):
    import numpy as np

    loaded = "scipy.linalg" in sys.modules
    import scipy.linalg

    a = np.random.default_rng(1).random((size, size)) + size * np.eye(size)
    x = scipy.linalg.solve(a, np.ones(size))
    return loaded, threads(), bool(np.allclose(a @ x, 1))


def multiply_tensors(size):
    """Of whole numbers, which both products have to get exactly: that of floats runs on several threads."""
    loaded = "torch" in sys.modules
    before = threads()
    import torch

    whole = torch.arange(size * size).reshape(size, size) % 7
    product = whole.double() @ whole.double()
    relu = torch.nn.functional.relu(torch.linspace(-1, 1, 1 << 20)).sum()  # another kind of parallel loop
    right = bool((product == (whole @ whole).double()).all()) and abs(relu.item() - (1 << 18)) < 1
    return loaded, before, threads(), right, torch.get_num_threads()


@pytest.mark.parametrize("kept", [False, True])
def test_numpy(pool, kept):
    pytest.importorskip("numpy", reason="needs NumPy")
    ready = pool(preload=["numpy"], max_calls=0 if kept else 1, max_workers=2)
    several = len(os.sched_getaffinity(0)) > 1
    answers = list(ready.map(multiply, [600] * 6))
    assert all(loaded and right for loaded, _, _, right in answers)
    assert max(before for _, before, _, _ in answers) == 1 or kept
    assert min(after for _, _, after, _ in answers) > 1 or not several  # products run on several threads as ever


def test_scipy(pool):
    pytest.importorskip("scipy", reason="needs SciPy")
    ready = pool("A1:1", preload=["scipy.linalg"])
    assert [(loaded, right) for loaded, _, right in ready.map(solve, [400] * 4)] == [(True, True)] * 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kept", [False, True])
def test_torch(pool, kept):
    pytest.importorskip("torch", reason="needs PyTorch (tox -e frameworks)")
    ready = pool("A1:1", preload=["torch"], max_calls=0 if kept else 1, max_workers=2)
    several = len(os.sched_getaffinity(0)) > 1
    answers = list(ready.map(multiply_tensors, [500] * 6))
    assert all(loaded and right for loaded, _, _, right, _ in answers)
    assert max(before for _, before, _, _, _ in answers) == 1 or kept
    assert min(after for _, _, after, _, _ in answers) > 1 or not several
    assert min(used for _, _, _, _, used in answers) > 1 or not several


@pytest.mark.timeout(300)
def test_workers_draw_their_own_numbers_with_torch(pool):
    pytest.importorskip("torch", reason="needs PyTorch (tox -e frameworks)")
    ready = pool("A1:1", preload=["torch"])
    assert len({ready.submit(lambda: sys.modules["torch"].rand(1).item()).result() for _ in range(3)}) == 3


def test_workers_draw_their_own_numbers_with_what_is_preloaded(pool, tmp_path, monkeypatch):
    """A module stands for PyTorch, which seeds its generator when it is imported."""
    (tmp_path / "torch.py").write_text(
        "import os\n"
        "class Generator:\n"
        "    def seed(self):\n"
        "        self.state = os.urandom(8)\n"
        "default_generator = Generator()\n"
        "default_generator.seed()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ready = pool("A1:1", preload=["torch"])
    drawn = {ready.submit(lambda: sys.modules["torch"].default_generator.state).result() for _ in range(3)}
    assert len(drawn) == 3


def test_a_module_comes_from_the_module_path_of_its_pool(pool, tmp_path, monkeypatch):
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "moved.py").write_text(f"PLACE = {place!r}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / place))
            ready = pool("A1:1", preload=["moved"])
            assert ready.submit(lambda: sys.modules["moved"].PLACE).result() == place


def test_threads_that_end_at_a_fork_may_be_started_at_import(pool, tmp_path, monkeypatch):
    """As OpenBLAS does it, in a module that is there without it."""
    (tmp_path / "careful.py").write_text(
        "import os, threading\n"
        "stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait, daemon=True)\n"
        "thread.start()\n"
        "def end():\n"
        "    stop.set()\n"
        "    thread.join()\n"
        "os.register_at_fork(before=end)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pool("A1:1", preload=["careful"]).submit(lambda: "careful" in sys.modules).result()


@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))",
        "import signal; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGCHLD, signal.SIGTERM)]",
        "import os, signal; signal.set_wakeup_fd(os.open('/dev/null', os.O_WRONLY | os.O_NONBLOCK))",
        "import os; os.fork()",
    ],
    ids=["blocks", "ignores", "wakes", "forks"],
)
def test_what_a_preloaded_module_does_with_signals_and_forks_loses_no_device(pool, tmp_path, monkeypatch, code):
    """The second call waits for the devices of the first one, whose process must have been reaped."""
    (tmp_path / "odd_at_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    calls = pool("A1:2", preload=["odd_at_import"])
    first, second = (calls.submit(os.getpid) for _ in range(2))
    assert first.result(PATIENCE) != second.result(PATIENCE)


def test_an_exception_without_a_text_at_import_is_named(pool, tmp_path, monkeypatch):
    (tmp_path / "silent_at_import.py").write_text(
        "class SilentError(Exception):\n    def __str__(self):\n        raise LookupError\nraise SilentError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(aa.WorkerStartError, match=r"'silent_at_import' cannot be preloaded: SilentError$"):
        pool(preload=["silent_at_import"]).submit(os.getpid).result(PATIENCE)
