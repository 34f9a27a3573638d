"""pytorch-pfn-extras or Chainring: run as ``python pfn_extras_programs.py pfn_extras out.json``.

Each function from `intervals` on is one program; what it returns is written to ``out.json`` under its name.
"""

import inspect
import io
import json
import os
import re
import sys
import tempfile
import traceback

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LIBRARY, OUT = sys.argv[1:]
IS_PFN_EXTRAS = LIBRARY == "pfn_extras"

if IS_PFN_EXTRAS:
    import pytorch_pfn_extras as library
    from pytorch_pfn_extras.reporting import DictSummary, Summary, report
    from pytorch_pfn_extras.training import extension, extensions, triggers

    make_extension = extension.make_extension
else:
    from chainring import DictSummary, Reporter, Summary, report, training
    from chainring.training import extensions, make_extension, triggers


class Line(nn.Module):
    """The mean squared error of ``x @ w``, which is reported."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 1))

    def forward(self, x, t):
        loss = ((x @ self.w - t) ** 2).mean()
        report({"loss": loss.item() if IS_PFN_EXTRAS else loss}, self)
        return loss


def data(count=12):
    """Batches of 4 in their own order."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x @ torch.tensor([[1.0], [-2.0]])), 4)


class Run:
    """A run of so many epochs, or to a stop trigger; three iterations an epoch."""

    def __init__(self, stop, out=None):
        self.out = out or tempfile.mkdtemp(dir=".")
        self.model, self.loader = Line(), data()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        if IS_PFN_EXTRAS:
            settings = {"max_epochs": stop} if isinstance(stop, int) else {"max_epochs": 100, "stop_trigger": stop}
            self.trainer = library.training.ExtensionsManager(
                self.model, self.optimizer, iters_per_epoch=3, out_dir=self.out, **settings
            )
        else:
            updater = training.StandardUpdater(self.loader, self.optimizer, self.model)
            self.trainer = training.Trainer(updater, (stop, "epoch") if isinstance(stop, int) else stop, out=self.out)
        self.extend, self.get_extension = self.trainer.extend, self.trainer.get_extension

    def run(self):
        if not IS_PFN_EXTRAS:
            return self.trainer.run()
        while True:
            for x, t in self.loader:
                if self.trainer.stop_trigger:  # which counts, so it is asked once an iteration
                    return None
                with self.trainer.run_iteration():
                    self.optimizer.zero_grad()
                    self.model(x, t).backward()
                    self.optimizer.step()

    def rows(self):
        log = self.get_extension("LogReport").log
        return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log]


def iteration_of(trainer):
    return trainer.iteration if IS_PFN_EXTRAS else trainer.updater.iteration


def refused(function):
    """The name of the error, or the result."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


VALUES = [5.0, 4.0, 6.0, 3.0, 3.0, 2.5, 7.0, 8.0, 1.0, 9.0, 9.5, 0.5, 4.0, 4.0, 4.0, 4.0]


def fired(trigger, stop=5):
    """The iterations at which an extension with this trigger is called; a value of VALUES is reported in each."""
    run, called = Run(stop), []
    observe = extensions.observe_value("x", lambda trainer: VALUES[iteration_of(trainer) - 1])
    run.extend(observe, trigger=(1, "iteration"))
    run.extend(lambda trainer: called.append(iteration_of(trainer)), name="call", trigger=trigger)
    run.run()
    return called


def intervals():
    """`IntervalTrigger` and tuples."""
    return [fired(period) for period in ((1, "iteration"), (4, "iteration"), (1, "epoch"), (2, "epoch"), (0.5, "epoch"))]


def schedules():
    """`ManualScheduleTrigger` and `OnceTrigger`."""
    return [fired(triggers.ManualScheduleTrigger([2, 3, 11], "iteration")), fired(triggers.OnceTrigger())]


def best_values():
    """`MinValueTrigger`, `MaxValueTrigger` and `BestValueTrigger`."""
    made = [triggers.MinValueTrigger, triggers.MaxValueTrigger]
    found = [fired(trigger("x", period)) for trigger in made for period in ((1, "iteration"), (1, "epoch"))]
    return [*found, fired(triggers.BestValueTrigger("x", lambda best, new: new < 0.7 * best, (1, "iteration")))]


def best_values_kept():
    """`MinValue` and `MaxValue`: the best value of a run, and when it was."""
    run = Run(5)
    run.extend(extensions.observe_value("x", lambda trainer: VALUES[iteration_of(trainer) - 1]), trigger=(1, "iteration"))
    kept = [extensions.MinValue("x", (1, "iteration")), extensions.MaxValue("x", (1, "epoch"))]
    for extension in kept:
        run.extend(extension)
    run.run()
    return [[extension.best_value, extension.best_iteration, extension.best_epoch] for extension in kept]


def early_stopping():
    """`EarlyStoppingTrigger`: the iteration at which the run ends."""
    stops = [(mode, patience) for mode in ("min", "max") for patience in (1, 3)]
    return [
        fired((1, "iteration"), triggers.EarlyStoppingTrigger((1, "iteration"), "x", patience, mode, False, (5, "epoch")))[
            -1
        ]
        for mode, patience in stops
    ]


def rows_of_a_run():
    """`LogReport`, `observe_value`, `MicroAverage` and the trained parameters."""
    run = Run(4)
    for key, power in (("a", 1), ("b", 2)):
        observe = extensions.observe_value(key, lambda trainer, power=power: float(iteration_of(trainer) ** power))
        run.extend(observe, trigger=(1, "iteration"))
    run.extend(extensions.MicroAverage("a", "b", "ratio"))
    run.extend(extensions.LogReport())
    run.run()
    return [run.rows(), run.model.w.tolist()]


def evaluation():
    """`Evaluator(loader, model, eval_func=f)`, over batches of one size."""
    run = Run(2)
    function = lambda x, t: report({"twice": 2 * float(run.model(x, t).detach())}, run.model)  # noqa: E731
    settings = {"progress_bar": False} if IS_PFN_EXTRAS else {}
    run.extend(extensions.Evaluator(data(8), run.model, eval_func=function, **settings))
    run.extend(extensions.LogReport())
    run.run()
    return run.rows()


def learning_rates():
    """`LRScheduler(scheduler)`: the rate in each update, one step of the scheduler an epoch."""
    run, rates = Run(4), []
    run.extend(extensions.LRScheduler(torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)))
    run.extend(lambda trainer: rates.append(run.optimizer.param_groups[0]["lr"]), name="look", priority=400)
    run.run()
    return rates


def parameter_statistics():
    """`ParameterStatistics`: the means of the parameters and gradients of an epoch."""
    run = Run(2)
    statistics = {"mean": torch.mean, "max": torch.max}
    run.extend(extensions.ParameterStatistics(run.model, statistics, prefix="here", trigger=(1, "epoch")))
    run.extend(extensions.LogReport())
    run.run()
    return [sorted(value for key, value in row.items() if "/grad/" in key or "/data/" in key) for row in run.rows()]


def snapshots():
    """`snapshot(n_retains=2)`: the names in `out`."""
    run = Run(5)
    run.extend(extensions.snapshot(n_retains=2), trigger=(1, "epoch"))
    run.run()
    return sorted(name for name in os.listdir(run.out) if re.fullmatch(r"snapshot_iter_\d+", name))


def autoload():
    """`snapshot(autoload=True)`: a run of 2 epochs, and one that continues it to 4."""
    ends = []
    for epochs in (2, 4):
        run = Run(epochs, "result")
        run.extend(extensions.LogReport())
        run.extend(extensions.snapshot(autoload=True), trigger=(1, "epoch"))
        run.run()
        ends.append([iteration_of(run.trainer), run.rows(), run.model.w.tolist()])
    return ends


def decorated():
    """`make_extension`, priorities, initializer and finalizer."""
    run, called = Run(1), []

    @make_extension(
        (2, "iteration"),
        priority=250,
        finalizer=lambda *_: called.append("end"),
        initializer=lambda _: called.append("begin"),
    )
    def look(trainer):
        called.append(iteration_of(trainer))

    run.extend(look)
    run.extend(lambda _: called.append("then"), name="then", trigger=(2, "iteration"))
    run.run()
    return called


def summaries():
    """`Summary() + Summary()`, and of `DictSummary`: means and deviations of the values of both."""
    first, second, of_dicts = Summary(), Summary(), [DictSummary(), DictSummary()]
    for number, (summary, of_dict) in enumerate(zip((first, second), of_dicts, strict=True)):
        for value in (0.5, 2.0, 3.0 + number):
            summary.add(value, weight=1 + number)
            of_dict.add({"a": value, f"only {number}": value**2})
    statistics = (of_dicts[0] + of_dicts[1]).make_statistics()
    return [[float(x) for x in (first + second).make_statistics()], {key: float(x) for key, x in statistics.items()}]


def differs_evaluation():
    """`Evaluator`: the mean over batches of 4 and 1 examples."""
    run = Run(1)
    loader = DataLoader(torch.arange(5.0), 4)
    settings = {"progress_bar": False} if IS_PFN_EXTRAS else {}
    function = lambda x: report({"mean": x.mean().item()}, run.model)  # noqa: E731
    run.extend(extensions.Evaluator(loader, run.model, eval_func=function, **settings))
    run.extend(extensions.LogReport())
    run.run()
    return run.rows()[0]["validation/main/mean"]


def differs_observe_lr():
    """`observe_lr(optimizer)`."""
    return refused(lambda: extensions.observe_lr(Run(1).optimizer) and "made")


def differs_check_grad():
    """`FailOnNonNumber(check_grad=False)`."""
    return refused(lambda: extensions.FailOnNonNumber(check_grad=False) and "made")


def differs_micro_average():
    """`MicroAverage` extended with a trigger: the iterations with a result."""
    run, seen = Run(2), []
    for key in ("a", "b"):
        run.extend(extensions.observe_value(key, lambda trainer: 1.0), trigger=(1, "iteration"))
    run.extend(extensions.MicroAverage("a", "b", "ratio"), trigger=(2, "iteration"))
    look = lambda trainer: seen.append(iteration_of(trainer)) if "ratio" in trainer.observation else None  # noqa: E731
    run.extend(look, name="look")
    run.run()
    return seen


def differs_scheduler():
    """`LRScheduler(scheduler, trigger=t, stepper=f)`."""
    run = Run(1)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    settings = {"trigger": (1, "iteration"), "stepper": lambda manager, scheduler: scheduler.step()}
    return [refused(lambda k=key: extensions.LRScheduler(scheduler, **{k: settings[k]}) and "made") for key in settings]


def differs_writer():
    """`snapshot(writer=)`."""
    writer = library.writing.SimpleWriter() if IS_PFN_EXTRAS else None
    return refused(lambda: extensions.snapshot(writer=writer) and "made")


def differs_log_format():
    """`LogReport(filename="log.jsonl")`: the names in `out`, and the first character of the file."""
    run = Run(1)
    run.extend(extensions.LogReport(filename="log.jsonl"))
    run.run()
    with open(os.path.join(run.out, "log.jsonl")) as file:
        return [sorted(name for name in os.listdir(run.out) if name.startswith("log")), file.read(1)]


def differs_lazy_value():
    """`report({"x": lambda: v})`."""
    run, seen = Run(1), []
    run.extend(
        make_extension(priority=300)(lambda _: seen.append(refused(lambda: report({"x": lambda: 1.0}) or "reported")))
    )
    run.run()
    return seen[0]


def differs_may_fire():
    """`trigger.may_fire(iteration, epoch_length)`."""
    return hasattr(triggers.IntervalTrigger, "may_fire")


def differs_evaluate_alone():
    """`evaluator.evaluate()` of an evaluator that nobody has named: the keys."""
    run = Run(1)
    settings = {"progress_bar": False} if IS_PFN_EXTRAS else {}
    evaluator = extensions.Evaluator(data(), run.model, **settings)
    outside = refused(lambda: sorted(evaluator.evaluate()))
    with (library.reporting.Reporter() if IS_PFN_EXTRAS else Reporter()).scope({}):
        inside = refused(lambda: sorted(evaluator.evaluate()))
    return [outside, inside]


def differs_name():
    """`evaluator.name`: of a registered evaluator, in its evaluation."""
    run, seen = Run(1), []
    settings = {"progress_bar": False} if IS_PFN_EXTRAS else {}
    evaluator = extensions.Evaluator(
        data(), run.model, eval_hook=lambda each: seen.append(getattr(each, "name", "none")), **settings
    )
    run.extend(evaluator, name="val")
    run.run()
    return seen


def differs_plot_report():
    """`PlotReport.available()`."""
    return refused(lambda: type(extensions.PlotReport.available()).__name__)


def differs_once():
    """`OnceTrigger`, asked before the first update."""
    return triggers.OnceTrigger()(Run(1).trainer)


def differs_print_report():
    """`PrintReport()`: the titles of its table."""
    run, out = Run(1), io.StringIO()
    run.extend(extensions.LogReport())
    run.extend(extensions.PrintReport(out=out))
    run.run()
    return [key for key in ("main/loss", "epoch", "iteration", "elapsed_time") if key in out.getvalue()]


def differs_missing_value():
    """`BestValue` and `MinValueTrigger` of a key that is not reported."""
    ends = []
    for extension, trigger in ((extensions.MinValue("no"), None), (lambda _: None, triggers.MinValueTrigger("no"))):
        run = Run(1)
        run.extend(extension, name="best", **({} if trigger is None else {"trigger": trigger}))
        ends.append(refused(lambda run=run: run.run() or "ran"))
    return ends


def differs_plateau():
    """`LRScheduler(ReduceLROnPlateau(...))` of a value that is not reported."""
    run = Run(1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    settings = {} if IS_PFN_EXTRAS else {"monitor": "validation/main/loss"}
    run.extend(extensions.LogReport())
    run.extend(extensions.LRScheduler(plateau, **settings))
    return refused(lambda: run.run() or "ran")


def differs_mode():
    """`EarlyStoppingTrigger(monitor="reward")` without a mode."""
    return refused(lambda: triggers.EarlyStoppingTrigger(monitor="reward") and "made")


def differs_snapshot_file():
    """`snapshot()` writes a file, or a directory: is it a directory?"""
    run = Run(1)
    run.extend(extensions.snapshot())
    run.run()
    return os.path.isdir(os.path.join(run.out, "snapshot_iter_3"))


def main():
    results, home, found = {}, os.getcwd(), inspect.getmembers(sys.modules["__main__"], inspect.isfunction)
    first = intervals.__code__.co_firstlineno
    for name, program in found:
        if program.__module__ != "__main__" or program.__code__.co_firstlineno < first or program is main:
            continue
        os.chdir(tempfile.mkdtemp(dir=home))
        try:
            results[name] = program()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    os.chdir(home)
    with open(OUT, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
