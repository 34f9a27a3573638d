"""examples/sweep: trials that lag behind are ended early, and a study goes on."""

import re

import optuna
from running import run


def study(out):
    return optuna.load_study(storage=f"sqlite:///{out}/study.db", study_name="digits")


def test_a_study_prunes_and_goes_on(tmp_path):
    """Begun with six trials and continued to twelve, some of those after the fifth are pruned, and the best is kept."""
    small = ("--epoch", 6, "--out", tmp_path)
    run("sweep/sweep.py", "--trials", 6, *small)
    first = [trial.value for trial in study(tmp_path).trials]
    printed = run("sweep/sweep.py", "--trials", 12, *small)
    trials = study(tmp_path).trials
    assert len(trials) == 12
    assert [trial.value for trial in trials[:6]] == first
    pruned = [trial for trial in trials if trial.state == optuna.trial.TrialState.PRUNED]
    assert pruned
    assert all(2 <= len(trial.intermediate_values) < 6 for trial in pruned)
    assert len({str(trial.params) for trial in trials}) == 12  # the second part does not draw those of the first again
    assert int(re.search(r"(\d+) pruned", printed)[1]) == len(pruned)
    assert (tmp_path / f"trial_{study(tmp_path).best_trial.number}" / "best").exists()


def test_a_trial_that_was_under_way_is_tried_again(tmp_path):
    """A study that was killed in a trial begins with its parameters."""
    (tmp_path / "result").mkdir()
    storage = f"sqlite:///{tmp_path}/result/study.db"
    trial = optuna.create_study(storage=storage, study_name="digits").ask()
    wanted = {
        "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        "units": trial.suggest_int("units", 8, 128, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.7),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
    }
    run("sweep/sweep.py", "--trials", 1, "--epoch", 1, "--out", tmp_path / "result")
    trials = study(tmp_path / "result").trials
    assert [each.state.name for each in trials] == ["FAIL", "COMPLETE"]
    assert trials[1].params == wanted
