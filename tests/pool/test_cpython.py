"""The checks that CPython's own test-suite makes of an executor, where this Python has brought them along.

What is left out looks at the insides of CPython's pools, imports the executor by name from ``concurrent.futures``, or
holds for pools that a dead process breaks, which ours survive.
"""

import contextlib
import os
import pickle
import tempfile
import weakref

import anyaccel as aa
import pytest
from waiting import until

suite = pytest.importorskip(
    "test.test_concurrent_futures.executor", reason="this Python came without its tests, or they are laid out otherwise"
)
from test.test_concurrent_futures import (  # noqa: E402
    test_as_completed,
    test_deadlock,
    test_init,
    test_process_pool,
    test_shutdown,
    test_wait,
    util,
)


class Pool(aa.Pool):
    """With the marks by which CPython's tests tell executors apart."""

    def __init__(self, *args, mp_context=None, **options):
        super().__init__(*args, **options)

    @property
    def _broken(self):
        return self._core.broken


class FileEvent:
    """An event that other processes set and wait for: those of a manager ask for a key that our workers lack."""

    def __init__(self, path):
        self.path = path

    def set(self):
        open(self.path, "w").close()

    def is_set(self):
        return os.path.exists(self.path)

    def wait(self, timeout=60):
        until(self.is_set, "the event", timeout)
        return True


class Ours(util.ExecutorMixin, util.BaseTestCase):
    executor_type = Pool

    def setUp(self):
        Pool().submit(os.getpid).result()  # what a process has once stays: the loop's thread, the fork server
        super().setUp()

    def get_context(self):
        return None

    def create_event(self):  # of tests from Python 3.14 on
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return FileEvent(f"{folder.name}/event")


def without(case, *names):
    """The tests of a class but some."""
    return type(case.__name__, (case,), dict.fromkeys(names))


class TestExecutor(
    Ours,
    without(suite.ExecutorTest, *(name for name in dir(suite.ExecutorTest) if name.startswith("test_map_buffersize"))),
):
    """Without the option ``buffersize`` of ``map``, which came with Python 3.14 and which ours does not have."""


class TestWait(Ours, test_wait.WaitTests):
    pass


class TestAsCompleted(Ours, test_as_completed.AsCompletedTests):
    pass


class TestShutdown(
    Ours,
    without(
        test_shutdown.ExecutorShutdownTest,
        "test_interpreter_shutdown",
        "test_submit_after_interpreter_shutdown",
        "test_hang_gh83386",
        "test_hang_gh94440",
    ),
):
    def test_cancel_futures(self):
        """Have the first call run before the others are cancelled: that one runs by then is chance otherwise."""
        submit, shutdown, made = self.executor.submit, self.executor.shutdown, []
        self.executor.submit = lambda *call: made.append(submit(*call)) or made[-1]

        def wait_and_shut_down(**options):
            until(lambda: made[0].running() or made[0].done(), "the first call")
            shutdown(**options)

        self.executor.shutdown = wait_and_shut_down
        super().test_cancel_futures()


class TestInitializer(Ours):
    def test_initializer(self):
        self.executor.shutdown()
        self.executor = Pool(max_workers=2, initializer=test_init.init, initargs=("initialized",))
        test_init.InitializerMixin.test_initializer(self)


class TestFailingInitializer(Ours):
    def test_initializer(self):
        self.executor.shutdown()
        self.executor = Pool(max_workers=2, initializer=test_init.init_fail)
        test_init.FailingInitializerMixin.test_initializer(self)

    @contextlib.contextmanager
    def _assert_logged(self, message):
        yield
        assert message in str(self.executor._core.broken)


class TestProcesses(Ours):
    test_map_chunksize = test_process_pool.ProcessPoolExecutorTest.test_map_chunksize


def exit_in_worker():
    raise SystemExit(3)


class TestCrashes(Ours):
    """What CPython calls a broken pool is one broken worker here; all else goes on."""

    outcomes = (
        ("test_error_at_task_pickle", pickle.PicklingError, id, test_deadlock.ErrorAtPickle),
        ("test_exit_at_task_unpickle", aa.BrokenWorkerError, id, test_deadlock.ExitAtUnpickle),
        ("test_error_at_task_unpickle", pickle.UnpicklingError, id, test_deadlock.ErrorAtUnpickle),
        ("test_crash_at_task_unpickle", aa.BrokenWorkerError, id, test_deadlock.CrashAtUnpickle),
        ("test_crash_during_result_pickle", aa.BrokenWorkerError, test_deadlock.CrashAtPickle, None),
        ("test_exit_during_result_pickle", aa.BrokenWorkerError, test_deadlock.ExitAtPickle, None),
        ("test_error_during_result_pickle", pickle.PicklingError, test_deadlock.ErrorAtPickle, None),
        ("test_error_during_result_unpickle", aa.RemoteError, test_deadlock.ErrorAtUnpickle, None),
        ("test_exit_during_result_unpickle", aa.RemoteError, test_deadlock.ExitAtUnpickle, None),
        ("test_exit_during_call", aa.BrokenWorkerError, exit_in_worker, None),
    )

    def test_crashes(self):
        import sys

        self.addCleanup(setattr, sys, "stderr", sys.stderr)  # some of them replace it
        for name, error, function, argument in self.outcomes:
            with self.subTest(name):
                future = self.executor.submit(function, *(() if argument is None else (argument(),)))
                with pytest.raises(error):
                    future.result(timeout=60)
                assert self.executor.submit(pow, 2, 3).result(timeout=60) == 8

    def test_arguments_are_collected_in_workers(self):

        def keep(value):
            import builtins

            builtins.kept = weakref.ref(value)

        one = self.executor_type(max_workers=1)
        one.submit(keep, suite.MyObject()).result()
        assert one.submit(lambda: __import__("builtins").kept()).result() is None
        one.shutdown()
