"""Searches learning rate, width, dropout and weight decay with Optuna; an extension ends trials that lag behind.

    python sweep.py --out result --trials 30

The study is in ``result/study.db``, each trial's run in ``result/trial_0`` and so on. The same command again continues with
the study until it has that many trials; one that was under way is tried again.
"""

import argparse
from pathlib import Path

import optuna
import torch
from optuna.trial import TrialState
from torch import nn

import chainring
from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions, triggers


def pruner(trial: optuna.Trial, key: str):
    """Make an extension that tells the study a value, and ends the run where the study wants no more of it."""

    @training.make_extension(trigger=(1, "epoch"), default_name="pruner")
    def prune(trainer: training.Trainer) -> None:
        trial.report(float(trainer.observation[key]), trainer.updater.epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return prune


def train(trial: optuna.Trial, epochs: int, out: Path) -> float:
    """One trial; returns the smallest validation loss."""
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    units = trial.suggest_int("units", 8, 128, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.7)
    weight_decay = trial.suggest_float("weight_decay", 1e-5, 1.0, log=True)

    chainring.deterministic(0)
    train, test = datasets.get_digits()
    train_iter = iterators.SerialIterator(train, 50, seed=0)
    test_iter = iterators.SerialIterator(test, 360, repeat=False, shuffle=False)
    model = Classifier(nn.Sequential(nn.Linear(64, units), nn.ReLU(), nn.Dropout(dropout), nn.Linear(units, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    updater = training.StandardUpdater(train_iter, optimizer, model)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=out / f"trial_{trial.number}", config=trial.params)
    trainer.extend(extensions.Evaluator(test_iter, model))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot("best"), trigger=triggers.MinValueTrigger("validation/main/loss"))
    trainer.extend(pruner(trial, "validation/main/loss"))
    trainer.run()
    return min(row["validation/main/loss"] for row in trainer.get_extension(extensions.LogReport).log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", "-t", type=int, default=30, help="in the study in the end (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="epochs of a trial (default: %(default)s)")
    parser.add_argument("--out", "-o", type=Path, default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampler (default: %(default)s)")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{args.out}/study.db", study_name="digits", load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
    )  # fmt: skip
    study.sampler = optuna.samplers.TPESampler(seed=args.seed + len(study.trials))  # its state is not part of the study
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # a run that was killed was in the middle of it
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    left = args.trials - len(study.get_trials(states=ended))
    study.optimize(lambda trial: train(trial, args.epoch, args.out), n_trials=max(left, 0))

    complete, pruned = (study.get_trials(states=[state]) for state in ended)
    epochs = sum(len(trial.intermediate_values) for trial in complete + pruned)
    print(f"{len(complete)} trials completed, {len(pruned)} pruned: {epochs} epochs of {args.epoch * args.trials}")
    print(f"best: trial {study.best_trial.number}, validation loss {study.best_value:.6f}, {study.best_params}")


if __name__ == "__main__":
    main()
