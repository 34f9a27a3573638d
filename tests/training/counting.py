"""Updaters that count and do nothing else, and what the tests of the loop ask of a run."""

from chainring import iterators, training


class CountingUpdater(training.Updater):
    """Counts iterations; an epoch has ``per_epoch`` of them, which need be no whole number."""

    def __init__(self, per_epoch=10):
        self.per_epoch = per_epoch
        self.finalized = 0

    @property
    def epoch(self):
        return int(self.epoch_detail)

    @property
    def epoch_detail(self):
        return self.iteration / self.per_epoch

    def update_core(self):
        pass

    def finalize(self):
        self.finalized += 1


class DataUpdater(training.Updater):
    """Takes a batch of whole numbers from a real iterator at every update."""

    def __init__(self, examples=10, batch_size=1, repeat=True):
        self.source = iterators.SerialIterator(list(range(examples)), batch_size, repeat=repeat, seed=0)
        self.batches = []

    def get_iterator(self, name):
        return {"main": self.source}[name]

    def update_core(self):
        self.batches.append(list(self.source.next()))


class UncountedUpdater(training.Updater):
    """Has no iterator and no epochs of its own."""

    def update_core(self):
        pass


class Fires:
    """An extension that keeps the iterations at which it was called."""

    def __init__(self):
        self.iterations = []

    def __call__(self, trainer):
        self.iterations.append(trainer.updater.iteration)


def a_trainer(out, updater=None, stop=None):
    """A trainer that writes into ``out``."""
    return training.Trainer(CountingUpdater() if updater is None else updater, stop, str(out))


def answers(trigger, trainer, iterations):
    """What a trigger answers in each of so many iterations, asked once in each."""
    given = []
    for _ in range(iterations):
        trainer.updater.update()
        given.append(trigger(trainer))
    return given


def pattern(letters):
    """``"F T F"`` as a list of booleans."""
    return [letter == "T" for letter in letters.split()]


def fires_in_run(out, trigger, iterations, updater=None):
    """The iterations at which a trigger fires in a whole run."""
    trainer, fires = a_trainer(out, updater, (iterations, "iteration")), Fires()
    trainer.extend(fires, trigger=trigger)
    trainer.run()
    return fires.iterations
