"""The values that shifts set."""

from either import extensions, make_trainer, setting, training


def _values(shift, trigger=(1, "iteration"), lr=0.1, stop=(14, "iteration")):
    """The learning rate in each update, and after the last."""
    trainer, _ = make_trainer(stop, lr=lr)
    trainer.extend(shift, trigger=trigger)
    values = []

    @training.make_extension(priority=-1)
    def look(trainer):
        values.append(setting(trainer.updater.get_optimizer("main"), "lr"))

    trainer.extend(look)
    trainer.run()
    return values


def exponential():
    """`ExponentialShift`, with and without `init` and `target`, down and up, each iteration and each epoch."""
    return [
        _values(extensions.ExponentialShift("lr", 0.5)),
        _values(extensions.ExponentialShift("lr", 0.5, init=2.0)),
        _values(extensions.ExponentialShift("lr", 0.5, init=2.0, target=0.3)),
        _values(extensions.ExponentialShift("lr", 2.0, target=1.0)),
        _values(extensions.ExponentialShift("lr", 0.9), (1, "epoch")),
    ]


def inverse():
    """`InverseShift`, with and without `init` and `target`."""
    return [
        _values(extensions.InverseShift("lr", 0.5, 0.75)),
        _values(extensions.InverseShift("lr", 0.5, 0.75, init=2.0, target=0.9)),
    ]


def linear():
    """`LinearShift`, down, up and in one step."""
    return [
        _values(extensions.LinearShift("lr", (1.0, 0.1), (3, 9))),
        _values(extensions.LinearShift("lr", (0.1, 1.0), (0, 4))),
        _values(extensions.LinearShift("lr", (0.5, 0.25), (1, 2)), (1, "epoch")),
    ]


def multistep():
    """`MultistepShift` at several steps."""
    return [_values(extensions.MultistepShift("lr", 0.1, [3, 5, 9], 1.0))]


def polynomial():
    """`PolynomialShift`, to 0 and to a target."""
    return [
        _values(extensions.PolynomialShift("lr", 2, 10)),
        _values(extensions.PolynomialShift("lr", 0.5, 16, init=2.0, target=0.7)),
    ]


def step():
    """`StepShift`, with and without `init` and `target`."""
    return [
        _values(extensions.StepShift("lr", 0.5, 3)),
        _values(extensions.StepShift("lr", 0.5, 4, init=1.0, target=0.3)),
    ]


def warmup():
    """`WarmupShift`, then left alone."""
    return [_values(extensions.WarmupShift("lr", 0.01, 5, 1.0))]
