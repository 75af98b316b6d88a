"""Real studies of Optuna whose trials run in workers with devices of their own."""

import os
import signal
import threading
import time

import anyaccel as aa
import cloudpickle
import pytest

optuna = pytest.importorskip("optuna", reason="Optuna is not installed")

from anyaccel_integrations.optuna import optimize  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

MACHINE = "sim:A1:3"
optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(autouse=True)
def values_travel(acme, request):
    cloudpickle.register_pickle_by_value(request.module)  # test modules cannot be imported by workers
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
    assert aa.leases(aa.detect(MACHINE)) == ()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "anyaccel study"]


def run(study, objective, n_trials=None, **options):
    """Run a study whose workers need not import Optuna each."""
    optimize(study, objective, n_trials, **{"needs": "A1:1", "machine": MACHINE, "preload": ["optuna"]} | options)
    return study


def states(study):
    return [trial.state.name for trial in study.trials]


def square(trial):
    trial.set_user_attr("mask", os.environ["ACME_VISIBLE"])
    trial.set_user_attr("pid", os.getpid())
    return trial.suggest_float("x", -10, 10) ** 2


def meet(trial):
    """Return once three trials are running at the same time."""
    directory = trial.suggest_categorical("directory", [trial.user_attrs.get("unset", os.environ["MEET"])])
    open(f"{directory}/{os.getpid()}", "w").close()
    while len(os.listdir(directory)) < 3:
        time.sleep(0.005)
    trial.set_user_attr("mask", os.environ["ACME_VISIBLE"])
    return 0.0


def test_trials_at_the_same_time_have_devices_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MEET", str(tmp_path))
    study = run(optuna.create_study(), meet, 3)
    assert len({trial.user_attrs["mask"] for trial in study.trials}) == 3


def test_the_sampler_and_the_storage_of_the_study_decide(tmp_path):
    storage, again = (optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db") for _ in range(2))
    sampler = optuna.samplers.GridSampler({"x": [-2, 1, 5]})
    study = optuna.create_study(storage=storage, study_name="one", sampler=sampler)
    run(study, square, 3)
    found = optuna.load_study(storage=again, study_name="one")
    assert [trial.state for trial in found.trials] == [TrialState.COMPLETE] * 3
    assert sorted(trial.params["x"] for trial in found.trials) == [-2, 1, 5]
    assert found.best_value == 1
    assert os.getpid() not in {trial.user_attrs["pid"] for trial in found.trials}
    for each in (storage, again):
        each.engine.dispose()  # since 3.13, a connection that is not closed warns


def several(trial):
    number, kind = trial.suggest_int("n", 1, 64, log=True), trial.suggest_categorical("kind", ["a", None, 3])
    assert trial.params == {"n": number, "kind": kind}
    assert set(trial.distributions) == {"n", "kind"}
    assert trial.datetime_start is not None
    assert isinstance(trial, optuna.trial.BaseTrial)
    return number, float(trial.number)


def test_several_values_and_all_that_a_trial_can_be_asked():
    study = run(optuna.create_study(directions=["minimize", "maximize"]), several, 4)
    assert states(study) == ["COMPLETE"] * 4
    assert [trial.values[1] for trial in study.trials] == [0.0, 1.0, 2.0, 3.0]


def curve(trial):
    worse = trial.number >= 2
    for step in range(4):
        trial.report(100.0 * worse + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned(f"at step {step}")
    return 100.0 * worse


def test_the_pruner_ends_trials_in_their_workers():
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=50))
    run(study, curve, 4)
    assert states(study) == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]
    assert study.trials[2].intermediate_values == {0: 100.0}
    assert study.trials[2].value == 100.0


def fail_at_two(trial):
    if trial.number == 2:
        raise ValueError("two")
    return 1.0


def test_an_error_ends_the_study_unless_it_is_caught():
    study = run(optuna.create_study(), fail_at_two, 5, catch=(ValueError,))
    assert sorted(states(study)) == ["COMPLETE"] * 4 + ["FAIL"]

    def fail_or_wait(trial):
        if trial.number == 2:
            raise ValueError("two")
        time.sleep(1000)

    study = optuna.create_study()
    with pytest.raises(ValueError, match="two") as caught:
        run(study, fail_or_wait, 5)
    assert "fail_or_wait" in str(caught.value.__cause__)
    assert states(study) == ["FAIL"] * 3


def die(trial):
    if trial.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def test_a_worker_that_dies_has_failed():
    study = optuna.create_study()
    with pytest.raises(aa.BrokenWorkerError):
        run(study, die, 3, n_jobs=1)
    assert states(study) == ["COMPLETE", "FAIL"]
    study = run(optuna.create_study(), die, 3, catch=aa.WorkerError)
    assert sorted(states(study)) == ["COMPLETE", "COMPLETE", "FAIL"]


def test_a_trial_that_is_run_again_is_another_trial():
    study = run(optuna.create_study(), die, 2, n_jobs=1, retries=1)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]


def test_callbacks_and_stop():
    told = []

    def stop(study, trial):
        told.append((trial.number, trial.state.name))
        if len(told) == 2:
            study.stop()

    study = run(optuna.create_study(), square, n_jobs=1, callbacks=[stop])
    assert told == [(0, "COMPLETE"), (1, "COMPLETE")]
    assert len(study.trials) == 2


def test_time_limits():
    study = optuna.create_study()
    run(study, square, timeout=0.0)
    assert study.trials == []
    study.enqueue_trial({"x": 3})
    assert run(study, square, 1).best_value == 9
    with pytest.raises(aa.TaskTimeoutError):
        run(study, lambda trial: time.sleep(1000), 1, trial_timeout=0.5)
    assert states(study) in (["COMPLETE"], ["COMPLETE", "FAIL"])  # perhaps it took so long to get there


def test_what_needs_the_study_says_where_it_is():
    def objective(trial):
        return len(trial.study.trials)

    with pytest.raises(AttributeError, match="a trial in a worker has no 'study': the study is in the process that"):
        run(optuna.create_study(), objective, 1)


def test_a_mistake_in_a_question_is_told_to_the_objective():
    def objective(trial):
        try:
            trial.suggest_float("x", 2, 1)
        except ValueError as error:
            return len(str(error))

    assert run(optuna.create_study(), objective, 1).best_value > 0


def test_workers_that_are_confined_reach_the_study():
    assert states(run(optuna.create_study(), square, 2, enforce="try")) == ["COMPLETE"] * 2


def test_wrong_arguments():
    with pytest.raises(aa.UsageError, match="study must be an"):
        run("study", square, 1)
    with pytest.raises(aa.UsageError, match="n_jobs must be a whole number other than 0"):
        run(optuna.create_study(), square, 1, n_jobs=0)
    with pytest.raises(aa.NeverFitsError):
        run(optuna.create_study(), square, 1, needs="A1:9")
    with pytest.raises(aa.UsageError, match="leave engine out"):
        run(optuna.create_study(), square, 1, engine="ray")
