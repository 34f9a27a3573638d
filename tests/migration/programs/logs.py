"""Reported values, their means, and the rows of a log."""

import io
import json
import os

import numpy as np
from either import (
    LOG_NAME,
    DictSummary,
    Line,
    Reporter,
    Summary,
    extensions,
    has_graph,
    is_training,
    iterators,
    make_trainer,
    points,
    report,
    rows,
    to_list,
)  # fmt: skip


def rows_of_a_run():
    """`LogReport`: the means of a run of 4 epochs whose epochs are of 3, 2, 3 and 2 batches; the trained parameters."""
    trainer, model = make_trainer((4, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.run()
    with open(os.path.join(trainer.out, "log")) as file:
        written = [{key: value for key, value in row.items() if key != "elapsed_time"} for row in json.load(file)]
    return [rows(trainer), written, to_list(model.w)]


def settings_of_a_log():
    """`LogReport(keys, trigger, postprocess)`, and its file's name."""
    trainer, _ = make_trainer((4, "epoch"))
    add = lambda row: row.update(twice=2 * row["main/loss"])  # noqa: E731 - as scripts write it
    trainer.extend(extensions.LogReport(["main/loss"], (3, "iteration"), add, **{LOG_NAME: "other.json"}))
    trainer.run()
    return [rows(trainer), os.path.exists(os.path.join(trainer.out, "other.json"))]


def two_logs():
    """A second `LogReport` is called `LogReport_1`."""
    trainer, _ = make_trainer((2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.LogReport(trigger=(2, "iteration"), **{LOG_NAME: "often"}))
    trainer.run()
    return [rows(trainer), rows(trainer, "LogReport_1")]


def evaluation():
    """`Evaluator` over batches of one size: `validation/main/loss` in the row; and under another name."""
    trainer, model = make_trainer((3, "epoch"))
    for name in (None, "again"):
        test = iterators.SerialIterator(points(8), 4, repeat=False, shuffle=False)
        trainer.extend(extensions.Evaluator(test, model), name=name)
    trainer.extend(extensions.LogReport())
    trainer.run()
    return rows(trainer)


def evaluation_function():
    """`Evaluator(eval_func=)`, which is called with a batch, and `eval_hook`, which is called before."""
    trainer, model = make_trainer((2, "epoch"))
    hooks = []
    test = iterators.SerialIterator(points(8), 4, repeat=False, shuffle=False)

    def evaluate(x, t):
        report({"double": 2 * model(x, t)}, model)

    trainer.extend(extensions.Evaluator(test, model, eval_func=evaluate, eval_hook=lambda evaluator: hooks.append(1)))
    trainer.extend(extensions.LogReport())
    trainer.run()
    return [rows(trainer), hooks]


def observed():
    """`observe_value` and `observe_lr` of SGD, in the row."""
    trainer, _ = make_trainer((2, "epoch"))
    trainer.extend(
        extensions.observe_value("square", lambda trainer: trainer.updater.iteration**2), trigger=(1, "iteration")
    )
    trainer.extend(extensions.observe_lr())
    trainer.extend(extensions.LogReport())
    trainer.run()
    return rows(trainer)


def table():
    """`PrintReport`: the cells of its table."""
    trainer, _ = make_trainer((3, "epoch"))
    out = io.StringIO()
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "main/loss"], out=out))
    trainer.run()
    return [line.split() for line in out.getvalue().replace("\033[J", "").splitlines()]


def micro_average():
    """`MicroAverage` of a numerator and a denominator."""
    trainer, _ = make_trainer((2, "epoch"))
    for key, power in (("a", 1), ("b", 2)):
        observe = extensions.observe_value(key, lambda trainer, power=power: trainer.updater.iteration**power)
        trainer.extend(observe, trigger=(1, "iteration"))
    trainer.extend(extensions.MicroAverage("a", "b", "ratio", (2, "iteration")))
    trainer.extend(extensions.LogReport())
    trainer.run()
    return rows(trainer)


def reporter():
    """`Reporter`: observers, prefixes, scopes, and a report by name."""
    reporter, model, other = Reporter(), Line(), Line()
    reporter.add_observer("main", model)
    reporter.add_observer("group/first", other)
    outer, inner = {}, {}
    with reporter.scope(outer):
        report({"a": 1.0}, model)
        with reporter.scope(inner):
            report({"b": 2.0}, other)
        reporter.report({"c": 3.0})
    report({"nowhere": 0.0})
    return [outer, inner]


def summaries():
    """`Summary` and `DictSummary`: means and standard deviations."""
    summary, several = Summary(), DictSummary()
    for value in (1.0, 2.0, 4.5):
        summary.add(value)
        several.add({"a": value, "b": np.float32(2 * value)})
    several.add({"b": 1.0})
    return [
        float(summary.compute_mean()), [float(x) for x in summary.make_statistics()],
        {key: float(x) for key, x in several.compute_mean().items()},
        {key: float(x) for key, x in several.make_statistics().items()},
    ]  # fmt: skip


def mode_of_an_evaluation():
    """`using_config("train", False)`, `no_backprop_mode()`: an `Evaluator` does both, and only while it evaluates."""
    trainer, model = make_trainer((1, "epoch"))
    seen = []
    test = iterators.SerialIterator(points(4), 4, repeat=False, shuffle=False)
    look = lambda x, t: seen.append([is_training(model), has_graph(model(x, t))])  # noqa: E731
    trainer.extend(extensions.Evaluator(test, model, eval_func=look))
    trainer.run()
    return [seen, is_training(model)]
