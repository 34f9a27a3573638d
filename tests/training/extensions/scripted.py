"""An updater that only counts and reports, for tests of what extensions make of it."""

from chainring import report, training


class Counting(training.Updater):
    """Reports one given observation an update; an epoch is a number of updates."""

    def __init__(self, observations=(), epoch_length=1, weights=None):
        self.observations = list(observations)
        self.epoch_length = epoch_length
        self.weights = weights

    @property
    def epoch(self):
        return self.iteration // self.epoch_length

    @property
    def epoch_detail(self):
        return self.iteration / self.epoch_length

    def update_core(self):
        if self.iteration < len(self.observations):
            report(self.observations[self.iteration])
        if self.weights is not None:
            self.weight = self.weights[self.iteration]


def trainer_of(updater, length, out, *extensions, state=None):
    """A trainer of that many iterations, continued from a state if one is given."""
    trainer = training.Trainer(updater, (length, "iteration"), out=out, extensions=extensions)
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def run(updater, length, out, *extensions, state=None):
    """The same, run to its end."""
    trainer = trainer_of(updater, length, out, *extensions, state=state)
    trainer.run()
    return trainer


class StateAt(training.Extension):
    """Keeps the state of the trainer as it was after one iteration."""

    is_snapshot = True

    def __init__(self, iteration):
        self.iteration = iteration
        self.state = None

    def __call__(self, trainer):
        if trainer.updater.iteration == self.iteration:
            self.state = trainer.state_dict()
