"""When triggers fire."""

from either import extensions, make_trainer, trained, triggers

VALUES = [5.0, 4.0, 6.0, 3.0, 3.0, 2.5, 7.0, 8.0, 1.0, 9.0, 9.5, 0.5, 4.0, 4.0, 4.0, 4.0]


def _fired(trigger, stop=(15, "iteration"), key="x"):
    """The iterations at which an extension with this trigger is called; a value of VALUES is reported in each."""
    trainer, _ = make_trainer(stop)
    fired = []
    observe = extensions.observe_value(key, lambda trainer: VALUES[trainer.updater.iteration - 1])
    trainer.extend(observe, trigger=(1, "iteration"))
    trainer.extend(lambda trainer: fired.append(trainer.updater.iteration), name="call", trigger=trigger)
    trainer.run()
    return fired


def interval():
    """`(n, "iteration")` and `(n, "epoch")`, also with a fraction of an epoch, as tuples and as `IntervalTrigger`."""
    periods = [
        (1, "iteration"),
        (4, "iteration"),
        (1, "epoch"),
        (2, "epoch"),
        (0.5, "epoch"),
        (0.3, "epoch"),
        (1.5, "epoch"),
    ]
    return [[_fired(period), _fired(triggers.IntervalTrigger(*period))] for period in periods]


def manual_schedule():
    """`ManualScheduleTrigger` of one point, of several, in iterations and epochs."""
    points = [(3, "iteration"), ([2, 3, 11], "iteration"), ([1, 3], "epoch"), ([0.5, 2.2], "epoch")]
    return [_fired(triggers.ManualScheduleTrigger(*point)) for point in points]


def once():
    """`OnceTrigger` fires at the first iteration, and never again."""
    return _fired(triggers.OnceTrigger())


def best_value():
    """`MinValueTrigger`, `MaxValueTrigger` and `BestValueTrigger`, each iteration, each fourth, each epoch."""
    fired = []
    for period in ((1, "iteration"), (4, "iteration"), (1, "epoch")):
        fired.append(_fired(triggers.MinValueTrigger("x", period)))
        fired.append(_fired(triggers.MaxValueTrigger("x", period)))
        fired.append(_fired(triggers.BestValueTrigger("x", lambda best, new: new < 0.7 * best, period)))
    return fired


def early_stopping():
    """`EarlyStoppingTrigger`: the iteration at which a run ends, by each mode and patience."""
    ends = []
    for key, mode in (("x", "min"), ("x", "max"), ("loss", "auto"), ("accuracy", "auto")):
        for patience in (1, 2, 3, 5):
            stop = triggers.EarlyStoppingTrigger(
                (1, "iteration"), monitor=key, patience=patience, mode=mode, max_trigger=(14, "iteration")
            )
            ends.append(len(_fired((1, "iteration"), stop, key)))
    return ends


def early_stopping_default():
    """`EarlyStoppingTrigger()` with the mean of an epoch, which `max_trigger` ends at last."""
    trainer, _ = make_trainer(triggers.EarlyStoppingTrigger(max_trigger=(6, "epoch")))
    return trained(trainer)
